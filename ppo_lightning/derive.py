"""Values that follow from others when they are not given. Each function takes a configuration and returns
what it fills in, by flat name; given values are not touched, so that resolving twice changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

GPUS_PER_NODE = 8  # of the common training node, and the default of Megatron-LM and its RL trainers


def derived(config: PPOConfig, cuda: bool, device_count: int) -> tuple[PPOConfig, list[str]]:
    """The configuration with all derivable values, and warnings where a given value was overruled."""
    warnings: list[str] = []
    config = config.replace(**_layout(config, cuda, device_count))
    if config.debug.load_debug_rollout_data is not None:
        config = config.replace(debug_train_only=True)
    for step in (_critic_layout, _engines):
        values, said = step(config)
        config, warnings = config.replace(**values), warnings + said
    for fill in (_places, _critic, _offload, _sampling, _steps):
        config = config.replace(**_absent(config, fill(config)))
    return config, warnings


def _absent(config: PPOConfig, values: dict[str, Any]) -> dict[str, Any]:
    given = config.flat()
    return {name: value for name, value in values.items() if given[name] is None}


def _layout(config: PPOConfig, cuda: bool, device_count: int) -> dict[str, Any]:
    c = config.cluster
    if c.actor_num_gpus_per_node is not None:
        return {}
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun decided
        return {"actor_num_gpus_per_node": os.environ["LOCAL_WORLD_SIZE"]}
    if cuda:
        return {"actor_num_gpus_per_node": min(device_count or GPUS_PER_NODE, GPUS_PER_NODE)}
    size = config.model_parallel_size
    return {"actor_num_gpus_per_node": size // c.actor_num_nodes if size % c.actor_num_nodes == 0 else size}


def _critic_layout(config: PPOConfig) -> tuple[dict[str, Any], list[str]]:
    """The critic shares the actor's ranks, TP, PP and CP."""
    values: dict[str, Any] = {}
    warnings = []
    for name in ("num_nodes", "num_gpus_per_node"):
        actor = getattr(config.cluster, f"actor_{name}")
        critic = getattr(config.cluster, f"critic_{name}")
        values[f"critic_{name}"] = actor
        if critic not in (None, actor):
            flag = name.replace("_", "-")
            warnings.append(
                f"--critic-{flag} {critic} is overwritten with --actor-{flag} {actor}: the critic lives on"
                " the actor's ranks"
            )
    return values, warnings


def _engines(config: PPOConfig) -> tuple[dict[str, Any], list[str]]:
    c, r = config.cluster, config.rollout
    shared = r.rollout_engine == "hf" or c.colocate
    if shared:
        size = config.world_size
    else:
        size = c.rollout_num_gpus_per_engine * (len(r.rollout_external_urls) or 1)
    apart = c.actor_num_nodes > 1 or c.launcher == "ray"  # Ray may put engines on any node
    far = bool(r.rollout_external_urls) or (apart and not c.colocate)
    values = _absent(
        config,
        {"rollout_num_gpus": size, "update_weight_transfer_mode": "distributed" if far else "tensor"},
    )
    if not shared or c.rollout_num_gpus in (None, size):
        return values, []
    why = (
        "--colocate shares the training ranks" if c.colocate else "the hf engine lives in the training ranks"
    )
    return values | {"rollout_num_gpus": size}, [
        f"--rollout-num-gpus {c.rollout_num_gpus} is overwritten with {size}: {why}"
    ]


def output_dir(config: PPOConfig) -> Path:
    """A fixed place, so that the same command finds its former checkpoints."""
    name = Path(config.recipe).stem if config.recipe else "ppo"
    return Path(config.logging.output_dir or f"outputs/{name}")


def _places(config: PPOConfig) -> dict[str, Any]:
    output = output_dir(config)
    save = config.model.save or str(output / "checkpoints")
    values: dict[str, Any] = {"output_dir": str(output), "save": save, "load": save}
    if config.cluster.offload_train_target == "disk":
        values["offload_train_disk_dir"] = str(output / "offload")
    if config.rollout.update_weight_transfer_mode == "disk":
        values["update_weight_disk_dir"] = str(output / "weights")
    if config.logging.use_wandb:
        values["wandb_project"] = "ppo-lightning"
    return values


def _critic(config: PPOConfig) -> dict[str, Any]:
    if not config.ppo:
        return {}
    return {"critic_lr": config.optimizer.lr, "critic_save": f"{config.model.save}_critic"}


def _offload(config: PPOConfig) -> dict[str, Any]:
    asked = config.cluster.offload or config.cluster.colocate
    return {"offload_train": asked or config.ppo, "offload_rollout": asked}


def _sampling(config: PPOConfig) -> dict[str, Any]:
    r = config.rollout
    longest = r.rollout_max_response_len
    return {
        "partial_rollout_tokens": -(-longest // 4) if longest and r.partial_rollout else None,
        "eps_clip_high": config.algorithm.eps_clip,
        "eval_temperature": r.rollout_temperature,
        "eval_top_p": r.rollout_top_p,
        "eval_top_k": r.rollout_top_k,
        "eval_max_response_len": r.rollout_max_response_len,
    }


def _steps(config: PPOConfig) -> dict[str, Any]:
    """Optimizer steps a rollout and their batch; what does not divide is left for the rules to report."""
    r = config.rollout
    if r.rollout_batch_size is None:
        return {}
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    steps = r.num_steps_per_rollout
    if steps is None:
        steps = samples // r.global_batch_size if r.global_batch_size else 1
    return {"num_steps_per_rollout": max(steps, 1), "global_batch_size": max(samples // max(steps, 1), 1)}
