"""Whole runs in forked ranks: what tests of the loop share."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from ppo_lightning import PPOConfig, build
from ppo_lightning.callbacks import PPOCallback, RewardCallback
from ppo_lightning.cli import load_recipe
from ppo_lightning.megatron.checkpoint_sources import run_checkpoint
from tests.tinymodel import make_tiny_model


class DigitShare(RewardCallback):
    """Deterministic, differs between samples, and needs no label."""

    def score(self, sample: Any) -> float:
        return sum(t % 3 == 0 for t in sample.tokens[-sample.response_length :]) / sample.response_length


class Record(PPOCallback):
    """The logged metrics and a digest of the rollout of every step, in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.rollouts: list[str] = []

    def on_samples_end(self, trainer: pl.Trainer, module: Any, samples: Any) -> None:
        told = json.dumps([(s.tokens, s.reward, s.index) for s in samples])
        self.rollouts.append(hashlib.sha256(told.encode()).hexdigest())

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        kept = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("perf/")}
        self.rows.append(kept)


def prepare(directory: Path, *, prompts: int = 24, **model: Any) -> dict[str, Any]:
    """A tiny model and prompts under `directory`; the flat options that use them."""
    make_tiny_model(directory / "model", **model)
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": f"Add {i}+{i * 7 % 10}"}) + "\n" for i in range(prompts)))
    return {
        "hf_checkpoint": str(directory / "model"),
        "prompt_data": str(data),
        "apply_chat_template": True,
        "rollout_shuffle": True,
        "advantage_estimator": "ppo",
        "normalize_advantages": True,
        "num_rollout": 3,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 4,
        "rollout_max_response_len": 10,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 256,
        "lr": 1e-3,
        "critic_lr": 2e-3,
        "output_dir": str(directory / "out"),
        "use_tensorboard": False,
    }


def fit_rank(
    rank: int,
    world: int,
    options: dict[str, Any],
    callbacks: Sequence[pl.Callback] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """One rank of a whole run; what it saw."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    recipe = options.get("recipe")
    base = load_recipe(recipe).config() if recipe else PPOConfig()
    config = base.replace(**{"actor_num_gpus_per_node": world, **options})
    record = Record()
    trainer, module, data = build(config, [DigitShare(), record, *callbacks])
    checkpoint = run_checkpoint(module.config) if resume else None
    trainer.fit(module, data, ckpt_path=str(checkpoint) if checkpoint else None)
    return {
        "rows": record.rows,
        "rollouts": record.rollouts,
        "weights": digests(trainer),
        "step": trainer.global_step,
    }


def digests(trainer: pl.Trainer) -> dict[str, str]:
    """SHA-256 of every parameter of every role on this rank, wherever it lies."""
    found: dict[str, str] = {}
    for name, role in trainer.strategy.roles.items():
        with trainer.strategy.resident(name):
            for number, model in enumerate(role.models):
                for parameter, p in model.named_parameters():
                    bits = p.detach().float().clone().numpy().tobytes()  # `numpy` fixes a storage's size
                    found[f"{name}/{number}/{parameter}"] = hashlib.sha256(bits).hexdigest()
    return found
