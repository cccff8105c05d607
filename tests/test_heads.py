"""The policy head against a float64 softmax written out in full; the value head's start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ppo_lightning.megatron import kernels
from ppo_lightning.megatron.heads import fresh_value_head, log_probs_and_entropy
from tests.distributed.ranks import run_ranks

TOKENS, HIDDEN, VOCAB = 13, 8, 29
TEMPERATURE = 0.6


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets, and the slopes of a loss in log-probability and entropy; some slopes are 0."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[:2] = torch.tensor([0, VOCAB - 1])
    slopes, entropy_slopes = torch.randn(2, TOKENS, generator=g, dtype=torch.float64)
    slopes[3], entropy_slopes[3:5] = 0, 0
    return hidden.to(dtype), weight.to(dtype), targets, slopes, entropy_slopes


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().T / TEMPERATURE
    logp = logits - logits.logsumexp(1, keepdim=True)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def expected(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    hidden, weight, targets, slopes, entropy_slopes = inputs(dtype)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logprobs, entropy = reference(hidden, weight, targets)
    ((logprobs * slopes).sum() + (entropy * entropy_slopes).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def computed(dtype: torch.dtype, chunk_size: int | None) -> dict[str, Tensor]:
    hidden, weight, targets, slopes, entropy_slopes = inputs(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = log_probs_and_entropy(
        hidden,
        weight,
        targets,
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
        chunk_size=chunk_size,
        entropy=True,
    )
    assert entropy is not None
    ((logprobs * slopes).sum() + (entropy * entropy_slopes).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100, None])
def test_any_chunk_size_is_the_softmax_in_full(chunk_size: int | None) -> None:
    want = expected()
    for name, tensor in computed(torch.float32, chunk_size).items():
        torch.testing.assert_close(tensor.double(), want[name], rtol=2e-5, atol=2e-5, msg=name)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    want = expected(torch.bfloat16)
    found = computed(torch.bfloat16, 4)
    assert found["logprobs"].dtype == found["entropy"].dtype == torch.float32
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(found[name].double(), want[name], rtol=2e-5, atol=2e-5, msg=name)
    for name in ("hidden", "weight"):  # rounded once, at the end
        torch.testing.assert_close(found[name].double(), want[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_loops_of_the_softmax_are_its_formulas(threads: int) -> None:
    """In fp32 compiled loops, in fp64 torch; rows without a target here among them."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(37, 50_257, generator=g, dtype=torch.float64) * 4 + 20
    targets = torch.randint(-1, 50_257, (37,), generator=g)
    targets[3:5] = -1
    slopes, entropy_slopes = torch.randn(2, 37, generator=g, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = [
        softmax(logits.to(dtype), targets, slopes.to(dtype), entropy_slopes.to(dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    torch.set_num_threads(before)
    for single, double in zip(*found):
        torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=2e-5)


def softmax(logits: Tensor, targets: Tensor, slopes: Tensor, entropy_slopes: Tensor) -> list[Tensor]:
    """Chosen logits, normalizers and entropies, and the logits' gradient without and with the entropy's."""
    chosen, normalizer, entropies = torch.full((3, len(logits)), 7.0, dtype=logits.dtype)
    kernels.softmax_sums(logits, targets.clamp(min=0), chosen, normalizer, entropies)
    bare, grads = torch.empty_like(normalizer), []
    kernels.softmax_sums(logits, targets.clamp(min=0), chosen, bare, None)
    for spread in (None, (entropy_slopes, entropies)):
        out, work = torch.empty_like(logits), torch.empty_like(logits)
        kernels.softmax_slopes(logits, targets, normalizer, slopes, spread, out, work)
        grads.append(out)
    return [chosen, normalizer, bare, entropies, *grads]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_seen(bad: float) -> None:
    hidden, weight, targets, *_ = inputs()
    hidden[7, 0], weight[:, 0] = bad, weight[:, 0].abs()
    logprobs, entropy = log_probs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, entropy=True)
    assert entropy is not None
    for found in (logprobs, entropy):
        assert found.isnan().tolist() == [i == 7 for i in range(TOKENS)]


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, targets, _, _ = inputs(torch.float64)

    def head(hidden: Tensor, weight: Tensor) -> Any:
        return log_probs_and_entropy(
            hidden, weight, targets, vocab_size=VOCAB, temperature=TEMPERATURE, chunk_size=5, entropy=True
        )

    assert torch.autograd.gradcheck(head, (hidden.requires_grad_(), weight.requires_grad_()))


def test_large_logits_stay_finite() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3e4], [-3e4], [2.9e4]])
    logprobs, entropy = log_probs_and_entropy(
        hidden, weight, torch.tensor([2]), vocab_size=3, temperature=1e-2, entropy=True
    )
    assert logprobs.item() == pytest.approx(-1e5)
    assert entropy is not None
    assert entropy.item() == 0


def test_uniform_distribution_has_the_entropy_of_the_real_vocabulary() -> None:
    logprobs, entropy = log_probs_and_entropy(
        torch.zeros(1, 2), torch.ones(8, 2), torch.tensor([0]), vocab_size=5, entropy=True
    )
    assert entropy is not None
    assert entropy.item() == pytest.approx(math.log(5), rel=1e-6)  # three of the eight columns are padding
    assert logprobs.item() == pytest.approx(-math.log(5), rel=1e-6)


def test_tokens_without_slope_get_exactly_no_gradient() -> None:
    """Even where their hidden state is not finite."""
    hidden, weight, targets, *_ = inputs()
    hidden[7] = math.nan
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, _ = log_probs_and_entropy(hidden, weight, targets, vocab_size=VOCAB)
    torch.where(torch.arange(TOKENS) == 7, 0, logprobs).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad[7].abs().max() == 0
    assert weight.grad.isfinite().all()


def test_no_tokens_give_no_outputs_and_zero_gradients() -> None:
    _, weight, *_ = inputs()
    hidden = torch.empty(0, HIDDEN, requires_grad=True)
    weight.requires_grad_()
    logprobs, _ = log_probs_and_entropy(hidden, weight, torch.empty(0, dtype=torch.int64), vocab_size=VOCAB)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_logits_never_exist_in_full() -> None:
    """The largest tensor made is a chunk: seen by every operator in forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    Largest.elements = max(Largest.elements, tensor.numel())
            return out

    hidden = torch.randn(200, HIDDEN, requires_grad=True)
    weight = torch.randn(100, HIDDEN, requires_grad=True)
    with Largest():
        logprobs, entropy = log_probs_and_entropy(
            hidden, weight, torch.zeros(200, dtype=torch.int64), vocab_size=100, chunk_size=16, entropy=True
        )
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    assert Largest.elements == 1600  # 16 tokens x 100 columns; hidden and its gradient are as large


def sharded(rank: int, world: int, padded: int, scale: float = 1.0) -> dict[str, Tensor]:
    """The head over `world` ranks; the padded rows of the weight are large, and must not be seen."""
    hidden, weight, targets, slopes, entropy_slopes = inputs()
    weight *= scale
    full = torch.cat([weight, torch.full((padded - VOCAB, HIDDEN), 50.0)])
    mine = full.chunk(world)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    logprobs, entropy = log_probs_and_entropy(
        hidden,
        mine,
        targets,
        vocab_size=VOCAB,
        group=dist.group.WORLD,
        temperature=TEMPERATURE,
        chunk_size=4,
        entropy=True,
    )
    assert entropy is not None
    ((logprobs * slopes).sum() + (entropy * entropy_slopes).sum()).backward()
    assert hidden.grad is not None
    assert mine.grad is not None
    dist.all_reduce(hidden.grad)
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": mine.grad,
    }


@pytest.mark.parametrize(
    ("world", "padded"), [(2, 30), (2, 64), (3, 30)]
)  # 64: the second rank has no token at all
def test_vocabulary_over_ranks_is_the_softmax_in_full(world: int, padded: int) -> None:
    want, ranks = expected(), run_ranks(sharded, world, padded)
    for found in ranks:
        for name in ("logprobs", "entropy", "hidden"):
            torch.testing.assert_close(found[name].double(), want[name], rtol=2e-5, atol=2e-5, msg=name)
    weight = torch.cat([found["weight"] for found in ranks])
    torch.testing.assert_close(weight[:VOCAB].double(), want["weight"], rtol=2e-5, atol=2e-5)
    assert weight[VOCAB:].abs().max() == 0


def test_rank_without_any_probability_gives_finite_gradients() -> None:
    """Logits so far apart that one rank's share of the distribution is below the smallest float."""
    for found in run_ranks(sharded, 2, 30, 300.0):
        for name, tensor in found.items():
            assert tensor.isfinite().all(), name


def test_fresh_value_head_follows_its_seed() -> None:
    weight = fresh_value_head(10_000, seed=3)
    assert weight.shape == (1, 10_000)
    assert torch.equal(weight, fresh_value_head(10_000, seed=3))
    assert not torch.equal(weight, fresh_value_head(10_000, seed=4))
    assert abs(weight.std().item() - 0.02) < 5e-4
    assert abs(weight.mean().item()) < 1e-3
