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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ppo_lightning.megatron.batching import zigzag_index


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
        packed_seq_params: PackedSeqParams,
    ) -> Tensor:  # [t, a, d]
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp == 1:
            spans = pairwise(bounds)
            return torch.cat([self._attend(query[i:j], key[i:j], value[i:j], 0) for i, j in spans])
        key, value = self._gather(key, value, bounds)
        return torch.cat(self._zigzag(query, key, value, bounds, cp, rank))

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
