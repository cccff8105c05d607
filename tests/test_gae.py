"""GAE against a hand-worked golden case, a closed form and a plain loop over tokens in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning import gae as module
from ppo_lightning.advantages import gae
from ppo_lightning.gae import length_adaptive_lambda, sum_to_go

GOLDEN = json.loads((Path(__file__).parent / "data/golden_ppo.json").read_text())


def slow_gae(rewards, values, mask, gamma, lambd) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other, from the right, only over trainable ones; Python floats."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        trainable = mask[row].nonzero().flatten().tolist()
        decay = lambd[row].item() if isinstance(lambd, torch.Tensor) else lambd
        carry = next_value = 0.0
        for place, t in enumerate(reversed(trainable)):
            if rewards.ndim == 2:
                reward = rewards[row, t].item()
            else:
                reward = rewards[row].item() if place == 0 else 0.0
            value = values[row, t].item()
            carry = reward + gamma * next_value - value + gamma * decay * carry
            next_value = value
            advantages[row, t] = carry
    return advantages, torch.where(mask, advantages + values.double(), 0.0)


def random_case(rows: int, longest: int, seed: int, gaps: float):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (rows,), generator=g)
    mask = torch.arange(longest) < lengths[:, None]
    mask &= torch.rand(rows, longest, generator=g) >= gaps
    return torch.randn(rows, generator=g), torch.randn(rows, longest, generator=g), mask


def test_golden() -> None:
    given_, expected = GOLDEN["inputs"]["gae"], torch.tensor(GOLDEN["gae_g1.0_l0.95"])
    result = gae(
        torch.tensor([given_["terminal_reward"]]),
        torch.tensor([given_["values"]]),
        torch.tensor([given_["loss_mask"]]).bool(),
        1.0,
        0.95,
    )
    torch.testing.assert_close(torch.cat(result), expected, atol=2e-6, rtol=0)


def test_worked_by_hand_with_per_token_rewards() -> None:
    # deltas 1+0.5*2-1=1, 2+0.5*4-2=2, 3-4=-1; gamma lambda = 0.25
    result = gae(torch.tensor([[1.0, 2, 3]]), torch.tensor([[1.0, 2, 4]]), torch.ones(1, 3).bool(), 0.5, 0.5)
    torch.testing.assert_close(result[0], torch.tensor([[1 + 0.25 * 1.75, 1.75, -1.0]]))


@given(
    st.integers(1, 6),
    st.integers(0, 150),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.0, 0.3, 0.9]),
    st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    st.sampled_from([1.0, 0.95, 0.2, 0.0]),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_equals_the_loop(rows, longest, seed, gaps, gamma, lambd, per_token) -> None:
    rewards, values, mask = random_case(rows, longest, seed, gaps)
    if per_token:
        rewards = torch.randn(rows, longest, generator=torch.Generator().manual_seed(seed + 1))
    expected = slow_gae(rewards, values, mask, gamma, lambd)
    for got, want in zip(gae(rewards, values, mask, gamma, lambd), expected):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)
    for got, want in zip(gae(rewards.double(), values.double(), mask, gamma, lambd), expected):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@given(st.integers(1, 5), st.integers(1, 90), st.integers(0, 2**20), st.sampled_from([0.0, 0.4]))
@settings(max_examples=40, deadline=None)
def test_own_lambda_for_each_response(rows, longest, seed, gaps) -> None:
    rewards, values, mask = random_case(rows, longest, seed, gaps)
    lambd = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    for got, want in zip(gae(rewards, values, mask, 0.9, lambd), slow_gae(rewards, values, mask, 0.9, lambd)):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_blocks_of_rows_make_no_difference(gaps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, values, mask = random_case(23, 40, seed=3, gaps=gaps)
    mask[4] = torch.arange(40) % 2 == 0  # one row with gaps among others
    whole = gae(rewards, values, mask, 0.99, 0.9)
    monkeypatch.setattr(module, "BLOCK", 80)
    for got, want in zip(gae(rewards, values, mask, 0.99, 0.9), whole):
        torch.testing.assert_close(got, want)


@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.5]))
@settings(max_examples=30, deadline=None)
def test_closed_form_at_gamma_lambda_one(seed: int, gaps: float) -> None:
    rewards, values, mask = random_case(4, 50, seed, gaps)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    assert torch.equal(returns, torch.where(mask, rewards[:, None], 0.0))
    assert torch.equal(advantages, torch.where(mask, rewards[:, None] - values, 0.0))


@given(st.integers(0, 2**20), st.sampled_from([float("nan"), float("inf"), -1e30]), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_what_lies_under_the_mask_or_behind_is_nothing(seed: int, garbage: float, padding: int) -> None:
    rewards, values, mask = random_case(4, 40, seed, gaps=0.3)
    clean = gae(rewards, torch.where(mask, values, 0.0), mask, 0.97, 0.9)
    wide = torch.nn.functional.pad(mask, (0, padding))
    dirty = torch.full(wide.shape, garbage)
    dirty[:, :40] = torch.where(mask, values, garbage)
    for got, want in zip(gae(rewards, dirty, wide, 0.97, 0.9), clean):
        torch.testing.assert_close(got[:, :40], want)
        assert (got[~wide] == 0).all()


def test_masked_tokens_inside_do_not_decay_credit() -> None:
    plain = gae(torch.tensor([1.0]), torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3).bool(), 0.9, 0.8)
    mask = torch.tensor([[0, 1, 0, 0, 1, 0, 1, 0]]).bool()
    gappy = gae(torch.tensor([1.0]), torch.tensor([[9.0, 0.1, 9, 9, 0.2, 9, 0.3, 9]]), mask, 0.9, 0.8)
    for a, b in zip(plain, gappy):
        torch.testing.assert_close(b[mask], a[0])


def test_empty_masks_give_zeros() -> None:
    for shape in [(3, 4), (0, 4), (3, 0), (0, 0)]:
        mask = torch.zeros(shape, dtype=torch.bool)
        for got in gae(torch.ones(shape[0]), torch.full(shape, float("nan")), mask, 1.0, 0.95):
            assert got.shape == shape
            assert (got == 0).all()


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (1.0, 0.95), (1.0, 0.9999), (0.999, 1.0)])
def test_fp32_holds_at_32k_tokens(gamma: float, lambd: float) -> None:
    g = torch.Generator().manual_seed(5)
    length = 32_768
    values = 3 + torch.randn(2, length, generator=g)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1] = torch.rand(length, generator=g) < 0.8
    rewards = torch.tensor([1.0, -2.0])
    advantages, returns = gae(rewards, values, mask, gamma, lambd)
    exact = slow_gae(rewards, values, mask, gamma, lambd)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), exact[0], atol=3e-6, rtol=0)
    torch.testing.assert_close(returns.double(), exact[1], atol=3e-6, rtol=0)


def test_length_adaptive_lambda() -> None:
    got = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 4000]), alpha=0.05)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.995], dtype=torch.float64))


def test_sum_to_go_discounts_per_trainable_token() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 0]]).bool()
    got = sum_to_go(torch.tensor([4.0]), mask, 0.5, penalty=torch.tensor([[1.0, 7, 2, 3, 7]]))
    torch.testing.assert_close(got, torch.tensor([[1 + 0.5 * (2 + 0.5 * 7), 0, 2 + 0.5 * 7, 7, 0]]))
    torch.testing.assert_close(sum_to_go(torch.tensor([4.0]), mask, 1.0), torch.tensor([[4.0, 0, 4, 4, 0]]))
