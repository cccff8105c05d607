"""A Megatron GPT from a Hugging Face configuration, whose last stage speaks of response tokens only."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ppo_lightning.architecture import ModelShape, recomputed_together
from ppo_lightning.megatron import cpu
from ppo_lightning.megatron.attention import PackedAttention, RotaryAttention
from ppo_lightning.megatron.batching import PackedBatch
from ppo_lightning.megatron.heads import ValueHead, log_probs_and_entropy
from ppo_lightning.megatron.kernels import SwiGLU, rms_norm
from ppo_lightning.megatron.names import (
    UnsupportedArchitectureError,
    architecture,
    has_qk_norm,
    has_qkv_bias,
    padded_vocab_size,
)
from ppo_lightning.megatron.topology import Topology, check_division
from ppo_lightning.samples import TokenOutputs


@dataclass(frozen=True)
class ModelOptions:
    """What a model is built with, besides its architecture and its place in the topology."""

    bf16: bool = False  # parameters and activations; the head and its outputs are fp32 all the same
    recompute_granularity: str | None = None  # "full" | "selective"
    recompute_method: str | None = None  # "uniform" | "block"
    recompute_num_layers: int | None = None
    use_te: bool | None = None  # Transformer Engine's layers; None: where CUDA and the package are there
    log_probs_chunk_size: int | None = None  # tokens whose logits exist at a time; None: by memory
    temperature: float = 1.0  # divides the logits, never the values
    seed: int = 1234  # of a fresh value head


class RMSNorm(nn.RMSNorm):
    """Local-layer norm that, unlike Megatron's wrapper, may stand in a sequence-parallel region."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class TokenModel(GPTModel):
    """One (virtual) pipeline stage: `packed` -> hidden states, or TokenOutputs from the last stage."""

    def __init__(
        self, *args: Any, options: ModelOptions, shape: ModelShape, value_head: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.options, self.shape, self.value_head = options, shape, value_head
        self.use_te = _use_te(options)
        if value_head and self.post_process:
            self.output_layer = ValueHead(self.config, seed=options.seed, group=self.pg_collection.tp)

    def forward(  # type: ignore[override]
        self, packed: PackedBatch, *, entropy: bool = False
    ) -> TokenOutputs | Tensor:
        """[t, 1, h] between stages; fp32 [m] outputs of the response tokens held here from the last one."""
        decoder_input, rotary = self._inputs(packed)
        hidden = self.decoder(
            hidden_states=decoder_input,
            attention_mask=None,
            rotary_pos_emb=rotary,
            packed_seq_params=packed.params,
        )
        if not self.post_process:
            return hidden
        if self.value_head:
            return TokenOutputs(values=self.output_layer(hidden)[packed.rows])
        return self._policy_outputs(hidden, packed, entropy)

    def _inputs(self, packed: PackedBatch) -> tuple[Tensor | None, Tensor | None]:
        """Embeddings on the first stage, and the rotary embedding that Megatron's layers apply; our own
        attention rotates by itself, all sequences at once."""
        if self.use_te:
            both = self._preprocess(
                input_ids=packed.tokens, position_ids=packed.position_ids, packed_seq_params=packed.params
            )
            return both[0], both[1]
        angles = packed.position_ids[0, :, None, None].float() * self.rotary_pos_emb.inv_freq
        packed.params.rotary = (angles.cos(), angles.sin())
        if not self.pre_process:
            return None, None
        return self.embedding(input_ids=packed.tokens, position_ids=packed.position_ids), None

    def _policy_outputs(self, hidden: Tensor, packed: PackedBatch, entropy: bool) -> TokenOutputs:
        group = self.pg_collection.tp
        # every tensor rank has its vocabulary's part of the gradient: both branches sum it
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)[packed.rows, 0]
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden[packed.rows, 0], group=group)
        tied = self.share_embeddings_and_output_weights
        logprobs, entropies = log_probs_and_entropy(
            hidden,
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            packed.targets,
            vocab_size=self.shape.vocab,
            group=group,
            temperature=self.options.temperature,
            chunk_size=self.options.log_probs_chunk_size,
            entropy=entropy,
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropies)


def build_model(
    hf_config: Any,
    topology: Topology,
    options: ModelOptions,
    *,
    value_head: bool,
    params_dtype: torch.dtype | None = None,
) -> list[nn.Module]:
    """This rank's share of the model, one module per virtual stage; parameters are not initialized.

    `params_dtype` is for conversions, which compute nothing: it stores parameters in that type.
    Raises UnsupportedArchitectureError, or ValueError where the model does not fit the topology.
    """
    cpu.prepared()
    arch = architecture(hf_config)
    check_division(arch, topology, _chunk(options))
    config = transformer_config(hf_config, topology, options, value_head=value_head, dtype=params_dtype)
    models: list[nn.Module] = []
    for stage in range(topology.vpp or 1):
        vp_stage = stage if topology.vpp else None
        gpt = TokenModel(
            config,
            _layer_spec(config, _use_te(options), vp_stage),
            vocab_size=padded_vocab_size(arch.vocab, topology.tp),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=arch.tied and not value_head,
            position_embedding_type="rope",
            vp_stage=vp_stage,
            options=options,
            shape=arch,
            value_head=value_head,
        )
        rotary: Any = gpt.rotary_pos_emb
        rotary.inv_freq = _inverse_frequencies(hf_config, arch).to(topology.device)
        gpt.to(topology.device)
        models.append(Float16Module(config, gpt) if options.bf16 else gpt)
    return models


def transformer_config(
    hf_config: Any, topology: Topology, options: ModelOptions, *, value_head: bool, dtype: torch.dtype | None
) -> TransformerConfig:
    """Megatron's configuration: gradients are summed over data and context ranks, and divided by nothing."""
    arch = architecture(hf_config)
    dtype = dtype or (torch.bfloat16 if options.bf16 else torch.float32)
    cuda = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=has_qk_norm(arch),
        add_qkv_bias=has_qkv_bias(arch),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_layout(arch, topology, options, value_head=value_head),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=options.bf16,
        attention_softmax_in_fp32=True,
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        calculate_per_token_loss=True,  # with `_sum_grads`: the sum over data and context ranks, undivided
        finalize_model_grads_func=_sum_grads,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even in dense models
        overlap_p2p_comm=topology.vpp is not None,
        batch_p2p_comm=topology.vpp is None,
        bias_activation_fusion=cuda and _use_te(options),
        use_te_activation_func=not _use_te(options),  # not its, but that of the layer spec: ours
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=cuda and _use_te(options),
        gradient_accumulation_fusion=False,
    )


def _chunk(options: ModelOptions) -> int:
    return recomputed_together(options.recompute_method, options.recompute_num_layers)


def _layout(
    arch: ModelShape, topology: Topology, options: ModelOptions, *, value_head: bool
) -> dict[str, Any]:
    """Sizes, and where stages have unlike numbers of layers these in Megatron's notation: "Ett|tL"."""
    chunk = _chunk(options)
    layers = arch.stage_layers(topology.pp, topology.vpp or 1, value_head=value_head, chunk=chunk)
    uneven = "E" + "|".join("t" * n for n in layers) + "L"
    return {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp,
        "pipeline_model_parallel_layout": None if len(set(layers)) == 1 else uneven,
        "context_parallel_size": topology.cp,
        "sequence_parallel": topology.sequence_parallel,
    }


def _sum_grads(models: list[nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's finalization without its division by a token count: losses come weighted."""
    finalize_model_grads(models, None, **kwargs)


def _use_te(options: ModelOptions) -> bool:
    if options.use_te is not None:
        return options.use_te
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def _layer_spec(
    config: TransformerConfig, use_te: bool, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.self_attention.module = RotaryAttention
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.mlp.submodules.activation_func = SwiGLU
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


def _inverse_frequencies(hf_config: Any, arch: ModelShape) -> Tensor:
    """The rotary embedding's frequencies [d/2] as transformers computes them: Megatron's own scaling
    knows only one set of Llama 3's constants."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents)
    if kind not in ("linear", "llama3"):
        raise UnsupportedArchitectureError(
            f"{arch.model_type} with rope_type={kind!r} is not supported; only default, linear, llama3 are"
        )
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies
