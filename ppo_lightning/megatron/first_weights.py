"""The first weights of a model, from whichever directory holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from ppo_lightning.megatron import torch_dist
from ppo_lightning.megatron.checkpoint_files import CheckpointError, problems
from ppo_lightning.megatron.checkpoint_sources import weights_in
from ppo_lightning.megatron.roles import Role
from ppo_lightning.megatron.weights import load_hf, unwrap


def load_weights(role: Role, path: str | Path) -> None:
    """Weights of `role` from a Hugging Face directory or a `torch_dist` one (ours or Megatron-LM's, or the
    root above it). A value head stays as it is where `path` holds none that fits. Collective."""
    directory = weights_in(path)
    if directory is None:
        raise CheckpointError(
            f"{path} holds no weights: there is neither a config.json nor a torch_dist checkpoint"
        )
    if (directory / "config.json").is_file():
        load_hf(role.models, directory, role.hf_config, role.topology)
    else:
        trouble = problems(directory)
        if trouble:
            raise CheckpointError(f"{trouble[0]}; take another checkpoint")
        _load_torch_dist(role, directory)
    role.weights_changed()


def _load_torch_dist(role: Role, directory: Path) -> None:
    present = torch_dist.tensors_in(directory)
    per_layer = any(key.startswith("decoder.layers.0.") for key in present)
    state = role.sharded_state(optimizer=False, loading=True, per_layer_keys=per_layer)
    kept: dict[str, dict[str, Any]] = {}
    for name, model in role.named_models():
        shards = state[name]
        kept[name] = {}
        for key in list(shards):
            if isinstance(shards[key], ShardedObject):
                kept[name][key] = None  # states of 8-bit kernels, which other tools may not have written
            elif unwrap(model).value_head and "output_layer." in key and not _fits(shards[key], present):
                kept[name][key] = shards[key].data
            else:
                continue
            del shards[key]
    loaded = torch_dist.load(state, directory)
    for name in kept:
        loaded[name] |= kept[name]
    role.load_state({name: loaded[name] for name in kept})


def _fits(shard: Any, present: dict[str, Any]) -> bool:
    return shard.key in present and tuple(present[shard.key].global_shape) == tuple(shard.global_shape)
