"""A penalty for responses that near the maximal length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppo_lightning.hooks import PPOCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Sample


class OverlongCallback(PPOCallback):
    """Soft overlong punishment (DAPO, 2025): over the last `buffer` tokens before `longest` a penalty grows
    from 0 to `factor`. Only training responses are punished, not those of an evaluation."""

    def __init__(self, longest: int, buffer: int, factor: float = 1.0) -> None:
        self.longest, self.buffer, self.factor = longest, buffer, factor

    def penalty(self, length: int) -> float:
        """What a response of `length` tokens loses, at most 0."""
        beyond = length - (self.longest - self.buffer)
        return -self.factor * min(max(beyond / self.buffer, 0.0), 1.0)

    def on_rollout_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        for sample in samples:
            if not sample.failed:
                sample.add_reward(self.penalty(sample.response_length))
