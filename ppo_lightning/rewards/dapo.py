r"""`dapo`: +1 when what follows the last "Answer:" in the last 300 characters equals the label, else -1
(DAPO, Yu et al. 2025), after Minerva's normalisation (Lewkowycz et al. 2022, appendix D.1).
`dapo_strict_box`: +1 when the last `\boxed{...}` of the last 100 characters is the label, letter for
letter."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from ppo_lightning.rewards import register

TAIL_CHARS = 300
BOX_TAIL_CHARS = 100
MAX_LABEL_CHARS = 20_000

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}",
    "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;",
    ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


def normalize(answer: str) -> str:
    """An answer without words, units and LaTeX dress."""
    text = answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        text = text.replace(before, after)
    for word in _REMOVED:
        text = text.replace(word, "")
    rest = text.partition("$")[2]
    if "$" in rest:
        text = rest.partition("$")[0]
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{([^}}]*)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


@lru_cache(maxsize=4096)
def _truth(label: str) -> tuple[str, Decimal | None]:
    """The label normalised, whole numbers in their one form; its value when it is a number that is not
    whole."""
    text = normalize(label[:MAX_LABEL_CHARS])
    if not _NUMBER.fullmatch(text):
        return text, None
    value = Decimal(text)
    if value != value.to_integral_value():
        return text, value
    return format(value.to_integral_value(), "f") if value else "0", None


@register("dapo", sandboxed=True)
def dapo(response: str, label: Any) -> float:
    found = _ANSWER.findall(response[-TAIL_CHARS:])
    truth, value = _truth(str(label))
    if not found or not truth:
        return -1.0
    given = normalize(found[-1])
    same_number = value is not None and _NUMBER.fullmatch(given) is not None and Decimal(given) == value
    return 1.0 if given == truth or same_number else -1.0


@register("dapo_strict_box", sandboxed=True)
def dapo_strict_box(response: str, label: Any) -> float:
    from ppo_lightning.rewards.answers import last_box

    return 1.0 if last_box(response[-BOX_TAIL_CHARS:]) == str(label) else -1.0
