r"""`math_verify`: the lenient grader: 1 when Hugging Face's math-verify holds the answer for equal to the
label, else 0.

Looks, in this order, at the last `\boxed{...}`, the text after the last "Answer:" or "####", the last
`$...$`, the last number. Unlike `math` it accepts 2/4 for 1/2 and 2^3 for 8. Its sympy trees are built by
the library's LaTeX grammar, never by `parse_expr`, and only from text that passes `_harmless`."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from ppo_lightning.rewards import register
from ppo_lightning.rewards.answers import equal, label_answer, last_box
from ppo_lightning.rewards.latex import MAX_DEPTH

TAIL_CHARS = 4_000
MAX_CHARS = 300

_MARKED = re.compile(r"(?:answer[ \t]*:|####)[ \t]*([^\n]+)", re.IGNORECASE)
_INLINE = re.compile(r"\$([^$\n]+)\$")
_NUMBER = re.compile(r"-?[0-9]{1,40}(?:[.,/][0-9]{1,40})*")
_NUMBER_AND_WORDS = re.compile(rf"({_NUMBER.pattern})(?: [A-Za-z]+)+\.?")  # "42 dollars"
# What sympy would compute at length: towers, long exponents, factorials, sums, products, integrals, limits.
_COSTLY = re.compile(
    r"\^[^-+*/=,&]{0,80}\^|\*\*|\^\s*\{?\s*[-+]?[0-9]{3}|[0-9]{60}|!"
    r"|\\(?:sum|prod|int|iint|oint|lim|binom|dbinom|tbinom|choose|bigcup|bigcap|log|det|mod|operatorname|lcm|gcd)"
)


def final_answer(response: str) -> str | None:
    """The candidate for the answer; None when the response holds none."""
    box = last_box(response)
    if box is not None:
        return box
    tail = response[-TAIL_CHARS:]
    if "\\boxed{" in tail or "\\fbox{" in tail:  # an open box, or a frame: an answer begun, not given
        return None
    for pattern in (_MARKED, _INLINE, _NUMBER):
        if found := pattern.findall(tail):
            answer = found[-1].replace("<|im_end|>", "").strip()
            with_words = _NUMBER_AND_WORDS.fullmatch(answer)
            return with_words[1] if with_words else answer
    return None


def _harmless(answer: str) -> bool:
    depth = deepest = 0
    for char in answer[: MAX_CHARS + 1]:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    return len(answer) <= MAX_CHARS and deepest <= MAX_DEPTH // 4 and not _COSTLY.search(answer)


@lru_cache(maxsize=1024)
def _parsed(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    text = answer.replace("$", "")
    return parse(f"$\\boxed{{{text}}}$", [LatexExtractionConfig()], parsing_timeout=None)


@register("math_verify", sandboxed=True, seconds=2.0)
def math_verify(response: str, label: Any) -> float:
    given, truth = final_answer(response), label_answer(label)
    if given is None or not truth:
        return 0.0
    if equal(given, truth):
        return 1.0
    if not _harmless(given) or not _harmless(truth):
        return 0.0
    return float(_verify(given, truth))


def _verify(given: str, truth: str) -> bool:
    from math_verify import verify

    return verify(_parsed(truth), _parsed(given), timeout_seconds=None)


def warm_up() -> None:
    """Import sympy and build the LaTeX grammar, which takes over a second."""
    # The library warns that its own SIGALRM timer is off; the sandbox's limit stands in for it.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    _verify("\\frac{x+1}{2}", "\\sqrt{2}")
