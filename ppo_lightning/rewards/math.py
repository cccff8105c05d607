r"""`math`: 1 when the last `\boxed{...}` of the response equals the label, else 0. The response may have
any form."""

from __future__ import annotations

from typing import Any

from ppo_lightning.rewards import register
from ppo_lightning.rewards.answers import equal, label_answer, last_box, warm_up

__all__ = ["matches", "math", "warm_up"]


def matches(response: str, label: Any) -> bool:
    """Whether the last box of `response` equals the label, or one of the labels of a list."""
    given = last_box(response)
    if given is None:
        return False
    truths = label if isinstance(label, (list, tuple)) else [label]
    return any(equal(given, label_answer(truth)) for truth in truths)


@register("math", sandboxed=True)
def math(response: str, label: Any) -> float:
    return float(matches(response, label))
