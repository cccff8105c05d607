"""PPO of Qwen3-4B on four GPUs: mathematics with a verifiable answer, rollouts by SGLang on the same GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.recipes._files import is_model, say

MODEL_REPO = "Qwen/Qwen3-4B"
DATA_REPO = "zhuzilin/dapo-math-17k"  # DAPO-Math-17k, each problem once, columns prompt and label
DATA_FILE = "dapo-math-17k.jsonl"
MODEL = "models/Qwen3-4B"
DATA = f"data/dapo-math-17k/{DATA_FILE}"


def config() -> PPOConfig:
    return PPOConfig.of(
        recipe="qwen3_4b_ppo",
        # cluster
        actor_num_nodes=1,
        actor_num_gpus_per_node=4,
        rollout_num_gpus_per_engine=1,
        colocate=True,
        # model
        hf_checkpoint=MODEL,
        ref_load=f"{MODEL}_torch_dist",
        save_interval=20,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        bf16=True,
        # algorithm
        advantage_estimator="ppo",
        normalize_advantages=True,
        use_kl_loss=True,
        kl_loss_coef=0.0,  # monitored only
        kl_loss_type="k1",
        kl_coef=0.0,
        entropy_coef=0.0,
        eps_clip=0.2,
        critic_lr=1e-5,
        num_critic_only_steps=1,
        # optimizer
        optimizer="adam",
        lr=1e-6,
        lr_decay_style="constant",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.98,
        # data and rollout
        prompt_data=DATA,
        input_key="prompt",
        label_key="label",
        apply_chat_template=True,
        rollout_shuffle=True,
        num_rollout=300,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        rollout_max_response_len=8192,
        rollout_temperature=0.8,
        global_batch_size=32,
        rollout_engine="sglang",
        sglang_mem_fraction_static=0.8,
        sglang_max_running_requests=512,
        # performance
        balance_data=True,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        # reward
        rm_type="deepscaler",
    )


def model_config() -> dict[str, Any]:
    """The model's config.json, shipped with the recipe: all a plan needs before anything is downloaded."""
    text = Path(__file__).with_name("qwen3_4b_config.json").read_text(encoding="utf-8")
    return json.loads(text)


def prepare(config: PPOConfig) -> None:
    """Download model and prompts and convert the model to `torch_dist`, each unless it is there already.
    Raises ConfigError with the manual steps when the Hub cannot be reached."""
    model = Path(config.model.hf_checkpoint or MODEL)
    if is_model(model):
        say(f"{model}: there already")
    else:
        say(f"{model}: downloading {MODEL_REPO} (8 GB)")
        with _downloading(f"hf download {MODEL_REPO} --local-dir {model}"):
            _download_model(model)
    if config.data.prompt_data is not None:
        _prepare_prompts(Path(config.data.prompt_data))
    if config.model.ref_load is not None:
        from ppo_lightning.megatron.convert import convert

        convert(model, config.model.ref_load, source_format="hf", target_format="torch_dist")


def main(argv: Sequence[str] | None = None) -> int:
    from ppo_lightning.cli import run_recipe

    return run_recipe(__file__, argv)


def _prepare_prompts(target: Path) -> None:
    if target.exists():
        say(f"{target}: there already")
        return
    say(f"{target}: downloading {DATA_REPO}")
    by_hand = f"hf download --repo-type dataset {DATA_REPO} --local-dir {target.parent}"
    if target.name != DATA_FILE:
        by_hand += f" && mv {target.parent / DATA_FILE} {target}"
    with _downloading(by_hand):
        _download_prompts(target)


def _download_model(target: Path) -> None:
    """Resumes what a killed download left, and checks every file before it takes its place."""
    from huggingface_hub import snapshot_download

    snapshot_download(MODEL_REPO, local_dir=target)


def _download_prompts(target: Path) -> None:
    from huggingface_hub import hf_hub_download

    found = hf_hub_download(DATA_REPO, DATA_FILE, repo_type="dataset", local_dir=target.parent)
    os.replace(found, target)


@contextmanager
def _downloading(by_hand: str) -> Iterator[None]:
    """A Hub that cannot be reached is no bug: say what to do instead."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the download failed: {reason}\n  where there is a network, run\n    {by_hand}\n"
            "  bring the directory here under the same name, and run prepare again"
        ) from error


if __name__ == "__main__":
    raise SystemExit(main())
