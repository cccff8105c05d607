"""Offload: actor, critic, reference and engine make room for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppo_lightning.hooks import PPOCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Prompt, Sample


class OffloadCallback(PPOCallback):
    """Puts the engine to sleep while the models train, with `--offload-rollout`. Which of the models is
    resident (`--offload-train`) is the strategy's part: it moves a role's state when the role's work begins
    and ends. Results are the same bit for bit with and without."""

    def __init__(self, rollout: bool) -> None:
        self.rollout = rollout

    def on_rollout_start(self, trainer: pl.Trainer, module: PPOModule, prompts: list[Prompt]) -> None:
        if self.rollout:
            module.engine.wake()

    def on_rollout_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        if self.rollout:
            module.engine.sleep()

    def on_weights_updated(self, trainer: pl.Trainer, module: PPOModule, version: int) -> None:
        if self.rollout:
            module.engine.wake()
