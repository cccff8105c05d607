"""`gsm8k`: 1 when the number after the last `####` (without one: the last number of the response) equals
the label's.

The label may be the data set's whole solution ("... #### 72") or the number alone."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from ppo_lightning.rewards import register

MARK = "####"
MAX_CHARS = 2_000  # looked at, from the end: far more than any answer line
# At most 40 digits a side: quadratic conversions stay cheap, and a longer run is no number of GSM8K.
_NUMBER = re.compile(r"-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,40})(?:\.[0-9]{1,40})?(?![0-9])")


def number(text: str) -> Decimal | None:
    """The answer in a solution: the first number after the last mark, or the last number of all."""
    _, mark, answer = text[-MAX_CHARS:].rpartition(MARK)
    found = _NUMBER.findall(answer)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", "").replace("$", ""))


@register("gsm8k", sandboxed=True)
def gsm8k(response: str, label: Any) -> float:
    given, truth = number(response), number(str(label))
    return float(given is not None and given == truth)
