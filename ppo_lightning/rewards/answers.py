"""Final answers of mathematics: finding them in a response, writing them in one form, comparing two.

Everything here is linear in the text, or works on text of bounded length, and evaluates nothing (see
`expressions`). The rules are those of the graders in use since MATH and PRM800K: two answers are equal when
their surface forms are, when their plain forms are, or when each part has the same value; an integer must
be given as one, a fraction reduced.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache

from ppo_lightning.rewards.expressions import same_value
from ppo_lightning.rewards.latex import command_argument, to_plain

MAX_ANSWER_CHARS = 20_000  # an answer longer than this is none
MAX_PARSED_CHARS = 2_000  # beyond it two answers are equal only when they are written alike

_UNITS = re.compile(
    r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)"
    r"(?:es)?s?[ ]*(?:\^[0-9]+)?"
)
_POWERS_OF_TEN = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
_GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_INTEGER = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?")
_FRACTION = re.compile(r"-?[0-9]+/[0-9]+")
_SLASH = re.compile(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))")
_SHORT_FRACTION = re.compile(r"\\frac(?:([^{\\])([^{\\])|([^{\\])(?=\{))")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\[])")
_MIXED = re.compile(r"(-?)([0-9]+) +([0-9]+/[0-9]+)")


def last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of `text`; None when there is none, or when it is open or too
    long."""
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("{", start + 6):
        return None
    return command_argument(text, start + 6, MAX_ANSWER_CHARS)


def label_answer(label: object) -> str:
    """The answer in a label: the box if it has one, else all of it."""
    text = str(label)
    if "\\boxed" in text or "\\fbox" in text:
        return last_box(text) or ""
    return text


@lru_cache(maxsize=8192)
def surface(answer: str) -> str:
    """The answer without its variants of notation: spacing, units, percent and currency signs, short
    fractions."""
    text = _unwrap_text(answer.strip())
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    for sign in ("^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(sign, "")
    text = text.partition("\\text{ ")[0]  # units stand on the right
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:  # "x = 5"
        text = right
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _SHORT_FRACTION.sub(_braced_fraction, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return _SLASH.sub(r"\\frac{\1}{\2}", text) if _SLASH.fullmatch(text) else text


def _braced_fraction(match: re.Match[str]) -> str:
    top, bottom, lone = match.groups()
    return f"\\frac{{{lone}}}" if lone else f"\\frac{{{top}}}{{{bottom}}}"


def _unwrap_text(answer: str) -> str:
    if answer.startswith("\\text{") and command_argument(answer, 5, len(answer)) == answer[6:-1]:
        return answer[6:-1].strip()
    return answer


@lru_cache(maxsize=8192)
def plain(answer: str) -> str:
    """The answer as lower-case text that the expression parser reads: no LaTeX, units, spaces; integers
    canonical."""
    text = _unwrap_text(answer.strip())
    for sign in ("\\%", "\\$", "$", "%"):
        text = text.replace(sign, "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _POWERS_OF_TEN.items():
        text = text.replace(word, factor)
    text = _UNITS.sub("", text).strip() or text  # "foot" alone is no unit
    text = text.replace(",\\!", "")
    text = to_plain(text) if "\\" in text or "{" in text or not text.isascii() else text
    text = re.sub("- +", "-", text.strip().lower())
    text = _MIXED.sub(r"\1(\2+\3)", text).replace(" ", "")
    return _number(_GROUPED.sub(lambda match: match[0].replace(",", ""), text))


def _number(text: str) -> str:
    """An integer in its one form, whatever way it was written ("042", "42.0", "4.2e1"); other text
    unchanged."""
    if not _DECIMAL.fullmatch(text):
        return text
    sign = "-" if text.startswith("-") else ""
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("-").lstrip("0")
        return sign + digits if digits else "0"
    value = Decimal(text)
    if value != value.to_integral_value():
        return text
    return format(value.to_integral_value(), "f") if value else "0"


def parts(text: str) -> list[str]:
    """The elements of a tuple or an interval; the text itself when it is neither."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return [text]
    found, depth, start = [], 0, 1
    for place in range(1, len(text) - 1):
        depth += (text[place] in "([") - (text[place] in ")]")
        if depth < 0:  # "(1)+(2)": the outer brackets are no pair
            return [text]
        if depth == 0 and text[place] == ",":
            found.append(text[start:place])
            start = place + 1
    return [*found, text[start:-1]] if found and depth == 0 else [text]


def equal(given: str, truth: str) -> bool:
    """Whether two answers are the same. An empty one equals nothing."""
    given, truth = given.strip(), truth.strip()
    if not given or not truth:
        return False
    if max(len(given), len(truth)) > MAX_PARSED_CHARS:
        return _alike(given) == _alike(truth)
    if (first := surface(given)) and first == surface(truth):
        return True
    one, two = plain(given), plain(truth)
    if not one or not two:
        return False
    return one == two or _parts_equal(parts(one), parts(two), one[0] + one[-1] == two[0] + two[-1])


def warm_up() -> None:
    """Do what only the first comparison does: import mpmath."""
    same_value("x+1", "sqrt(2)")


def _alike(answer: str) -> str:
    return _number(answer.replace(" ", "").replace(",", "")[:MAX_ANSWER_CHARS])


def _parts_equal(given: list[str], truth: list[str], same_brackets: bool) -> bool:
    if len(given) != len(truth) or (len(truth) > 1 and not same_brackets):
        return False
    return all(_part_equal(_number(one), _number(two)) for one, two in zip(given, truth))


def _part_equal(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(truth):
        return False  # a fraction that is not reduced is no final answer
    if _INTEGER.fullmatch(given) or _INTEGER.fullmatch(truth):
        return False  # nor is "2^3" for 8
    return same_value(given, truth)
