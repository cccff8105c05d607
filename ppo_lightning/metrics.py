"""What is logged of a rollout: plain numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ppo_lightning.masked import moments
from ppo_lightning.samples import Experience, Sample, Status

if TYPE_CHECKING:
    from torch import Tensor


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`rollout/...` of a whole scored rollout."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    lengths = torch.tensor([s.response_length for s in samples], dtype=torch.float64)
    prompts = torch.tensor([len(s.tokens) - s.response_length for s in samples], dtype=torch.float64)
    share = lambda status: sum(s.status is status for s in samples) / len(samples)  # noqa: E731
    return {
        "rollout/reward": rewards.mean().item(),
        "rollout/reward_std": rewards.std(unbiased=False).item(),
        "rollout/reward_max": rewards.max().item(),
        "rollout/reward_min": rewards.min().item(),
        "rollout/response_length": lengths.mean().item(),
        "rollout/response_length_max": lengths.max().item(),
        "rollout/prompt_length": prompts.mean().item(),
        "rollout/truncated": share(Status.TRUNCATED),
        "rollout/aborted": share(Status.ABORTED),
        "rollout/failed": share(Status.FAILED),
    }


def experience_metrics(experience: Experience, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """`critic/...` of what the critic said before its update: means over trainable tokens of all data
    ranks."""
    if experience.old_values is None or experience.returns is None:
        return {}
    values, returns, mask = experience.old_values, experience.returns, experience.mask
    _, value_mean, _ = moments(values, mask, reduce)
    _, return_mean, variance = moments(returns, mask, reduce)
    _, _, unexplained = moments(returns - values, mask, reduce)
    return {
        "critic/value_mean": value_mean.item(),
        "critic/return_mean": return_mean.item(),
        # 1: the critic foresees every return; 0: no better than their mean, or all returns are equal
        "critic/explained_variance": (1.0 - unexplained / variance).item() if variance > 1e-12 else 0.0,
    }


def mean_of(reports: Sequence[dict[str, float]], prefix: str) -> dict[str, float]:
    """Mean of each metric over the optimizer steps that reported it; of steps skipped and taken alike."""
    names = dict.fromkeys(name for report in reports for name in report)
    return {
        f"{prefix}/{name}": sum(values) / len(values)
        for name in names
        if (values := [report[name] for report in reports if name in report])
    }
