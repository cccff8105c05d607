"""When a run is saved, which checkpoints are kept, and which is the best."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from ppo_lightning.loggers import MetricsCSV
from ppo_lightning.megatron.checkpoint import Retention, Shards, clean, iteration_of, resume_path

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.strategy import MegatronStrategy


class MegatronCheckpoint(ModelCheckpoint):
    """Saves `<dirpath>/iter_0000020` after rollout 20 (and the critic to its own place), and at the end of
    training.

    Lightning's `ModelCheckpoint` in what users expect of it: `monitor`, `mode`, `save_top_k`,
    `every_n_train_steps` (rollouts), `train_time_interval`, `save_last`, `best_model_path`,
    `ckpt_path="last"`. A checkpoint that is both the last and a best one is written once; the tracker file
    names the last. Unlike Lightning's: - `keep_checkpoints` newest ones stay beside the `save_top_k` best;
    None: with a monitor the last one, without
      what `save_top_k` says (-1: all, 1: the last one); -1: all.
    - a monitored metric under "eval/" counts only for the rollout after which it was measured.
    - nothing is saved on an exception: a save needs every rank, and one of them has failed.
    """

    FILE_EXTENSION = ""

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        monitor: str | None = None,
        mode: str = "max",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        keep_checkpoints: int | None = None,
        save_at_end: bool = True,
        **options: Any,
    ) -> None:
        for name in ("filename", "save_on_exception", "auto_insert_metric_name", "enable_version_counter"):
            if options.get(name):
                raise ValueError(f"MegatronCheckpoint has no {name}: checkpoints are called iter_<rollout>")
        super().__init__(
            dirpath=dirpath,
            filename="iter_{step:07d}",
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k if monitor is not None or save_top_k in (-1, 0, 1) else -1,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            auto_insert_metric_name=False,
            enable_version_counter=False,
            **options,
        )
        self.keep_checkpoints, self.save_at_end = keep_checkpoints, save_at_end
        self._evaluated: dict[str, float] = {}  # of the rollout just done
        self._evaluated_at = -1

    @classmethod
    def from_config(cls, config: PPOConfig) -> MegatronCheckpoint:
        """The checkpoints that a resolved configuration asks for."""
        model = config.model
        return cls(
            model.save,
            monitor=model.monitor,
            mode=model.monitor_mode,
            save_top_k=model.save_top_k if model.monitor is not None else -1,
            every_n_train_steps=model.save_interval or 0,
            keep_checkpoints=-1 if model.keep_checkpoints is None else model.keep_checkpoints,
        )

    # ---- when --------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero and stage == "fit":
            root = Path(str(self.dirpath))
            for place in (root, _strategy(trainer).io.critic_dir(root / "x").parent):
                clean(place)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        strategy = _strategy(trainer)
        if strategy.io.async_save:
            shards = Shards(strategy.roles, not self.save_weights_only, {}, strategy.resident)
            strategy.io.reserve(shards)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _strategy(trainer).finish_saves(wait=False)
        due = self._every_n_train_steps > 0 and trainer.global_step % self._every_n_train_steps == 0
        if (due or self._time_is_up(trainer)) and not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer)

    def on_eval_end(self, trainer: pl.Trainer, module: Any, results: dict[str, float]) -> None:
        self._evaluated, self._evaluated_at = dict(results), trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what is not saved yet, and wait for what is being written."""
        if self.save_at_end and self._unsaved(trainer):
            self._save(trainer)
        _strategy(trainer).finish_saves(wait=True)

    def _unsaved(self, trainer: pl.Trainer) -> bool:
        if self.save_top_k == 0 or self._should_skip_saving_checkpoint(trainer):
            return False
        last = trainer.strategy.broadcast(self._last_on_disk(trainer))
        return last is None or iteration_of(last) != trainer.global_step

    def _time_is_up(self, trainer: pl.Trainer) -> bool:
        if self._train_time_interval is None or self._last_time_checked is None:
            return False
        elapsed = time.monotonic() - self._last_time_checked
        due = trainer.strategy.broadcast(elapsed >= self._train_time_interval.total_seconds())
        if due:
            self._last_time_checked = time.monotonic()
        return due

    # ---- what --------------------------------------------------------------------------------------------

    def _save(self, trainer: pl.Trainer) -> None:
        """Save this rollout, if it is one of the best or the last is wanted anyway."""
        candidates = self._monitor_candidates(trainer)
        path = self.format_checkpoint_name(candidates)
        chosen = self._take_if_best(trainer, path, candidates)
        if not chosen and not (self.save_last and self.monitor is not None):
            return
        if self.monitor is None:
            self.best_model_path = path
        self.last_model_path = path
        best = {i for p in self.best_k_models if (i := iteration_of(p)) is not None}
        _strategy(trainer).io.retention = Retention(self._kept(), frozenset(best))
        self._save_checkpoint(trainer, path)

    def _take_if_best(self, trainer: pl.Trainer, path: str, candidates: dict[str, Tensor]) -> bool:
        """Enter this rollout among the best, where it belongs there."""
        if self.monitor is None:
            return self.save_top_k != 0
        score = self._fresh_score(trainer, candidates)
        if score is None or self.save_top_k == 0 or not self.check_monitor_top_k(trainer, score):
            return False
        if 0 < self.save_top_k <= len(self.best_k_models):
            self.best_k_models.pop(self.kth_best_model_path)
        self.current_score = score
        self.best_k_models[path] = score
        worst, best = (min, max) if self.mode == "max" else (max, min)
        self.kth_best_model_path = worst(self.best_k_models, key=lambda p: float(self.best_k_models[p]))
        self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = best(self.best_k_models, key=lambda p: float(self.best_k_models[p]))
        self.best_model_score = self.best_k_models[self.best_model_path]
        return True

    def _fresh_score(self, trainer: pl.Trainer, candidates: dict[str, Tensor]) -> Tensor | None:
        """The monitored metric, if it was measured after this rollout; a NaN counts as none."""
        assert self.monitor is not None
        if self.monitor.startswith("eval/") and self._evaluated_at != trainer.global_step:
            return None
        score = candidates.get(self.monitor)
        if score is None and self.monitor in self._evaluated:
            score = next(iter(candidates.values())).new_tensor(self._evaluated[self.monitor]).float()
        return None if score is None or bool(score.isnan()) else score

    def _kept(self) -> int | None:
        """How many of the newest stay; None: all."""
        if self.keep_checkpoints is not None:
            return None if self.keep_checkpoints < 0 else self.keep_checkpoints
        return None if self.monitor is None and self.save_top_k == -1 else 1

    # ---- what travels along ------------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The metrics of the rollout just done: Lightning gives them to the loggers only after the save."""
        logged = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("eval/")}
        checkpoint["metrics"] = logged

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.go_on(checkpoint["global_step"], checkpoint.get("metrics", {}))

    # ---- what Lightning calls itself ---------------------------------------------------------------------

    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._save(trainer)  # at the end of an epoch or of validation, where the user asked for that

    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Nothing: the last checkpoint is the one that the tracker names."""

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        last = self._last_on_disk(trainer)
        return set() if last is None else {str(last)}

    def _last_on_disk(self, trainer: pl.Trainer) -> Path | None:
        if self.dirpath is None:
            return None
        return resume_path(self.dirpath, auto_fallback=_strategy(trainer).io.auto_fallback)


def _strategy(trainer: pl.Trainer) -> MegatronStrategy:
    return trainer.strategy  # type: ignore[return-value]
