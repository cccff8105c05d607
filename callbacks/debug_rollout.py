"""A run taken apart: keep the scored rollouts of one, train from them in another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ppo_lightning.hooks import PPOCallback
from ppo_lightning.loop import sample_from

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Prompt, Sample


class SaveRollouts(PPOCallback):
    """Writes every scored rollout to `path`, where `{rollout_id}` stands for its number."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        if trainer.is_global_zero:
            target = place(self.path, module.rollout.index)
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.save([asdict(s) | {"status": str(s.status)} for s in samples], target)


class LoadRollouts(PPOCallback):
    """Takes the place of the rollout callback: samples and rewards come from what SaveRollouts wrote; no
    engine runs. A missing file, or one with another number of samples than a rollout has, is a ValueError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_rollout_start(self, trainer: pl.Trainer, module: PPOModule, prompts: list[Prompt]) -> None:
        source = place(self.path, module.rollout.index)
        if not source.is_file():
            raise ValueError(
                f"--load-debug-rollout-data {source}: no such file; save it with"
                " --save-debug-rollout-data, or lower --num-rollout"
            )
        rows = torch.load(source, weights_only=True)
        wanted = len(prompts) * module.config.rollout.n_samples_per_prompt
        if len(rows) != wanted:
            raise ValueError(
                f"{source} holds {len(rows)} samples, a rollout here has {wanted}; give the"
                " --rollout-batch-size and --n-samples-per-prompt it was made with"
            )
        rank, world = trainer.global_rank, trainer.world_size
        mine = rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]
        module.rollout.samples = [sample_from(row) for row in mine]


def place(path: str, rollout: int) -> Path:
    """The file of a rollout."""
    return Path(path.replace("{rollout_id}", str(rollout)))
