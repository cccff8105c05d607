r"""`deepscaler`: the rule-based reward of DeepScaleR: 1 when the last `\boxed{...}` after the last
`</think>` (or, without one, between the first and second `###Response`) equals the label, else 0. A
response with neither marker scores 0."""

from __future__ import annotations

from typing import Any

from ppo_lightning.rewards import register
from ppo_lightning.rewards.math import matches, warm_up

__all__ = ["deepscaler", "warm_up"]

THINK_END = "</think>"
RESPONSE_MARK = "###Response"


@register("deepscaler", sandboxed=True)
def deepscaler(response: str, label: Any) -> float:
    _, mark, solution = response.rpartition(THINK_END)
    if not mark:
        _, mark, solution = response.partition(RESPONSE_MARK)
        solution = solution.partition(RESPONSE_MARK)[0]
    return float(bool(mark) and matches(solution, label))
