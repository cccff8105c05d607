"""Weights in and out: a Hugging Face directory into a model, a model as a stream of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from ppo_lightning.megatron import names
from ppo_lightning.megatron.hf_files import HFDirectory
from ppo_lightning.megatron.model import TokenModel
from ppo_lightning.megatron.names import WeightError
from ppo_lightning.megatron.topology import Topology

_VALUE_HEAD_NAMES = ("score.weight", "score.bias")


def unwrap(module: nn.Module) -> TokenModel:
    """The model inside Megatron's wrappers (data parallelism, 16-bit floats)."""
    inner: Any = module
    while not isinstance(inner, TokenModel):
        inner = inner.module
    return inner


def global_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters under global names; the tied copy on a last stage is `output_layer.weight`."""
    found: dict[str, nn.Parameter] = {}
    for chunk in models:
        model = unwrap(chunk)
        offset = get_transformer_layer_offset(model.config, vp_stage=model.vp_stage)
        for local_name, parameter in model.named_parameters():
            found[names.global_name(local_name, offset)] = parameter
    return found


@torch.no_grad()
def load_hf(models: Sequence[nn.Module], hf_dir: str | Path, hf_config: Any, topology: Topology) -> None:
    """Copy the weights in `hf_dir` into this rank's shards, converting to the parameters' types.

    A value head is taken from `score.*` where the directory has one that fits, and stays as it is
    otherwise; the language-model head is then ignored. Raises WeightError naming every missing tensor, or
    the first that has a wrong shape. Fp32 copies that an optimizer holds already are its own affair.
    """
    arch, directory = names.architecture(hf_config), HFDirectory(hf_dir)
    value_head = unwrap(models[0]).value_head
    parameters = global_parameters(models)
    if value_head and not all(name in directory for name in _VALUE_HEAD_NAMES):
        parameters = {name: p for name, p in parameters.items() if not name.startswith("output_layer")}
    sources = {name: names.hf_names(name, arch, value_head=value_head) for name in parameters}
    missing = sorted({source for of_one in sources.values() for source in of_one if source not in directory})
    if missing:
        raise WeightError(f"{len(missing)} tensors are missing in {hf_dir}: {', '.join(missing)}")
    for name, parameter in parameters.items():
        tensors = [directory.read(source, names.hf_shape(source, arch)) for source in sources[name]]
        whole = names.hf_to_megatron(name, tensors, arch, tp=topology.tp)
        parameter.copy_(names.shard(name, whole, topology.tp, topology.tp_rank, value_head=value_head))


@torch.no_grad()
def stream(models: Sequence[nn.Module], hf_config: Any, topology: Topology) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model as (Hugging Face name, whole tensor), in one order on every rank.

    Collective over tensor and pipeline ranks: all of them must iterate to the end. Tensors have the
    parameters' type, no vocabulary padding, and may be views of live parameters: copy what is kept. A
    tied `lm_head` is left out, as transformers does; a value head is called `score`.
    """
    arch, value_head = names.architecture(hf_config), unwrap(models[0]).value_head
    parameters = global_parameters(models)
    kinds = {
        name: (p.dtype, names.whole_shape(name, tuple(p.shape), topology.tp, value_head=value_head))
        for name, p in parameters.items()
    }
    stages: list[Any] = [kinds]
    if topology.pp > 1:
        stages = [None] * topology.pp
        dist.all_gather_object(stages, kinds, group=topology.pp_group)
    for name in names.megatron_names(arch, value_head=value_head):
        owner = next(stage for stage, held in enumerate(stages) if name in held)
        whole = None
        if owner == topology.pp_rank:
            whole = _gather(name, parameters[name].detach(), topology, value_head)
        if topology.pp > 1:
            dtype, shape = stages[owner][name]
            whole = _broadcast(whole, dtype, shape, owner, topology)
        assert whole is not None
        yield from names.megatron_to_hf(name, whole, arch, value_head=value_head)


def _gather(name: str, shard: Tensor, topology: Topology, value_head: bool) -> Tensor:
    if topology.tp == 1:
        return shard
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(topology.tp)]
    dist.all_gather([_bytes(part) for part in parts], _bytes(shard.contiguous()), group=topology.tp_group)
    return names.unshard(name, parts, value_head=value_head)


def _broadcast(
    whole: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], owner: int, topology: Topology
) -> Tensor:
    source = dist.get_process_group_ranks(topology.pp_group)[owner]
    whole = torch.empty(shape, dtype=dtype, device=topology.device) if whole is None else whole.contiguous()
    dist.broadcast(_bytes(whole), source, group=topology.pp_group)
    return whole


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: what is moved needs no arithmetic, and not every backend moves every type."""
    return tensor.view(-1).view(torch.uint8)
