"""Responses scored per second, by reward: `python benchmarks/rewards.py [count]`.

The aims, on two idle cores: 2,000 ordinary responses a second, 1,000 hostile ones in less than 60 s."""

from __future__ import annotations

import random
import sys
import time

from ppo_lightning import rewards
from ppo_lightning.rewards.sandbox import default_workers

NAMES = ("deepscaler", "math", "dapo", "gsm8k", "f1", "math_verify")
RESPONSE_CHARS = 4_000  # about 1,000 tokens of reasoning
FILLER = "Let us add the two numbers and carry the one, then check the sum again. "

LONG = 100_000
DIGITS = "9" * 3_000_000
# What a policy under pressure, or a malicious data set, might put where an answer belongs.
CORES = [
    "9**9**9**9",
    "9^9^9^9",
    "9^{9^{9^{9}}}",
    "(9^9)^(9^9)",
    "2^(2^(2^(2^2^2)))",
    "x^9999999999",
    "pi^pi^pi^pi",
    "e^(e^(e^(e^e)))",
    "exp(exp(exp(exp(9))))",
    "tan(1.5707963267948966)^9999",
    "arcsin(10^300)",
    "cos(10^4000)",
    "(10^4000)^4",
    "10^20000",
    "10^19999*10^19999",
    "((x+1)^200)*((x+2)^199)",
    "x^(y^(z^w))",
    "i^i^i^i",
    "log(0)",
    "ln(ln(1))",
    "0/0",
    "1/(1/(1/(1/0)))",
    "1e999",
    "1e999999999",
    "1E+" + "9" * 1000,
    "100000!",
    "9999!!!!",
    "\\sum_{i=1}^{10^9} i",
    "\\int_0^\\infty e^{-x^2}dx",
    "\\binom{10^9}{10^8}",
    "\\begin{pmatrix}" + "1&" * LONG + "\\end{pmatrix}",
    "{" * LONG + "1" + "}" * LONG,
    "{" * LONG,
    "(" * LONG + "1" + ")" * LONG,
    "(" * 100 + "1" + ")" * 100,
    "\\frac{" * LONG,
    "\\frac{" * 30 + "1" + "}{2}" * 30,
    "\\sqrt{" * LONG + "1" + "}" * LONG,
    "\\sqrt" * LONG,
    "sqrt(" * 60 + "2" + ")" * 60,
    "sin(" * 29 + "2" + ")" * 29,
    "-" * LONG + "1",
    "-" * 300 + "1",
    "1" + "+1" * LONG,
    "1" + "+1" * 90,
    "^" * LONG,
    "2" + "^2" * LONG,
    "2" + "^2" * 60,
    "1" + " " * LONG + "2",
    DIGITS,
    "0." + DIGITS,
    DIGITS + "/" + DIGITS,
    "9" * 19_000,
    "9" * 1900,
    "9" * 390 + "^999",
    "1/" + "0" * 100,
    "__import__('os').system('touch PWNED')",
    "().__class__.__bases__[0].__subclasses__()",
    "exec('import os')",
    "{}.format.__globals__",
    "{0.__class__.__init__.__globals__}",
    "%s%s%s%n%n%n",
    "%(x)s",
    "{{7*7}}",
    "${7*7}",
    "\x00",
    "4\x002",
    "\x00" * LONG,
    "\ud800",
    "\udfff42",
    "42\ud83d",
    "\u202e42",
    "\u200f42\u200e",
    "٤٢",
    "４２",
    "1²",
    "½",
    "\u0130" * 1000,
    "a" * LONG,
    "a" * 50 + "!",
    "(a+)+$" + "a" * 5000,
    "1," * LONG,
    "1,234" * LONG,
    "," * LONG,
    " " * LONG,
    " or " * 20_000,
    "million" * LONG,
    "cm" * LONG,
    "\\text{" * LONG,
    "\\text{ " * LONG + "}" * LONG,
    "\\\\" * LONG,
    "$" * LONG,
    "%" * LONG,
    "\\%" * LONG,
    "_" * LONG,
    "=" * LONG,
    "7 3/4 " * 20_000,
    "\n" * LONG,
    "\r\n" * LONG,
    "1\n" * LONG,
    "<|im_end|>" * LONG,
    "Answer:" * LONG,
    "####" * LONG,
    "\\boxed" * LONG,
    "\\boxed{" * LONG,
    "</think>" * LONG,
]
WRAPS = (
    "<think>x</think>\\boxed{%s}", "%s</think>\\boxed{1}%s", "Answer: %s", "#### %s", "%s",
    "<think>x</think>$%s$ \\boxed{%s",
)  # fmt: skip
HOSTILE_LABELS = ("8", "7", "\\frac{1}{2}", "x+1", "9**9**9**8", "sqrt(2)")


def hostile(count: int) -> list[tuple[str, str]]:
    """`count` responses, each core in each place where a reward looks, with labels of every kind."""
    made = []
    for row in range(count):
        core, wrap = CORES[row % len(CORES)], WRAPS[row // len(CORES) % len(WRAPS)]
        made.append((wrap.replace("%s", core), HOSTILE_LABELS[row % len(HOSTILE_LABELS)]))
    return made


def answer(draw: random.Random) -> tuple[str, str]:
    """What a response boxes, and the label: integers mostly, as in the usual data sets, two of three
    right."""
    number = draw.randrange(1, 10_000)
    other = number if draw.random() < 0.67 else draw.randrange(1, 10_000)
    kind = draw.random()
    if kind < 0.7:
        return str(number), str(other)
    if kind < 0.85:
        return f"\\dfrac{{{number}}}{{7}}", f"\\frac{{{other}}}{{7}}"
    return f"{number}\\sqrt{{3}}+x", f"x+\\sqrt{{3}} \\cdot {other}"


def ordinary(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` responses of all rewards' forms at once, with labels."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        given, label = answer(draw)
        text = (FILLER * (RESPONSE_CHARS // len(FILLER)))[: RESPONSE_CHARS - draw.randrange(500)]
        ending = f"So it is \\boxed{{{given}}}.\nAnswer: {given}\n#### {given}"
        made.append((f"<think>{text}</think> {ending}", label))
    return made


def timed(name: str, work: list[tuple[str, str]]) -> tuple[float, list[rewards.Outcome]]:
    """Seconds that a reward takes for all of `work`, and what it gives."""
    started = time.perf_counter()
    outcomes = rewards.get(name).batch(work)
    return time.perf_counter() - started, outcomes


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    usual, bad = ordinary(count), hostile(1_000)
    print(f"{count} responses of about {RESPONSE_CHARS} characters, {len(bad)} hostile ones")
    print(f"{default_workers()} workers")
    for name in NAMES:
        timed(name, usual[:64])  # starts the workers
        seconds, outcomes = timed(name, usual)
        mean = sum(outcome.value for outcome in outcomes) / count
        worst, outcomes = timed(name, bad)
        timeouts = sum(outcome.timed_out for outcome in outcomes)
        print(
            f"{name:12s} {count / seconds:8.0f} a second, mean {mean:+.3f};"
            f" hostile in {worst:5.1f} s, {timeouts} timeouts"
        )


if __name__ == "__main__":
    main()
