"""The first weights of a model, from whichever directory holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from ppo_lightning.megatron import torch_dist
from ppo_lightning.megatron.checkpoint_files import CheckpointError, problems
from ppo_lightning.megatron.checkpoint_sources import weights_in
from ppo_lightning.megatron.hf_files import HFDirectory
from ppo_lightning.megatron.roles import Role
from ppo_lightning.megatron.weights import load_hf, unwrap


def load_weights(role: Role, path: str | Path) -> str:
    """Weights of `role` from a Hugging Face directory or a `torch_dist` one (ours or Megatron-LM's, or the
    root above it). A value head stays as it is where `path` holds none that fits. Says what was taken.
    Collective."""
    directory = weights_in(path)
    if directory is None:
        raise CheckpointError(
            f"{path} holds no weights: there is neither a config.json nor a torch_dist checkpoint"
        )
    value_head = unwrap(role.models[0]).value_head
    if (directory / "config.json").is_file():
        load_hf(role.models, directory, role.hf_config, role.topology)
        head = value_head and "score.weight" in HFDirectory(directory)
    else:
        trouble = problems(directory)
        if trouble:
            raise CheckpointError(f"{trouble[0]}; take another checkpoint")
        present = torch_dist.tensors_in(directory)
        head = value_head and _holds_value_head(present)
        _load_torch_dist(role, directory, present, head)
    role.weights_changed()
    return f"weights of {directory}" + (", fresh value head" if value_head and not head else "")


def _load_torch_dist(role: Role, directory: Path, present: dict[str, Any], head: bool) -> None:
    per_layer = any(key.startswith("decoder.layers.0.") for key in present)
    state = role.sharded_state(optimizer=False, loading=True, per_layer_keys=per_layer)
    kept: dict[str, dict[str, Any]] = {}
    for name, model in role.named_models():
        shards, fresh = state[name], unwrap(model).value_head and not head
        kept[name] = {}
        for key in list(shards):
            if isinstance(shards[key], ShardedObject):
                kept[name][key] = None  # states of 8-bit kernels, which other tools may not have written
            elif fresh and "output_layer." in key:
                kept[name][key] = shards[key].data
            else:
                continue
            del shards[key]
    loaded = torch_dist.load(state, directory)
    for name in kept:
        loaded[name] |= kept[name]
    role.load_state({name: loaded[name] for name in kept})


def _holds_value_head(present: dict[str, Any]) -> bool:
    return "output_layer.bias" in present and present["output_layer.weight"].global_shape[0] == 1
