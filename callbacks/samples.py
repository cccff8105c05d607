"""A few scored samples of every rollout, to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lightning.hooks import PPOCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Sample


class SamplesCallback(PPOCallback):
    """Appends the first `count` samples of each rollout to `<output_dir>/samples.jsonl`. A resumed run first
    drops the lines of rollouts that it does again."""

    def __init__(self, output_dir: str, count: int = 4) -> None:
        self.path = Path(output_dir) / "samples.jsonl"
        self.count = count

    def on_train_start(self, trainer: pl.Trainer, pl_module: PPOModule) -> None:
        if not (trainer.is_global_zero and self.path.exists()):
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _rollout_of(line) < trainer.global_step]
        self.path.write_text("".join(kept), encoding="utf-8")

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        if not trainer.is_global_zero:
            return
        with self.path.open("a", encoding="utf-8") as file:
            for sample in samples[: self.count]:
                row = {
                    "rollout": module.rollout.index,
                    "index": sample.index,
                    "prompt": sample.prompt,
                    "response": sample.response,
                    "label": sample.label,
                    "reward": sample.reward,
                    "status": sample.status,
                    "response_length": sample.response_length,
                }
                # a model can write lone surrogates, which UTF-8 cannot hold: JSON's own escapes can
                file.write(json.dumps(row, ensure_ascii=True, default=str) + "\n")


def _rollout_of(line: str) -> float:
    """The rollout a line belongs to; infinity for a line that a killed run left half-written."""
    try:
        return json.loads(line)["rollout"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")
