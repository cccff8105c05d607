"""The actor's weights into the rollout engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ppo_lightning.hooks import PPOCallback
from ppo_lightning.samples import require

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Sample


class WeightSyncCallback(PPOCallback):
    """Wakes the engine and sends it the actor's weights: when training begins, after each update, and after a
    step without one before which the engine was put to sleep (it wakes without weights)."""

    def __init__(self) -> None:
        self._current = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.send(cast("PPOModule", pl_module))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.send(cast("PPOModule", pl_module))

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        self._current = not module.config.cluster.offload_rollout

    def on_weights_updated(self, trainer: pl.Trainer, module: PPOModule, version: int) -> None:
        self.send(module, version)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._current:  # a step of the critic alone
            self.send(cast("PPOModule", pl_module))

    def send(self, module: PPOModule, version: int | None = None) -> None:
        """Collective: every rank takes part, each fills its own engine."""
        engine = require(module.engine, "module.engine", "RolloutCallback")
        engine.wake()
        engine.update_weights(
            module.strategy.weights("actor"), module.weight_version if version is None else version
        )
        self._current = True
