"""Decoding of dense Llama-like models without their modules: a step is one call of compiled loops
(`ppo_lightning.engines.loops`).

    b  rows at work    l  layers    g  heads of keys    d  head dimension    t  tokens in the cache
    V  vocabulary
Weights of a kind lie in one piece, layer after layer, and so do those that multiply the same input (q, k, v;
gate, up); the modules' own parameters become views of them, so that a weight update reaches both. Keys and
values have room for the longest response from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_lightning.compiled import spread
from ppo_lightning.engines import loops
from ppo_lightning.engines.products import LANES

MODEL_TYPES = ("qwen3", "qwen2", "llama")
ROPE_TYPES = ("default", "linear", "llama3")  # whose frequencies do not depend on the length


@dataclass(slots=True)
class Cache:
    """What has been read of every row. A row sees the tokens from `starts` to the last."""

    keys: Tensor  # [l, b, g, room, d]
    values: Tensor
    starts: Tensor  # [b] int64, of the first token: where prompts have unlike lengths, short ones begin later
    length: int  # tokens in the cache

    def keep(self, rows: Tensor) -> None:
        """Only these rows."""
        self.keys, self.values = self._kept(self.keys, rows), self._kept(self.values, rows)
        self.starts = self.starts[rows]

    def _kept(self, whole: Tensor, rows: Tensor) -> Tensor:
        kept = whole.new_empty(whole.size(0), len(rows), *whole.shape[2:])
        for to, layer in zip(kept, whole):
            to[:, :, : self.length] = layer[rows, :, : self.length]
        return kept


class DenseDecoder:
    """The decoder inside `model`. Changes where the model's parameters lie, not what they hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        inner: Any = model.model
        self.model: Any = model
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        attentions, mlps = [x.self_attn for x in inner.layers], [x.mlp for x in inner.layers]
        kinds = (
            [(a.q_proj, a.k_proj, a.v_proj) for a in attentions],
            [(a.o_proj,) for a in attentions],
            [(m.gate_proj, m.up_proj) for m in mlps],
            [(m.down_proj,) for m in mlps],
        )
        self.products = [_stacked([[part.weight for part in layer] for layer in kind]) for kind in kinds]
        biases = [_stacked([[part.bias for part in layer] for layer in kind]) for kind in kinds]
        layer_norms = [[x.input_layernorm.weight, x.post_attention_layernorm.weight] for x in inner.layers]
        norms = _in_one([*(w for pair in layer_norms for w in pair), inner.norm.weight])
        self.norms = norms.view(-1, config.hidden_size)
        head_norms = [
            [a.q_norm.weight, a.k_norm.weight] if hasattr(a, "q_norm") else [None] for a in attentions
        ]
        self.head_norms = _stacked(head_norms).view(len(attentions), -1, self.width)
        self._weights = (
            *map(_array, (inner.embed_tokens.weight, model.lm_head.weight, self.norms, self.head_norms)),
            np.float32(config.rms_norm_eps),
            tuple(map(_array, self.products)),
            tuple(map(_array, biases)),
        )
        self._work: tuple[np.ndarray, ...] = ()

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether this module knows the architecture, and computes as the model would: in fp32, on a
        processor, every token seeing all before it."""
        config: Any = model.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        known = config.model_type in MODEL_TYPES and rope in ROPE_TYPES and config.hidden_act == "silu"
        full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        return known and full and model.dtype == torch.float32 and model.device.type == "cpu"

    def cache(self, keys: Sequence[Tensor], values: Sequence[Tensor], starts: Tensor, steps: int) -> Cache:
        """Keys and values [b, g, t, d] of each layer, with room for `steps` more tokens."""
        rows, groups, length, width = keys[0].shape
        rooms = []
        for kind in (keys, values):
            room = keys[0].new_empty(len(kind), rows, groups, length + steps, width)
            for to, read in zip(room, kind):
                to[:, :, :length] = read
            rooms.append(room)
        return Cache(*rooms, starts, length)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, d] of all positions."""
        positions = torch.arange(length, device=self.model.device)[None]
        cos, sin = self.model.model.rotary_emb(self.model.lm_head.weight, positions)
        return cos[0].contiguous(), sin[0].contiguous()

    def step(self, token: Tensor, cache: Cache, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Logits [b, V] after `token` [b], which joins the cache; the next step overwrites them."""
        panels, t = -(-len(token) // LANES), cache.length
        work = self._buffers(panels)
        seen = tuple(map(_array, (cache.keys, cache.values, cache.starts, *angles)))
        spread(loops.step, panels, _array(token), self._weights, seen, work, t)
        cache.length = t + 1
        return torch.from_numpy(work[-1])[: len(token)]

    def _buffers(self, panels: int) -> tuple[np.ndarray, ...]:
        """What `loops.step` works in, for at least so many panels."""
        if not self._work or len(self._work[0]) < panels:
            hidden, both = self.norms.size(-1), self.products[2].size(1)
            heads = (self.heads + 2 * self.groups, self.heads)
            widths = (hidden, hidden, *(n * self.width for n in heads), both, both // 2)
            work = [torch.zeros(panels, width, LANES) for width in widths]
            part = torch.zeros(panels, loops.PART, LANES)
            logits = torch.zeros(panels * LANES, self._weights[1].shape[0])
            arrays = (*work, *(x.flatten(1) for x in work[-2:]), part, logits)
            self._work = tuple(map(_array, arrays))
        return self._work


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def _stacked(layers: Sequence[Sequence[nn.Parameter | None]]) -> Tensor:
    """[l, n, ...] of each layer's parameters, one below the other; [l, 0] where there are none."""
    parts = [part for layer in layers for part in layer if part is not None]
    return _in_one(parts).unflatten(0, (len(layers), -1)) if parts else torch.zeros(len(layers), 0)


def _in_one(parts: Sequence[nn.Parameter]) -> Tensor:
    """All below each other; the parameters become views."""
    whole = torch.cat([p.data for p in parts])
    for parameter, view in zip(parts, whole.split([p.size(0) for p in parts])):
        parameter.data = view
    return whole
