r"""The demo: a small Qwen3 learns with PPO to work in steps, on a CPU, in minutes.

`prepare` builds a tokenizer and a model of 0.46 million parameters and trains it, supervised, to answer
`Compute 3+5-2` either at once, `\boxed{6}`, which it mostly does and mostly gets wrong, or in steps,
`3+5=8;8-2=6;\boxed{6}`, which it rarely does and gets right. The reward is 1 for the right number in the last
box. Most of what PPO gains is that the model takes to working in steps. The held-out problems are in neither
training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.checks import visible_gpus
from ppo_lightning.config import PPOConfig
from ppo_lightning.recipes import _arithmetic
from ppo_lightning.recipes._files import is_model, say, whole_directory, write_rows

if TYPE_CHECKING:
    from ppo_lightning.recipes._arithmetic import Problem
    from ppo_lightning.recipes._warm_start import WarmStart
    from ppo_lightning.samples import Sample

HELD_OUT = 192  # problems
MODEL = "models/tiny_qwen3"
DATA = "data/tiny_arithmetic"
VOCABULARY = 284  # bytes, three special tokens, and the words of the task


def config() -> PPOConfig:
    """Measured curves: docs/recipes.md."""
    return PPOConfig.of(
        recipe="tiny_ppo",
        actor_num_gpus_per_node=_ranks(),
        hf_checkpoint=MODEL,
        save_interval=10,
        advantage_estimator="ppo",
        normalize_advantages=True,
        critic_lr=5e-4,
        num_critic_only_steps=5,
        lr=2e-4,
        weight_decay=0.0,
        adam_beta2=0.95,
        prompt_data=f"{DATA}/train.jsonl",
        label_key="label",
        apply_chat_template=True,
        rollout_shuffle=True,
        num_rollout=40,
        rollout_batch_size=128,
        num_steps_per_rollout=2,
        rollout_max_response_len=22,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        balance_data=True,
        custom_rm_path="ppo_lightning.recipes.tiny_ppo:reward",
        eval_interval=5,
        eval_prompt_data=("heldout", f"{DATA}/heldout.jsonl"),
    )


def reward(sample: Sample) -> float:
    r"""1 when the last \boxed{number} of the response is the label. `--rm-type math` would also take a box
    that repeats the question."""
    return _arithmetic.exact_match(sample.response, sample.label)


def model_config() -> dict[str, Any]:
    """The architecture: Qwen3, small."""
    return {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }


def prepare(config: PPOConfig, warm_start: WarmStart | None = None) -> None:
    """Write the prompts of `config` and its warm-started model (from `--seed`), each unless it is there
    already. `warm_start` shortens the training, for trials."""
    training, held_out = _arithmetic.split(HELD_OUT)
    if config.data.prompt_data is not None:
        write_rows(Path(config.data.prompt_data), _rows(training))
    for path in config.evaluation.eval_prompt_data[1::2]:
        write_rows(Path(path), _rows(held_out))
    model = Path(config.model.hf_checkpoint or MODEL)
    if is_model(model):
        say(f"{model}: there already")
    else:
        _write_model(model, training, config.optimizer.seed, warm_start)
    say(
        "The model can answer at once, \\boxed{6}, which it mostly does and mostly gets wrong, or in steps,\n"
        "3+5=8;8-2=6;\\boxed{6}, which it rarely does and mostly gets right. Most of what PPO gains is\n"
        "that it takes to working in steps."
    )


def main(argv: Sequence[str] | None = None) -> int:
    from ppo_lightning.cli import run_recipe

    return run_recipe(__file__, argv)


def _ranks() -> int | None:
    """Two data-parallel ranks of one thread each are quicker on two cores than one rank of two threads; where
    there are GPUs, or torchrun counts the ranks, the recipe has no say."""
    return None if visible_gpus() or "LOCAL_WORLD_SIZE" in os.environ else 2


def _rows(problems: Sequence[Problem]) -> list[dict[str, str]]:
    return [{"input": p.question, "label": str(p.answer)} for p in problems]


def _write_model(target: Path, training: Sequence[Problem], seed: int, settings: WarmStart | None) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    from ppo_lightning.recipes import _warm_start

    transformers_logging.disable_progress_bar()
    settings = settings or _warm_start.WarmStart()
    say(f"{target}: supervised warm start of {settings.steps} steps (about a minute)")
    started = time.monotonic()

    def progress(step: int, loss: float) -> None:
        if (step + 1) % 50 == 0 or step + 1 == settings.steps:
            say(f"  step {step + 1:4d}  loss {loss:.3f}  {time.monotonic() - started:.0f} s")

    with torch.random.fork_rng(devices=[]), whole_directory(target) as partial:
        torch.manual_seed(seed)
        tokenizer = _warm_start.build_tokenizer(training)
        model = _warm_start.build_model(tokenizer, model_config())
        _warm_start.warm_start(model, tokenizer, training, settings, seed, progress)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{target}: {parameters / 1e6:.2f} million parameters")


if __name__ == "__main__":
    raise SystemExit(main())
