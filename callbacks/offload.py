"""Offload: actor, critic, reference and engine make room for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ppo_lightning.hooks import PPOCallback
from ppo_lightning.samples import require

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Sample


class OffloadCallback(PPOCallback):
    """Lets the engine sleep, with `--offload-rollout`, while models are built and trained: from its start on,
    and from the last draw of each rollout on. It wakes when the weight-sync callback sends it weights. Which
    of the models is resident (`--offload-train`) is the strategy's part: it moves a role's state when the
    role's work begins and ends. Results are the same bit for bit with and without.

    Stands behind the rollout callback, whose engine it needs."""

    def __init__(self, rollout: bool) -> None:
        self.rollout = rollout

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.sleep(cast("PPOModule", pl_module))

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        self.sleep(module)

    def sleep(self, module: PPOModule) -> None:
        """Collective."""
        if self.rollout:
            require(module.engine, "module.engine", "RolloutCallback").sleep()
