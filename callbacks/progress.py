"""Progress: a bar on a terminal, a line a rollout elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule

SHOWN = {
    "rollout/reward": "reward",
    "rollout/response_length": "length",
    "critic/explained_variance": "critic ev",
    "train/ppo_kl": "kl",
    "perf/step_time": "s/step",
}


class ProgressCallback(ProgressBar):
    """Counts rollouts, shows the reward and, after each evaluation, the held-out results."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: tqdm | None = None
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: PPOModule) -> None:
        if self.enabled and trainer.is_global_zero and sys.stderr.isatty():
            self.bar = tqdm(total=trainer.max_steps, initial=trainer.global_step, desc="rollouts", unit="")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: PPOModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not (self.enabled and trainer.is_global_zero):
            return
        shown = {
            short: f"{float(trainer.callback_metrics[name]):.3g}"
            for name, short in SHOWN.items()
            if name in trainer.callback_metrics
        }
        if self.bar is not None:
            self.bar.update(trainer.global_step - self.bar.n)
            self.bar.set_postfix(shown)
        else:
            text = "  ".join(f"{short} {value}" for short, value in shown.items())
            self.write(f"rollout {trainer.global_step}/{trainer.max_steps}  {text}")

    def on_eval_end(self, trainer: pl.Trainer, module: PPOModule, results: dict[str, float]) -> None:
        if self.enabled and trainer.is_global_zero and results:
            text = "  ".join(f"{name} {value:.3f}" for name, value in results.items())
            self.write(f"evaluation after {trainer.global_step} rollouts  {text}")

    def teardown(self, trainer: pl.Trainer, pl_module: PPOModule, stage: str) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def write(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr) if self.bar is not None else print(
            line, file=sys.stderr, flush=True
        )
