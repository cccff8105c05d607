"""What a server's weights must hash to: SGLang's checksums, recomputed from Hugging Face tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# SGLang fuses these, rows one below the other; each is sharded on its own before
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # cut along the output
COLUMNS = ("o_proj", "down_proj")  # cut along the input
VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_MULTIPLE = 64  # SGLang pads the rows to it, with zeros


@dataclass(frozen=True, slots=True)
class Layout:
    """How a server holds the model."""

    ranks: int  # tensor parallel
    kv_heads: int
    dtype: torch.dtype
    cuda: bool


def differing(
    ranks: list[Mapping[str, Any]], get: Callable[[str], torch.Tensor], layout: Layout
) -> list[str]:
    """Names of the server's parameters that are not what `get` (a tensor by its Hugging Face name) says.
    `ranks`: the answer of /weights_checker, one entry per rank. Dense models of the Llama family, Qwen3
    among them."""
    digest = _cuda_digest if layout.cuda else _digest
    found = []
    for entry in ranks:
        rank = entry["parallelism_info"][0]["tp_rank"]
        for name, checksum in entry["checksums"].items():
            if digest(expected(name, rank, get, layout)) != checksum:
                found.append(f"{name} (rank {rank})")
    return found


def expected(name: str, rank: int, get: Callable[[str], torch.Tensor], layout: Layout) -> torch.Tensor:
    """A parameter as tensor parallel rank `rank` of the server holds it."""
    module = name.split(".")[-2]
    sources = [name.replace(module, part) for part in FUSED.get(module, (module,))]
    parts = [_shard(source, get(source).to(layout.dtype), rank, layout) for source in sources]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _shard(name: str, tensor: torch.Tensor, rank: int, layout: Layout) -> torch.Tensor:
    module, kind = name.split(".")[-2:]
    if module in ("k_proj", "v_proj") and layout.kv_heads < layout.ranks:
        copies = layout.ranks // layout.kv_heads  # each head stands on several ranks
        return tensor.chunk(layout.kv_heads)[rank // copies]
    if module in ROWS:
        return tensor.chunk(layout.ranks)[rank]
    if module in COLUMNS and kind == "weight":
        return tensor.chunk(layout.ranks, dim=1)[rank]
    if module in VOCABULARY:
        missing = -len(tensor) % VOCABULARY_MULTIPLE
        padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
        return padded.chunk(layout.ranks)[rank]
    return tensor


def _digest(tensor: torch.Tensor) -> str:
    # of a copy: `numpy` fixes the size of a storage, and offload could not empty that of a live weight
    data = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def _cuda_digest(tensor: torch.Tensor) -> str:
    from sglang.srt.managers.mm_utils import (
        tensor_hash,
    )  # on the device SGLang hashes with a kernel of its own

    return f"{tensor_hash(tensor.cuda()):016x}"
