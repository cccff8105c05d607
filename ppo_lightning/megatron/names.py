"""Hugging Face's parameters and Megatron's: which is which, and how one is cut from the other.

    G  key/value heads (query groups)    d  head dimension    h  hidden size    V  vocabulary    f  MLP width
Megatron keeps query, key and value in one matrix, ordered by query group ([queries of the group, key,
value] each), and gate and up in one matrix, gate first. Names are global: layers are counted over the
whole model. A norm that Transformer Engine fuses with the following matrix has another name there
(`linear_qkv.layer_norm_weight`); Megatron's checkpoints always use that one, its local layers
`input_layernorm.weight`: both are understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.architecture import ModelShape


class UnsupportedArchitectureError(ValueError):
    """A model that cannot be trained here; the message says what is supported."""


class WeightError(ValueError):
    """A tensor that is missing, unknown, or of another shape than the configuration says."""


_PLAIN = {"hidden_act": "silu", "attention_dropout": 0.0}
# model type -> configuration fields that must have this value, or be absent
_REQUIRED: dict[str, dict[str, Any]] = {
    "qwen3": _PLAIN | {"attention_bias": False, "use_sliding_window": False},
    "llama": _PLAIN | {"attention_bias": False, "mlp_bias": False},
    "qwen2": _PLAIN | {"use_sliding_window": False},
}


def require_supported(model_type: Any) -> None:
    """Raises UnsupportedArchitectureError unless models of this type can be trained here."""
    if model_type not in _REQUIRED:
        raise UnsupportedArchitectureError(
            f"the architecture {model_type!r} is not supported; supported are {', '.join(_REQUIRED)} (dense)"
        )


def architecture(hf_config: Any) -> ModelShape:
    """The sizes in a transformers configuration. Raises UnsupportedArchitectureError."""
    kind = hf_config.model_type
    require_supported(kind)
    for field, wanted in _REQUIRED[kind].items():
        value = getattr(hf_config, field, wanted)
        if value != wanted:
            raise UnsupportedArchitectureError(
                f"{kind} with {field}={value!r} is not supported; only {field}={wanted!r} is"
            )
    return ModelShape.of(hf_config.to_dict())


def has_qk_norm(arch: ModelShape) -> bool:
    return arch.model_type == "qwen3"


def has_qkv_bias(arch: ModelShape) -> bool:
    return arch.model_type == "qwen2"


class Cut(Enum):
    """How a parameter is divided over tensor-parallel ranks."""

    WHOLE = "the same on every rank"
    ROWS = "dimension 0"
    HALVES = "dimension 0 of each of two stacked halves"
    COLUMNS = "dimension 1"


@dataclass(frozen=True)
class _Rule:
    sources: tuple[str, ...]  # Hugging Face names, without the layer's prefix
    cut: Cut


_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_QKV = "self_attention.linear_qkv."
_LAYER_RULES = {
    "input_layernorm.weight": _Rule(("input_layernorm.weight",), Cut.WHOLE),
    _QKV + "weight": _Rule(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), Cut.ROWS),
    _QKV + "bias": _Rule(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), Cut.ROWS),
    "self_attention.q_layernorm.weight": _Rule(("self_attn.q_norm.weight",), Cut.WHOLE),
    "self_attention.k_layernorm.weight": _Rule(("self_attn.k_norm.weight",), Cut.WHOLE),
    "self_attention.linear_proj.weight": _Rule(("self_attn.o_proj.weight",), Cut.COLUMNS),
    "pre_mlp_layernorm.weight": _Rule(("post_attention_layernorm.weight",), Cut.WHOLE),
    "mlp.linear_fc1.weight": _Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.HALVES),
    "mlp.linear_fc2.weight": _Rule(("mlp.down_proj.weight",), Cut.COLUMNS),
}
_FUSED_NORMS = {
    _QKV + "layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_OTHER_RULES = {
    _EMBEDDING: _Rule(("model.embed_tokens.weight",), Cut.ROWS),
    "decoder.final_layernorm.weight": _Rule(("model.norm.weight",), Cut.WHOLE),
    _OUTPUT: _Rule(("lm_head.weight",), Cut.ROWS),
}
# the names of transformers' *ForTokenClassification with one label: an exported critic opens as that class
_VALUE_RULES = {
    _OUTPUT: _Rule(("score.weight",), Cut.WHOLE),
    "output_layer.bias": _Rule(("score.bias",), Cut.WHOLE),
}


def global_name(local_name: str, layer_offset: int) -> str:
    """The global name of a parameter of one pipeline stage, whose first layer is number `layer_offset`."""
    layer, rest = _split_layer(local_name)
    if layer is None:
        return local_name
    return f"decoder.layers.{layer + layer_offset}.{_FUSED_NORMS.get(rest, rest)}"


def megatron_names(arch: ModelShape, *, value_head: bool = False) -> list[str]:
    """Every parameter of the whole model once, first layer first; a tied output layer is the embedding."""
    layer = [
        rest
        for rest in _LAYER_RULES
        if not (
            rest.endswith("_layernorm.weight") and rest.startswith("self_attention") and not has_qk_norm(arch)
        )
        and not (rest == _QKV + "bias" and not has_qkv_bias(arch))
    ]
    layers = [f"decoder.layers.{i}.{rest}" for i in range(arch.layers) for rest in layer]
    head = list(_VALUE_RULES) if value_head else [] if arch.tied else [_OUTPUT]
    return [_EMBEDDING, *layers, "decoder.final_layernorm.weight", *head]


def hf_names(name: str, arch: ModelShape, *, value_head: bool = False) -> list[str]:
    """The Hugging Face tensors that make up the Megatron parameter `name`, in stacking order."""
    if name == _OUTPUT and arch.tied and not value_head:
        name = _EMBEDDING
    layer, _ = _split_layer(name)
    prefix = "" if layer is None else f"model.layers.{layer}."
    return [prefix + source for source in _rule(name, value_head).sources]


def hf_shape(hf_name: str, arch: ModelShape) -> tuple[int, ...]:
    """The shape that the configuration gives the Hugging Face tensor `hf_name`."""
    h, queries, keys = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (arch.vocab, h),
        "lm_head.weight": (arch.vocab, h),
        "score.weight": (1, h),
        "score.bias": (1,),
        "q_proj.weight": (queries, h),
        "k_proj.weight": (keys, h),
        "v_proj.weight": (keys, h),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.weight": (h, queries),
        "q_norm.weight": (arch.head_dim,),
        "k_norm.weight": (arch.head_dim,),
        "gate_proj.weight": (arch.ffn, h),
        "up_proj.weight": (arch.ffn, h),
        "down_proj.weight": (h, arch.ffn),
    }
    return shapes.get(".".join(hf_name.split(".")[-2:]), (h,))  # what is not named is a norm


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    return -(-vocab_size // tp) * tp


def hf_to_megatron(name: str, tensors: Sequence[Tensor], arch: ModelShape, *, tp: int = 1) -> Tensor:
    """The whole Megatron parameter `name` from the tensors of `hf_names`, in that order.

    Vocabulary matrices get rows of zeros at the end until `tp` divides their number.
    """
    if name.startswith("decoder") and _QKV in name:
        parts = [x.reshape(arch.kv_heads, -1, *x.shape[1:]) for x in tensors]
        return torch.cat(parts, 1).reshape(-1, *tensors[0].shape[1:])
    if len(tensors) > 1:
        return torch.cat(list(tensors))
    tensor = tensors[0]
    missing = -arch.vocab % tp if tensor.size(0) == arch.vocab and name in (_EMBEDDING, _OUTPUT) else 0
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.size(1))]) if missing else tensor


def megatron_to_hf(
    name: str, tensor: Tensor, arch: ModelShape, *, value_head: bool = False
) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors in the whole Megatron parameter `name`, without vocabulary padding."""
    names = hf_names(name, arch, value_head=value_head)
    if len(names) == 3:
        queries = arch.heads // arch.kv_heads * arch.head_dim
        grouped = tensor.reshape(arch.kv_heads, -1, *tensor.shape[1:])
        parts = [
            part.reshape(-1, *tensor.shape[1:])
            for part in grouped.split([queries, arch.head_dim, arch.head_dim], 1)
        ]
    elif len(names) == 2:
        parts = list(tensor.chunk(2))
    else:
        parts = [tensor[: arch.vocab] if name in (_EMBEDDING, _OUTPUT) else tensor]
    return list(zip(names, parts))


def shard(name: str, whole: Tensor, tp: int, tp_rank: int, *, value_head: bool = False) -> Tensor:
    """The part of the whole Megatron parameter `name` that tensor rank `tp_rank` holds."""
    cut = _rule(name, value_head).cut
    if tp == 1 or cut is Cut.WHOLE:
        return whole
    if cut is Cut.HALVES:
        return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
    return whole.chunk(tp, 1 if cut is Cut.COLUMNS else 0)[tp_rank]


def whole_shape(
    name: str, shard_shape: tuple[int, ...], tp: int, *, value_head: bool = False
) -> tuple[int, ...]:
    """The shape of the whole Megatron parameter `name` of which a rank holds `shard_shape`."""
    cut = _rule(name, value_head).cut
    if cut is Cut.WHOLE:
        return shard_shape
    axis = 1 if cut is Cut.COLUMNS else 0
    return tuple(size * tp if i == axis else size for i, size in enumerate(shard_shape))


def unshard(name: str, shards: Sequence[Tensor], *, value_head: bool = False) -> Tensor:
    """The whole Megatron parameter `name` from all tensor ranks' parts, in rank order."""
    cut = _rule(name, value_head).cut
    if len(shards) == 1 or cut is Cut.WHOLE:
        return shards[0]
    if cut is Cut.HALVES:
        halves = [x.chunk(2) for x in shards]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
    return torch.cat(list(shards), 1 if cut is Cut.COLUMNS else 0)


def _split_layer(name: str) -> tuple[int | None, str]:
    if not name.startswith("decoder.layers."):
        return None, name
    _, _, layer, rest = name.split(".", 3)
    return int(layer), rest


def _rule(name: str, value_head: bool) -> _Rule:
    layer, rest = _split_layer(name)
    if layer is not None:
        rule = _LAYER_RULES.get(_FUSED_NORMS.get(rest, rest))
    else:
        rule = (_OTHER_RULES | (_VALUE_RULES if value_head else {})).get(name)
    if rule is None:
        raise WeightError(f"the Megatron parameter {name!r} has no counterpart in a Hugging Face checkpoint")
    return rule
