"""A micro-batch as Megatron reads it: sequences packed end to end, cut over context-parallel ranks.

    t  packed tokens, padding included      c  context-parallel ranks; each holds t/c tokens
Context parallelism cuts every sequence into 2c equal pieces; rank r holds pieces r and 2c-1-r ("zigzag"), so
that under a causal mask all ranks work equally. The logits at position p predict the token at p+1: a rank
computes the response tokens whose *predicting* position it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ppo_lightning.megatron.topology import Topology
from ppo_lightning.packing import zigzag_indices
from ppo_lightning.samples import Microbatch


@dataclass
class SequenceParams(PackedSeqParams):
    """What every layer's attention is told of the packed sequences."""

    lengths: tuple[int, ...] = ()  # padded, before the cut
    rotary: tuple[Tensor, Tensor] | None = None  # cos, sin [t/c, 1, d/2], where attention itself rotates


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """This rank's slice of a micro-batch."""

    tokens: Tensor  # [1, t/c] int64
    position_ids: Tensor  # [1, t/c] int64, counted from the start of each sequence
    params: SequenceParams  # bounds of the padded sequences, before the cut
    rows: Tensor  # [m] int64: local positions that predict a response token
    targets: Tensor  # [m] int64: the tokens they predict
    select: Tensor  # [m] int64: where these tokens stand among the micro-batch's n response tokens
    num_response_tokens: int  # n


@lru_cache(maxsize=64)
def zigzag_index(lengths: tuple[int, ...], cp: int, rank: int) -> Tensor:
    """Packed positions that context rank `rank` holds of sequences of padded `lengths`, in its order."""
    return torch.tensor(zigzag_indices(lengths, cp, rank))


def pack(batch: Microbatch, topology: Topology, device: torch.device | None = None) -> PackedBatch:
    """`batch` packed, padded and cut for this rank; on `device` (default: the topology's).

    A dummy (no rows) becomes one sequence of padding: it predicts nothing but takes part in every collective.
    Raises ValueError for a sequence whose first token is already response: nothing predicts it.
    """
    device = topology.device if device is None else device
    multiple = topology.sequence_multiple
    start, lengths, tokens, positions, predicting = 0, [], [], [], []
    for sequence, response_length in zip(batch.tokens, batch.response_lengths):
        length = sequence.numel()
        if length <= response_length:
            raise ValueError(
                f"a sample of {length} tokens, {response_length} of them response, has no prompt"
            )
        padded = -(-length // multiple) * multiple
        tokens.append(torch.nn.functional.pad(sequence.cpu(), (0, padded - length)))
        positions.append(torch.arange(padded))
        predicting.append(torch.arange(start + length - response_length - 1, start + length - 1))
        lengths.append(padded)
        start += padded
    if not tokens:
        lengths, tokens = [multiple], [torch.zeros(multiple, dtype=torch.int64)]
        positions = [torch.arange(multiple)]
        predicting = [torch.empty(0, dtype=torch.int64)]
    packed, predictors = torch.cat(tokens), torch.cat(predicting)

    held = zigzag_index(tuple(lengths), topology.cp, topology.cp_rank)
    local = torch.full_like(packed, -1)
    local[held] = torch.arange(held.numel())
    rows = local[predictors]
    select = (rows >= 0).nonzero().squeeze(1)
    return PackedBatch(
        tokens=packed[held][None].to(device),
        position_ids=torch.cat(positions)[held][None].to(device),
        params=_sequence_params(lengths, device),
        rows=rows[select].to(device),
        targets=packed[predictors[select] + 1].to(device),
        select=select.to(device),
        num_response_tokens=predictors.numel(),
    )


def _sequence_params(lengths: Sequence[int], device: torch.device) -> SequenceParams:
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return SequenceParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
    )
