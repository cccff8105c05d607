"""The table behind tests/distributed/test_matrix.py and `make fidelity`: layouts, variants, fixed rollouts.

A *layout* says how ranks share the work, a *variant* which model and which options. tests/matrix_run.py runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForTokenClassification, Qwen3ForTokenClassification

from ppo_lightning.samples import Sample, Status
from tests import reference
from tests.tinymodel import make_tiny_model

# models and rollouts -------------------------------------------------------------------------------------

VOCAB = 101  # odd: padded under TP 2
MODELS: dict[str, dict[str, Any]] = {
    "qwen3 tied": {"arch": "qwen3", "tie_word_embeddings": True},
    "qwen3 untied": {"arch": "qwen3", "tie_word_embeddings": False},
    "llama untied": {"arch": "llama", "tie_word_embeddings": False},
    "llama tied": {"arch": "llama", "tie_word_embeddings": True},
}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,  # transformers keeps the gradient of a padding token at zero
    "eos_token_id": None,
}
CLASSIFIER = {"qwen3": Qwen3ForTokenClassification, "llama": LlamaForTokenClassification}
# prompt tokens, response tokens, masked response positions, status
SHAPES: list[list[tuple[int, int, list[int], Status]]] = [
    [
        (5, 9, [3, 4, 5], Status.COMPLETED),  # tool output inside
        (3, 14, [], Status.TRUNCATED),
        (6, 1, [], Status.COMPLETED),  # one token
        (4, 7, [*range(7)], Status.COMPLETED),  # nothing trainable
        (2, 11, [9, 10], Status.COMPLETED),  # the reward belongs before the masked end
        (7, 5, [], Status.COMPLETED),
        (3, 8, [0], Status.COMPLETED),
        (9, 3, [1], Status.COMPLETED),
    ],
    [
        (4, 6, [], Status.COMPLETED),
        (2, 12, [5, 6, 8], Status.TRUNCATED),
        (8, 2, [], Status.FAILED),  # not trained on, whatever its reward
        (3, 10, [], Status.COMPLETED),
        (1, 4, [], Status.COMPLETED),
        (6, 1, [], Status.COMPLETED),
        (5, 13, [0, 1, 12], Status.COMPLETED),
        (4, 5, [2], Status.COMPLETED),
    ],
]


def model_paths(directory: Path, name: str) -> dict[str, Path]:
    return {role: directory / name.replace(" ", "_") / role for role in ("actor", "reference", "critic")}


def make_models(directory: Path, name: str) -> None:
    """Actor, reference and critic with weights of their own, norms and biases that are not ones and zeros."""
    arch = MODELS[name]["arch"]
    changes = SHAPE | {"tie_word_embeddings": MODELS[name]["tie_word_embeddings"]}
    for seed, (role, path) in enumerate(model_paths(directory, name).items()):
        model: Any = make_tiny_model(path, arch, seed=seed, **changes)
        generator = torch.Generator().manual_seed(seed)
        if role == "critic":
            model.config.num_labels = 1
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = CLASSIFIER[arch](model.config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.save_pretrained(path)


def make_rollouts(count: int = len(SHAPES)) -> list[list[Sample]]:
    """Fixed scored rollouts; the engine's log-probs stray from the trainer's."""
    generator = torch.Generator().manual_seed(11)
    rollouts = []
    for shapes in SHAPES[:count]:
        samples = []
        for index, (prompt, response, masked, status) in enumerate(shapes):
            tokens = torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist()
            drift = (-4.5 + torch.randn(response, generator=generator) * 0.5).tolist()
            reward = torch.randn((), generator=generator).item()
            samples.append(
                Sample(
                    prompt="",
                    tokens=tokens,
                    response_length=response,
                    loss_mask=[int(t not in masked) for t in range(response)] if masked else None,
                    rollout_log_probs=drift,
                    reward=0.0 if status is Status.FAILED else reward,
                    status=status,
                    group_index=index // 2,
                    index=index,
                )
            )
        rollouts.append(samples)
    return rollouts


def plain(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """As they are stored."""
    return [asdict(s) | {"status": str(s.status)} for s in samples]


# variants ------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "gamma": 0.97,
    "lambd": 0.9,
    "normalize_advantages": True,
    "eps_clip": 0.15,
    "eps_clip_high": 0.22,
    "eps_clip_c": 1.5,
    "value_clip": 0.12,
    "use_kl_loss": True,
    "kl_loss_coef": 0.05,
    "kl_loss_type": "k3",
    "entropy_coef": 0.02,
    "rollout_temperature": 0.8,
    "lr": 6e-3,
    "critic_lr": 4e-3,
    # Adam's first step is lr * g / (|g| + eps): an error of g counts lr / eps times in the parameter where
    # |g| is small. At 1e-3 that factor is 6, and gradients known to 1e-7 leave 6e-7.
    "adam_eps": 1e-3,
    "clip_grad": 1.0,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "num_steps_per_rollout": 2,
    "num_rollout": 1,
    "micro_batch_size": 2,
}


@dataclass(frozen=True)
class Variant:
    """A model and what differs from BASE. `watched`: a callback looks at every token's numbers before the
    updates; nobody does so in an ordinary run, which then leaves out forward passes that it does not need.
    """

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    watched: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return BASE | self.changes

    def reference(self, directories: dict[str, Path]) -> reference.Result:
        known = {f.name for f in fields(reference.Options)}
        options = reference.Options(**{k: v for k, v in self.options.items() if k in known})
        scored = [plain(r) for r in make_rollouts(self.options["num_rollout"])]
        return reference.run(directories, scored, options)


FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DYNAMIC = {"use_dynamic_batch_size": True, "balance_data": True}
VARIANTS: dict[str, Variant] = {
    # two optimizer steps on one rollout, two samples a micro-batch
    "static": Variant("qwen3 tied"),
    # one step on each of two rollouts, mean over tokens, packed by length, balanced, recomputed
    "tokens": Variant(
        "llama untied",
        {"num_rollout": 2, "num_steps_per_rollout": 1, "calculate_per_token_loss": True}
        | {**DYNAMIC, "max_tokens_per_gpu": 40, "kl_loss_type": "low_var_kl", **FULL_RECOMPUTE}
        | {"critic_lambd": 1.0},
    ),
    # states sharded over data and context ranks
    "sharded": Variant(
        "qwen3 untied",
        {**DYNAMIC, "max_tokens_per_gpu": 24, "use_distributed_optimizer": True, "kl_loss_type": "k2"}
        | {"log_probs_chunk_size": 5, "gamma": 1.0, "critic_lambd": 1.0},
        watched=False,
    ),
    # three passes of one step each, a warm-up, truncated samples left out, gradients as they are
    "epochs": Variant(
        "llama tied",
        {"ppo_epochs": 3, "num_steps_per_rollout": 1, "micro_batch_size": 3, "kl_loss_type": "k1"}
        | {
            "lr_warmup_iters": 2,
            "clip_grad": 0.0,
            "mask_truncated_samples": True,
            "normalize_advantages": False,
        }
        | {"gamma": 1.0, "lambd": 1.0, "head_lr_mult": 2.0, "recompute_granularity": "selective"},
        watched=False,
    ),
    # two samples a step, one a micro-batch: with four data ranks, two of them never have any
    "scarce": Variant(
        "qwen3 tied",
        {"num_steps_per_rollout": 4, "micro_batch_size": 1}
        | {"calculate_per_token_loss": True, "use_distributed_optimizer": True},
        watched=False,
    ),
}


# Where rounding is coarse it decides on which side of a clip boundary a token is, and so whether it has a
# gradient at all: without boundaries all that is left is rounding.
UNCLIPPED = {"value_clip": 100.0, "eps_clip": 0.99, "eps_clip_high": 100.0, "eps_clip_c": 1000.0}
# outside the table: what the reference does not speak of, or not in fp32
OTHERS: dict[str, Variant] = {
    "bf16": Variant("qwen3 tied", {"bf16": True, **UNCLIPPED}),
    "bf16 sharded": Variant(
        "llama untied",
        {"bf16": True, **UNCLIPPED, **DYNAMIC, "max_tokens_per_gpu": 40, "use_distributed_optimizer": True},
    ),
    # terms that need whole sequences, whose tokens lie on several context ranks
    "sequence": Variant(
        "qwen3 tied",
        {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 0.01, "use_tis": True},
    ),
}


@dataclass(frozen=True)
class Layout:
    world: int
    sizes: dict[str, Any]
    variants: tuple[str, ...]


def _layout(
    variants: str, *, tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, vpp: int = 1, sp: bool = False,
) -> Layout:  # fmt: skip
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "sequence_parallel": sp,
    }
    if vpp > 1:
        sizes["virtual_pipeline_model_parallel_size"] = vpp
    return Layout(tp * pp * cp * dp, sizes, tuple(variants.split()))


LAYOUTS: dict[str, Layout] = {
    "one": _layout("static tokens sharded epochs scarce"),
    "tp2": _layout("static tokens epochs", tp=2),
    "tp2 sp": _layout("static tokens sharded", tp=2, sp=True),
    "pp2": _layout("static tokens epochs", pp=2),
    "pp4": _layout("static epochs", pp=4),
    "pp2 vpp2": _layout("static tokens sharded", pp=2, vpp=2),
    "cp2": _layout("static tokens sharded", cp=2),
    "cp4": _layout("tokens epochs", cp=4),
    "dp2": _layout("static tokens sharded scarce", dp=2),
    "dp4": _layout("tokens epochs scarce", dp=4),
    "tp2 pp2": _layout("static tokens scarce", tp=2, pp=2),
    "tp2 cp2 sp": _layout("static sharded", tp=2, cp=2, sp=True),
    "pp2 cp2": _layout("static epochs", pp=2, cp=2),
    "tp2 dp2 sp": _layout("static tokens sharded", tp=2, dp=2, sp=True),
    "pp2 dp2": _layout("static sharded epochs", pp=2, dp=2),
    "cp2 dp2": _layout("static tokens sharded", cp=2, dp=2),
}
