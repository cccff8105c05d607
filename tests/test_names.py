"""The mapping of names and shapes: hand-worked orders, and transformers' own state dicts as the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
)

from ppo_lightning.megatron import names

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6)),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "critic": (Qwen3ForTokenClassification, Qwen3Config(**SIZES, head_dim=6, num_labels=1)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_of_transformers_has_its_place(kind: str) -> None:
    model_class, config = MODELS[kind]
    arch, critic = names.architecture(config), kind == "critic"
    state = model_class(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    sources = [
        s
        for n in names.megatron_names(arch, value_head=critic)
        for s in names.hf_names(n, arch, value_head=critic)
    ]
    assert sorted(sources) == sorted(state)
    assert {s: names.hf_shape(s, arch) for s in sources} == {k: tuple(v.shape) for k, v in state.items()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_to_shards_and_back_is_the_same_bits(kind: str, tp: int) -> None:
    model_class, config = MODELS[kind]
    arch, critic = names.architecture(config), kind == "critic"
    state = model_class(config).state_dict()
    for name in names.megatron_names(arch, value_head=critic):
        tensors = [state[s] for s in names.hf_names(name, arch, value_head=critic)]
        whole = names.hf_to_megatron(name, tensors, arch, tp=tp)
        shards = [names.shard(name, whole, tp, rank, value_head=critic) for rank in range(tp)]
        assert names.whole_shape(name, tuple(shards[0].shape), tp, value_head=critic) == tuple(whole.shape)
        again = names.unshard(name, shards, value_head=critic)
        for source, tensor in names.megatron_to_hf(name, again, arch, value_head=critic):
            assert torch.equal(tensor, state[source]), source


def test_queries_keys_and_values_are_stacked_by_group() -> None:
    arch = names.architecture(Qwen2Config(**SIZES | {"hidden_size": 4}))  # 4 heads of 1, 2 groups
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    name = "decoder.layers.1.self_attention.linear_qkv.bias"
    whole = names.hf_to_megatron(name, [q, k, v], arch)
    assert whole.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert names.shard(name, whole, 2, 1).tolist() == [2, 3, 11, 21]  # a rank holds whole groups
    weight = names.hf_to_megatron(
        name.replace("bias", "weight"), [x[:, None].expand(-1, 4) for x in (q, k, v)], arch
    )
    assert weight[:, 3].tolist() == whole.tolist()


def test_gate_and_up_are_cut_separately() -> None:
    arch = names.architecture(MODELS["llama"][1])
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    whole = names.hf_to_megatron(name, [torch.tensor([[1], [2]]), torch.tensor([[3], [4]])], arch)
    assert whole.flatten().tolist() == [1, 2, 3, 4]
    assert names.shard(name, whole, 2, 0).flatten().tolist() == [1, 3]
    assert names.unshard(name, [torch.tensor([[1], [3]]), torch.tensor([[2], [4]])]).flatten().tolist() == [
        1,
        2,
        3,
        4,
    ]


def test_vocabulary_is_padded_with_zeros_and_cut_again() -> None:
    arch = names.architecture(MODELS["qwen3"][1])
    embedding = torch.ones(11, 12)
    whole = names.hf_to_megatron("output_layer.weight", [embedding], arch, tp=4)
    assert whole.shape == (12, 12)
    assert whole[11].abs().max() == 0
    ((name, back),) = names.megatron_to_hf("output_layer.weight", whole, arch)
    assert name == "lm_head.weight"
    assert torch.equal(back, embedding)


def test_tied_output_is_read_from_the_embedding_and_never_written() -> None:
    arch = names.architecture(MODELS["qwen3-tied"][1])
    assert names.hf_names("output_layer.weight", arch) == ["model.embed_tokens.weight"]
    assert "output_layer.weight" not in names.megatron_names(arch)


def test_local_names_of_a_later_stage_and_of_transformer_engine() -> None:
    assert (
        names.global_name("decoder.layers.1.mlp.linear_fc2.weight", 6)
        == "decoder.layers.7.mlp.linear_fc2.weight"
    )
    fused = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert names.global_name(fused, 2) == "decoder.layers.2.input_layernorm.weight"
    assert names.global_name("embedding.word_embeddings.weight", 6) == "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), r"'gpt2' is not supported; supported are qwen3, llama, qwen2"),
        (Qwen3MoeConfig(), r"'qwen3_moe' is not supported"),
        (LlamaConfig(mlp_bias=True), r"llama with mlp_bias=True is not supported"),
        (Qwen3Config(attention_bias=True), r"qwen3 with attention_bias=True"),
        (LlamaConfig(hidden_act="gelu"), r"llama with hidden_act='gelu'"),
    ],
    ids=["gpt2", "moe", "mlp_bias", "attention_bias", "gelu"],
)
def test_what_is_not_supported_is_named(config: Any, message: str) -> None:
    with pytest.raises(names.UnsupportedArchitectureError, match=message):
        names.architecture(config)


def test_unknown_parameter_is_named() -> None:
    with pytest.raises(names.WeightError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        names.hf_names("decoder.layers.0.mlp.router.weight", names.architecture(MODELS["llama"][1]))


FUSED = {  # mbridge names the norms as Transformer Engine does, inside the linear layer that they feed
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3-tied"])
def test_mbridge_agrees(kind: str) -> None:
    """Names and merged tensors, against another project's mapping: `pip install --no-deps mbridge`."""
    mbridge = pytest.importorskip("mbridge")
    model_class, config = MODELS[kind]
    arch, state = names.architecture(config), model_class(config).state_dict()
    alone = SimpleNamespace(vpp_size=None, tp_rank=0, pp_rank=0, ep_rank=0, sp=False)
    for size in ("pp_size", "tp_size", "ep_size", "etp_size", "cp_size"):
        setattr(alone, size, 1)
    bridge = mbridge.AutoBridge.from_config(config, dtype=torch.float32, parallel_states=alone)
    compared = 0
    for name in names.megatron_names(arch):
        ours = names.hf_names(name, arch)
        fused = next((name.replace(a, b) for a, b in FUSED.items() if name.endswith(a)), name)
        if name != "output_layer.weight":  # its mapping there depends on what was bridged before
            theirs = bridge._weight_name_mapping_mcore_to_hf(fused)
            assert ours == ([theirs] if isinstance(theirs, str) else theirs)
        tensors = [state[source] for source in ours]
        merged = bridge._weight_to_mcore_format(fused, tensors)
        assert torch.equal(merged, names.hf_to_megatron(name, tensors, arch)), name
        compared += 1
    assert compared >= 10
