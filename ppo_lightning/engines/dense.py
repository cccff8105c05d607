"""Decode steps of dense Llama-like models: the arithmetic of transformers' modules in about twenty calls a
layer.

    b  rows at work    h  hidden size    n, g  heads of queries, of keys    d  head dimension
    t  tokens in the cache
Weights that multiply the same input lie side by side (q, k, v; gate, up) and are one product; the modules'
own parameters become views of them, so that a weight update reaches both. Keys and values have room for the
longest response from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

MODEL_TYPES = ("qwen3", "qwen2", "llama")
ROPE_TYPES = ("default", "linear", "llama3")  # whose frequencies do not depend on the length
HEAD_ELEMENTS = 2**18  # of the output head in one product: what stays in a core's cache beside a few rows


@dataclass(slots=True)
class _Layer:
    """Weights of one layer; `joint_norm` [n + g, d] is that of queries and keys, head by head."""

    norm: Any
    qkv: tuple[Tensor, Tensor | None]
    q_norm: Any
    k_norm: Any
    output: tuple[Tensor, Tensor | None]
    mlp_norm: Any
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    joint_norm: Tensor | None = None


class DenseDecoder:
    """The decoder inside `model`. Changes where the model's parameters lie, not what they hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self.model: Any = model
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.layers = [self._layer(layer) for layer in self.model.model.layers]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether this module knows the architecture, and computes as the model would: in fp32, on a
        processor."""
        config: Any = model.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        known = config.model_type in MODEL_TYPES and rope in ROPE_TYPES and config.hidden_act == "silu"
        return known and model.dtype == torch.float32 and model.device.type == "cpu"

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            layer.input_layernorm.weight,
            _joined(attention.q_proj, attention.k_proj, attention.v_proj),
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
            _joined(attention.o_proj),
            layer.post_attention_layernorm.weight,
            _joined(mlp.gate_proj, mlp.up_proj),
            _joined(mlp.down_proj),
        )

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, 1, d] of all positions; the sign of the rotation is in sin."""
        positions = torch.arange(length, device=self.model.device)[None]
        cos, sin = self.model.model.rotary_emb(self.model.lm_head.weight, positions)
        half = self.width // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        return cos[0, :, None], signed[:, None]

    def step(
        self,
        token: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        t: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Logits [b, V] after `token` [b], the t-th of the cache. keys, values: [b, g, room, d] of each
        layer; cos, sin: [b, 1, d] of its position; mask: [b, 1, 1, t + 1] of what is seen, None: all."""
        x = F.embedding(token, self.model.model.embed_tokens.weight)
        rows, hidden, n, g, d = x.size(0), x.shape[1:], self.heads, self.groups, self.width
        for layer, key, value in zip(self.layers, keys, values):
            y = F.linear(F.rms_norm(x, hidden, layer.norm, self.eps), *layer.qkv).view(rows, n + 2 * g, d)
            both, new = y.split((n + g, g), 1)
            if layer.joint_norm is not None:
                both = F.rms_norm(both, (d,), None, self.eps).mul_(layer.joint_norm)
            query, turned = (both * cos).addcmul_(both.roll(d // 2, -1), sin).split((n, g), 1)
            key.select(2, t).copy_(turned)
            value.select(2, t).copy_(new)
            attended = F.scaled_dot_product_attention(
                query.view(rows, g, n // g, d),  # a key head's queries stand as its rows
                key.narrow(2, 0, t + 1),
                value.narrow(2, 0, t + 1),
                attn_mask=mask,
            )
            x = F.linear(attended.reshape(rows, n * d), *layer.output).add_(x)
            gate, up = F.linear(F.rms_norm(x, hidden, layer.mlp_norm, self.eps), *layer.gate_up).chunk(2, -1)
            x = F.linear(F.silu(gate).mul_(up), *layer.down).add_(x)
        return self._logits(F.rms_norm(x, hidden, self.model.model.norm.weight, self.eps))

    def refresh(self) -> None:
        """To be called before a generation: what is made of weights that an update writes."""
        for layer in self.layers:
            if layer.q_norm is not None:
                counts = (self.heads, self.groups)
                norms = [p.weight.expand(c, -1) for p, c in zip((layer.q_norm, layer.k_norm), counts)]
                layer.joint_norm = torch.cat(norms)

    def _logits(self, x: Tensor) -> Tensor:
        """The head in pieces: a product of few rows with so many columns is slow as a whole."""
        weight = self.model.lm_head.weight
        piece = max(64, HEAD_ELEMENTS // weight.size(1))
        logits = x.new_empty(x.size(0), weight.size(0))
        for out, part in zip(logits.split(piece, 1), weight.split(piece)):
            torch.mm(x, part.t(), out=out)
        return logits


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of layers of the same input, in one piece. The weight is stored input by input, so
    that a product of few rows reads it from one end to the other."""
    weight = _in_one([layer.weight for layer in linears], lambda whole: whole.t().contiguous().t())
    biases = [layer.bias for layer in linears]
    return weight, None if biases[0] is None else _in_one(biases, lambda whole: whole)


def _in_one(parts: Sequence[nn.Parameter], stored: Callable[[Tensor], Tensor]) -> Tensor:
    whole = stored(torch.cat([p.data for p in parts]))
    for parameter, view in zip(parts, whole.split([p.size(0) for p in parts])):
        parameter.data = view
    return whole
