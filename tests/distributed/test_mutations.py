"""Seeded faults: each is a mistake that PPO trainers make, and the matrix must see it.

A fault is patched into the product before the ranks are forked. The ranks must run to their end: a fault that
crashes shows nothing about the comparison.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_lightning import advantages, experience, losses, masked
from ppo_lightning.megatron import heads, model, optimizer, roles
from ppo_lightning.megatron.strategy import MegatronStrategy
from tests.matrix import LAYOUTS
from tests.matrix_run import Workshop, compare

Patch = pytest.MonkeyPatch
FAULTS: dict[str, tuple[str, str, str, Callable[[Patch], None], bool]] = {}


def fault(layout: str, variant: str, seen: str, *, quick: bool = False) -> Callable[..., Any]:
    """`seen`: what the comparison must complain about, a pattern."""

    def register(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[function.__name__] = (layout, variant, seen, function, quick)
        return function

    return register


# the mathematics -----------------------------------------------------------------------------------------


@fault("one", "static", "token (advantages|returns)", quick=True)
def gamma_is_ignored(patch: Patch) -> None:
    real = advantages.gae
    patch.setattr(advantages, "gae", lambda r, v, mask, gamma, lambd: real(r, v, mask, 1.0, lambd))


@fault("one", "static", "token (advantages|returns)", quick=True)
def tool_tokens_are_transitions(patch: Patch) -> None:
    real = advantages.gae

    def wrong(r: Tensor, v: Tensor, mask: Tensor, gamma: float, lambd: float) -> Any:
        up_to_last = mask.flip(1).cummax(1).values.flip(1)
        return tuple(torch.where(mask, x, 0.0) for x in real(r, v, up_to_last, gamma, lambd))

    patch.setattr(advantages, "gae", wrong)


@fault("one", "static", "metric train/kl_loss", quick=True)
def kl_has_the_other_sign(patch: Patch) -> None:
    real = losses.kl
    patch.setattr(losses, "kl", lambda kind, p, q: real(kind, q, p))


@fault("one", "static", "grad_norm train/grad_norm")
def entropy_is_punished(patch: Patch) -> None:
    real = losses._add
    patch.setattr(losses, "_add", lambda loss, c, term: real(loss, abs(c), term))


@fault("one", "static", "deviates")
def upper_clip_is_the_lower_one(patch: Patch) -> None:
    real = losses.ppo_loss
    patch.setattr(losses, "ppo_loss", lambda ratio, a, low, high, dual: real(ratio, a, low, low, dual))


@fault("one", "scarce", "deviates")
def dual_clip_is_forgotten(patch: Patch) -> None:
    real = losses.ppo_loss
    patch.setattr(losses, "ppo_loss", lambda ratio, a, low, high, dual: real(ratio, a, low, high, None))


@fault("one", "static", "deviates")
def value_clip_is_forgotten(patch: Patch) -> None:
    real = losses.value_loss
    patch.setattr(losses, "value_loss", lambda v, old, returns, clip: real(v, old, returns, None))


@fault("one", "static", "token (old|ref)")
def temperature_is_forgotten(patch: Patch) -> None:
    real = MegatronStrategy.setup_model

    def cold(self: Any, *args: Any, temperature: float, **kwargs: Any) -> None:
        real(self, *args, temperature=1.0, **kwargs)

    patch.setattr(MegatronStrategy, "setup_model", cold)


# denominators --------------------------------------------------------------------------------------------


MICROBATCHES = experience.microbatches


def locally_weighted(*args: Any, **kwargs: Any) -> Any:
    """A mean of every micro-batch, then the mean of these."""
    batches = MICROBATCHES(*args, **kwargs)
    for batch in batches:
        total = batch.fields.weight.sum()
        if total > 0:
            batch.fields.weight = batch.fields.weight / total / len(batches)
    return batches


@fault("one", "static", "metric", quick=True)
def denominators_are_those_of_the_micro_batch(patch: Patch) -> None:
    patch.setattr(experience, "microbatches", locally_weighted)


@fault("one", "tokens", "metric")
def token_mean_is_taken_by_micro_batch(patch: Patch) -> None:
    patch.setattr(experience, "microbatches", locally_weighted)


@fault("one", "static", "metric")
def fully_masked_samples_are_counted(patch: Patch) -> None:
    real = losses.token_weights

    def diluted(counts: Tensor, per_token: bool, constant_length: int | None = None) -> Tensor:
        return real(counts, per_token, constant_length) * (counts > 0).sum() / len(counts)

    patch.setattr(losses, "token_weights", diluted)


# across ranks --------------------------------------------------------------------------------------------


@fault("dp2", "static", "token advantages", quick=True)
def whitening_stays_on_its_rank(patch: Patch) -> None:
    patch.setattr(advantages, "whiten", lambda x, mask, reduce: masked.whiten(x, mask))


@fault("dp2", "static", "grad_norm")
def gradients_are_averaged_over_data_ranks(patch: Patch) -> None:
    real = model.transformer_config

    def averaging(*args: Any) -> Any:
        config = real(*args)
        config.calculate_per_token_loss = False
        return config

    patch.setattr(model, "transformer_config", averaging)


@fault("cp2", "static", "ranks log")
def context_ranks_are_left_out_of_the_metrics(patch: Patch) -> None:
    real = roles.Role._summed

    def alone(self: Any, parts: Any) -> dict[str, float]:
        return real(dataclasses.replace(self, topology=dataclasses.replace(self.topology, cp=1)), parts)

    patch.setattr(roles.Role, "_summed", alone)


@fault("cp2", "static", "ranks log|deviates")
def context_gradients_stay_on_their_rank(patch: Patch) -> None:
    patch.setattr(roles.DistributedDataParallel, "finish_grad_sync", lambda self, *args, **kwargs: None)
    patch.setattr(roles.DistributedDataParallel, "start_grad_sync", lambda self, *args, **kwargs: None)


@fault("tp2 sp", "static", r"score\.bias|output_layer\.bias", quick=True)
def value_head_bias_is_not_marked_sequence_parallel(patch: Patch) -> None:
    real = heads.ValueHead.__init__

    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.bias.sequence_parallel = False

    patch.setattr(heads.ValueHead, "__init__", unmarked)


@fault("tp2 sp", "static", "deviates|differs")
def norms_are_not_marked_sequence_parallel(patch: Patch) -> None:
    real = model.RMSNorm.__init__

    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    patch.setattr(model.RMSNorm, "__init__", unmarked)


@fault("tp2", "static", "grad_norm", quick=True)
def gradient_norm_leaves_shards_out(patch: Patch) -> None:
    patch.setattr(roles, "_mark_tensor_parallel", lambda models: None)


@fault("tp2", "static", "token (old|ref)")
def padded_vocabulary_has_probability(patch: Patch) -> None:
    real = model.log_probs_and_entropy

    def padded(hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, **kwargs: Any) -> Any:
        return real(hidden, weight, targets, vocab_size=2 * weight.size(0), **kwargs)

    patch.setattr(model, "log_probs_and_entropy", padded)


@fault("pp2", "static", "differs")
def tied_embeddings_keep_their_gradients(patch: Patch) -> None:
    # by name: the package has a function of the module's name
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    patch.setattr(module, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


@fault("dp2", "sharded", "deviates")
def norms_and_biases_decay(patch: Patch) -> None:
    real = optimizer.build_optimizer

    def decaying(chunks: Any, options: Any, **kwargs: Any) -> Any:
        made = real(chunks, options, **kwargs)
        for group in made.param_groups:
            group["weight_decay"] = options.weight_decay
        return made

    patch.setattr(roles, "build_optimizer", decaying)


@fault("dp2", "static", "ranks log")
def critic_metrics_stay_on_their_rank(patch: Patch) -> None:
    from ppo_lightning import module

    real = module.experience_metrics
    patch.setattr(module, "experience_metrics", lambda share, reduce: real(share, masked.identity))


# the tests -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("mutations"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if f[4] else [pytest.mark.slow]) for n, f in FAULTS.items()]
)
def test_the_matrix_sees(workshop: Workshop, monkeypatch: Patch, name: str) -> None:
    layout, variant, seen, patch, _ = FAULTS[name]
    workshop.reference(variant)
    patch(monkeypatch)
    ranks = workshop.run(LAYOUTS[layout], [variant])[variant]
    with pytest.raises(AssertionError, match=seen):
        compare(ranks, workshop.reference(variant)).check()


def test_without_a_fault_there_is_nothing_to_see(workshop: Workshop) -> None:
    ranks = workshop.run(LAYOUTS["one"], ["static"])["static"]
    compare(ranks, workshop.reference("static")).check()
