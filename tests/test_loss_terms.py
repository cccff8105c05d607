"""Terms per token: golden values, and what each KL estimator does as a value and as a loss, summed exactly
over a small vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppo_lightning.losses import (
    KLController,
    importance_weights,
    kl,
    ppo_loss,
    probability_ratio,
    token_weights,
    value_loss,
)

GOLDEN = json.loads((Path(__file__).parent / "data/golden_ppo.json").read_text())
KINDS = ["k1", "k2", "k3", "low_var_kl"]


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_golden_kl(kind: str) -> None:
    inputs = GOLDEN["inputs"]["kl"]
    got = kl(kind, torch.tensor(inputs["log_probs"]), torch.tensor(inputs["log_probs_base"]))
    torch.testing.assert_close(got, torch.tensor(GOLDEN[f"kl_{kind}"]), rtol=1e-6, atol=1e-7)


def test_golden_policy_loss() -> None:
    inputs = GOLDEN["inputs"]["policy_loss"]
    ratio = probability_ratio(-torch.tensor(inputs["old_minus_new"]), torch.zeros(6))
    got = ppo_loss(ratio, torch.tensor(inputs["advantages"]), inputs["eps_clip"], inputs["eps_clip_high"])
    torch.testing.assert_close(torch.stack(got), torch.tensor(GOLDEN["pg_cNone"]), rtol=1e-6, atol=1e-7)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    ratio = torch.tensor([30.0, 30.0, 0.9, 2.0])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    loss, _ = ppo_loss(ratio, advantages, 0.2, eps_clip_c=3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, -1.2, 0.9, 2.0]))


def test_k2_and_the_bounds_of_low_var_kl() -> None:
    p, q = torch.tensor([-1.0, -50.0, 0.0]), torch.tensor([-4.0, -1.0, -200.0])
    torch.testing.assert_close(kl("k2", p, q), torch.tensor([4.5, 49**2 / 2, 20000.0]))
    torch.testing.assert_close(kl("low_var_kl", p, q)[1:], torch.tensor([10.0, 10.0]))
    with pytest.raises(ValueError, match="k5"):
        kl("k5", p, q)


def test_value_loss_takes_the_worse_of_both() -> None:
    loss, clipped = value_loss(torch.tensor([1.0, 0.1]), torch.zeros(2), torch.tensor([1.0, 0.0]), 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.64, 0.01]))
    assert clipped.tolist() == [1.0, 0.0]


def test_importance_weights_are_truncated_on_both_sides() -> None:
    weight, cut = importance_weights(torch.tensor([0.0, 5.0, -5.0]), torch.zeros(3), 0.5, 2.0)
    assert weight.tolist() == [1.0, 2.0, 0.5]
    assert cut.tolist() == [0.0, 1.0, 1.0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
@example([0, 3, 5])
@example([0, 0])
@settings(max_examples=60, deadline=None)
def test_token_weights_make_the_mean_of_the_batch(counts: list[int]) -> None:
    live = [n for n in counts if n]
    per_sample = token_weights(counts, per_token=False).tolist()
    per_token = token_weights(torch.tensor(counts), per_token=True).tolist()
    constant = token_weights(counts, per_token=False, constant_length=10).tolist()
    for n, a, b, c in zip(counts, per_sample, per_token, constant):
        assert a == pytest.approx(1 / len(live) / n if n else 0.0, rel=1e-6)
        assert b == pytest.approx(1 / sum(live) if n else 0.0, rel=1e-6)
        assert c == pytest.approx(1 / len(live) / 10 if n else 0.0, rel=1e-6)


def test_kl_controller() -> None:
    controller = KLController(0.2, target=6.0, horizon=10_000)
    assert controller.observe(6.0, 256).coef == 0.2
    assert controller.observe(6.6, 256).coef == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))
    assert controller.observe(600.0, 256).coef == pytest.approx(0.2 * (1 + 0.2 * 256 / 10_000))
    assert controller.observe(0.0, 256).coef == pytest.approx(0.2 * (1 - 0.2 * 256 / 10_000))
    assert controller.observe(float("nan"), 256).coef == 0.2
    assert KLController(0.2).observe(9.0, 256).coef == 0.2


# Below, expectations are exact sums over a vocabulary of five, and gradients are with respect to the logits
# of p.

LOGITS = torch.tensor([0.3, -0.7, 1.1, 0.0, -1.5], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.5, -0.9, 0.1], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([0.9, -0.1, 0.2, 0.3, -0.4], dtype=torch.float64).log_softmax(0)


def expected_gradient(kind: str, sampler: torch.Tensor | None, weighted: bool) -> torch.Tensor:
    """Gradient of the estimator as a loss, averaged over tokens that `sampler` (None: p itself) draws."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    drawn = (logp if sampler is None else sampler).detach()
    term = kl(kind, logp, REFERENCE)
    if weighted:
        term = probability_ratio(logp, drawn) * term
    return torch.autograd.grad((drawn.exp() * term).sum(), logits)[0]


def true_gradient(reverse: bool = True) -> torch.Tensor:
    """Of KL(p || reference), or of KL(reference || p)."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    terms = logp.exp() * (logp - REFERENCE) if reverse else REFERENCE.exp() * (REFERENCE - logp)
    return torch.autograd.grad(terms.sum(), logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_as_values_they_are_the_kl(kind: str) -> None:
    logp = LOGITS.log_softmax(0)
    got = (logp.exp() * kl(kind, logp, REFERENCE)).sum()
    torch.testing.assert_close(got, (logp.exp() * (logp - REFERENCE)).sum())


def test_as_losses_k1_is_nothing_k2_is_right_k3_is_the_other_kl() -> None:
    torch.testing.assert_close(expected_gradient("k1", None, False), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2", None, False), true_gradient())
    for kind in ("k3", "low_var_kl"):
        torch.testing.assert_close(expected_gradient(kind, None, False), true_gradient(reverse=False))
    assert (true_gradient() - true_gradient(reverse=False)).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
@pytest.mark.parametrize("sampler", [None, OLD])
def test_weighted_by_the_ratio_k1_and_k3_are_right_even_off_policy(kind: str, sampler) -> None:
    torch.testing.assert_close(expected_gradient(kind, sampler, True), true_gradient())


def test_weighted_by_the_ratio_k2_is_wrong() -> None:
    assert (expected_gradient("k2", None, True) - true_gradient()).abs().max() > 0.05
