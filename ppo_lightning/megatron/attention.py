"""Causal attention over packed sequences and context-parallel ranks, on torch's scaled dot product.

Stands in for Transformer Engine's where that is missing: Megatron's own local attention knows neither packed
sequences nor context parallelism.

    t  tokens of this rank      a, g  query and key/value heads of this rank      d  head dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppo_lightning.megatron.batching import SequenceParams, zigzag_index
from ppo_lightning.megatron.kernels import from_grid, rotary_heads, to_grid

GRID_LENGTH = 256  # tokens: up to there, filling rows up costs less than a call for every sequence


class RotaryAttention(SelfAttention):
    """Megatron's self-attention for packed sequences, whose heads get norm and rotary embedding at once."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: SequenceParams, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        joint, _bias = self.linear_qkv(hidden_states)
        shape = (len(joint), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head)
        normed = self.config.qk_layernorm
        norms = (self.q_layernorm.weight, self.k_layernorm.weight) if normed else None
        assert packed_seq_params.rotary is not None
        parts = rotary_heads(
            joint.view(shape), norms, self.config.layernorm_epsilon, *packed_seq_params.rotary
        )
        checkpointed = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if checkpointed else self.core_attention
        out = attend(*parts, None, packed_seq_params=packed_seq_params)
        return self.linear_proj(out.reshape(len(out), 1, -1))


class PackedAttention(MegatronModule):
    """Core attention with the constructor and forward that Megatron's layer spec expects.

    Context parallelism gathers keys and values over the ranks (their gradients are reduce-scattered); queries
    stay where they are.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_dropout or config.attention_dropout:
            raise ValueError("PackedAttention is causal and has no dropout")
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,  # [t, a, d]
        key: Tensor,  # [t, g, d]
        value: Tensor,  # [t, g, d]
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SequenceParams,
    ) -> Tensor:  # [t, a, d]
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp == 1:
            return self._whole(query, key, value, packed_seq_params.lengths)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        key, value = self._gather(key, value, bounds)
        return torch.cat(self._zigzag(query, key, value, bounds, cp, rank))

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Every sequence is here as a whole: those of one length, or short ones on a grid, are attended at
        once."""
        longest = max(lengths)
        if len(set(lengths)) == 1:
            return self._attend_rows(query, key, value, longest)
        if longest <= GRID_LENGTH:
            cell, token = (x.to(query.device) for x in _grid(lengths))
            grids = (to_grid(x, cell, token) for x in (query, key, value))
            return from_grid(self._attend_rows(*grids, longest), cell)
        parts = zip(*(x.split(lengths) for x in (query, key, value)))
        return torch.cat([self._attend(*part, 0) for part in parts])

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        """Sequences of `length`, one after another: [b length, a, d]."""
        q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).reshape(query.shape)

    def _gather(self, key: Tensor, value: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """All ranks' keys and values, in the order of the packed batch."""
        both = gather_from_sequence_parallel_region(torch.stack((key, value), 1), group=self.cp_group)
        order = _packed_order(tuple(stop - start for start, stop in pairwise(bounds)), self.cp_group.size())
        key, value = both[order.to(both.device)].unbind(1)
        return key, value

    def _zigzag(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], cp: int, rank: int
    ) -> list[Tensor]:
        out = []
        for start, stop in pairwise(bounds):
            length = (stop - start) // (2 * cp)
            queries = query[start // cp : stop // cp].split(length)
            for part, piece in zip(queries, (rank, 2 * cp - 1 - rank)):
                seen = slice(start, start + (piece + 1) * length)
                out.append(self._attend(part, key[seen], value[seen], piece * length))
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        """Query i sees keys 0 .. i + offset."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = None
        if offset:
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril(offset)
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.squeeze(0).transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return {}


@lru_cache(maxsize=64)
def _packed_order(lengths: tuple[int, ...], cp: int) -> Tensor:
    """Where each packed position stands in all context ranks' slices, one after another."""
    return torch.argsort(torch.cat([zigzag_index(lengths, cp, rank) for rank in range(cp)]))


@lru_cache(maxsize=64)
def _grid(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Rows as long as the longest sequence: the cell of each packed token, and the token of each cell (0 in
    what is left over)."""
    longest = max(lengths)
    cell = torch.cat([row * longest + torch.arange(n) for row, n in enumerate(lengths)])
    token = torch.zeros(len(lengths) * longest, dtype=torch.int64)
    token[cell] = torch.arange(len(cell))
    return cell, token
