"""The group estimators against plain Python, and what must hold for every estimator."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning.advantages import (
    REGISTRY,
    AdvantageInputs,
    AdvantageOptions,
    advantage_estimator,
    estimate,
    estimator,
    gae,
    needs_critic,
    shape_rewards,
)
from ppo_lightning.samples import Experience

NAMES = ["ppo", "grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "dr_grpo"]
RAW = ["ppo", "reinforce_plus_plus"]


def slow_shape(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    """Group statistics of the standard library."""
    out = []
    for i, (r, g) in enumerate(zip(rewards, groups)):
        own = [x for x, h in zip(rewards, groups) if h == g]
        others = [x for j, (x, h) in enumerate(zip(rewards, groups)) if h == g and j != i]
        if name in RAW:
            out.append(r)
        elif name == "rloo":
            out.append(r - statistics.mean(others) if others else 0.0)
        elif name in ("grpo", "gspo"):
            std = statistics.stdev(own) if others else 0.0
            out.append((r - statistics.mean(own)) / (std + 1e-6))
        else:
            out.append(r - statistics.mean(own))
    return out


def share(rewards, mask, values=None, kl=None) -> Experience:
    return Experience(
        samples=[],
        rewards=torch.as_tensor(rewards, dtype=torch.float32),
        lengths=torch.full((len(mask),), mask.shape[1]),
        mask=mask,
        weights=mask.float(),
        old_values=values,
        old_logprobs=kl,
        ref_logprobs=None if kl is None else torch.zeros_like(kl),
    )


def run(name: str, rewards, groups, mask, values, kl=None, **options):
    shaped = shape_rewards(name, torch.as_tensor(rewards, dtype=torch.float32), torch.as_tensor(groups))
    return estimate(share(shaped, mask, values, kl), AdvantageOptions(name, **options))


@st.composite
def rollouts(draw: st.DrawFn):
    size = draw(st.integers(1, 8))
    rewards = draw(
        st.one_of(
            st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5]), min_size=size, max_size=size),
            st.lists(st.floats(-50, 50, width=32), min_size=size, max_size=size),
        )
    )
    groups = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    seed = draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)
    longest = draw(st.integers(1, 12))
    mask = torch.rand(size, longest, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return rewards, groups, mask, torch.randn(size, longest, generator=g)


def test_the_registry_holds_the_estimators_of_the_field() -> None:
    assert sorted(REGISTRY) == sorted(NAMES)
    assert [n for n in NAMES if needs_critic(n)] == ["ppo"]
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        estimator("grppo")
    with pytest.raises(ValueError, match="registered twice"):
        advantage_estimator("grpo")(lambda inputs, options: (inputs.values, None))


@pytest.mark.parametrize("name", NAMES)
@given(rollouts())
@settings(max_examples=40, deadline=None)
def test_shaped_rewards_are_those_of_plain_python(name: str, rollout) -> None:
    rewards, groups, _, _ = rollout
    got = shape_rewards(name, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    want = torch.tensor(slow_shape(name, rewards, groups), dtype=torch.float64)
    spread = [max(x) - min(x) for g in groups if (x := [r for r, h in zip(rewards, groups) if h == g])]
    if name in ("grpo", "gspo") and any(0 < s < 1e-3 for s in spread):
        return  # spread near rounding: its own test
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@given(rollouts(), st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_order_padding_and_dirt_change_nothing(name: str, rollout, random, padding: int) -> None:
    rewards, groups, mask, values = rollout
    kl = values / 10 if name != "ppo" else None
    options = {"normalize_advantages": True, "kl_coef": 0.0 if kl is None else 0.1}
    plain = run(name, rewards, groups, mask, values, kl, **options)
    order = list(range(len(rewards)))
    random.shuffle(order)
    wide = torch.nn.functional.pad(mask[order], (0, padding))
    dirty = torch.full(wide.shape, float("nan"))
    dirty[:, : mask.shape[1]] = torch.where(mask, values, float("inf"))[order]
    renamed = [groups[i] * 7 + 1 for i in order]
    moved = run(
        name,
        [rewards[i] for i in order],
        renamed,
        wide,
        dirty,
        None if kl is None else dirty / 10,
        **options,
    )
    for a, b in zip(plain, moved):
        if a is not None:
            torch.testing.assert_close(b[:, : mask.shape[1]], a[order], atol=2e-4, rtol=1e-4)
            assert (b[~wide] == 0).all()
            assert a.isfinite().all()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in RAW])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1, 0.1, 0.1, 0.1],
        [1000.0, 1000.00006, 1000.0, 1000.0],  # one unit in the last place of fp32
        [0.1 + 0.2, 0.3, 0.3, 0.3],
        [1e30, 1e30, 1e30, 1e30],
    ],
)
def test_equal_rewards_but_for_rounding_give_nothing(name: str, rewards: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        got = shape_rewards(name, torch.tensor(rewards, dtype=dtype), torch.zeros(4, dtype=torch.int64))
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in RAW])
def test_a_sample_alone_in_its_group_has_no_baseline_and_no_advantage(name: str) -> None:
    got = shape_rewards(name, torch.tensor([3.0, 1.0, 0.0]), torch.tensor([9, 4, 4]))
    assert got[0] == 0
    assert (got[1] > 0) & (got[2] < 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_share_takes_part_in_the_collective(name: str) -> None:
    calls = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return x * 2

    empty = share([], torch.zeros(0, 0, dtype=torch.bool), torch.zeros(0, 0))
    advantages, _ = estimate(empty, AdvantageOptions(name, normalize_advantages=True), reduce)
    assert advantages.shape == (0, 0)
    assert len(calls) == 2


def test_critic_free_advantages_are_the_shaped_reward_on_every_trainable_token() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    for name in ("grpo", "gspo", "rloo", "dr_grpo"):
        shaped = slow_shape(name, [1.0, 0.0], [0, 0])
        advantages, returns = run(name, [1.0, 0.0], [0, 0], mask, None, gamma=0.5)
        torch.testing.assert_close(advantages, torch.tensor(shaped)[:, None] * mask)
        assert returns is None


def test_reinforce_plus_plus_discounts_then_whitens() -> None:
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    advantages, _ = run("reinforce_plus_plus", [2.0, -1.0], [0, 1], mask, None, gamma=0.5)
    to_go = [1.0, 2.0, -1.0]
    mean, std = statistics.mean(to_go), statistics.stdev(to_go)
    want = [(x - mean) / (std**2 + 1e-8) ** 0.5 for x in to_go]
    torch.testing.assert_close(advantages, torch.tensor([[want[0], want[1]], [want[2], 0.0]]))


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_a_kl_penalty_is_paid_from_each_token_on(name: str) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    kl = torch.tensor([[0.1, 9.0, 0.2, 0.4], [1.0, -0.5, 9.0, 9.0]])
    shaped = slow_shape(name, [1.0, 0.0], [0, 0])
    advantages, _ = run(name, [1.0, 0.0], [0, 0], mask, None, kl, kl_coef=0.5)
    penalty = torch.tensor([[0.35, 0, 0.3, 0.2], [0.25, -0.25, 0, 0]])
    torch.testing.assert_close(advantages, (torch.tensor(shaped)[:, None] - penalty) * mask)


def test_a_kl_penalty_needs_its_log_probs() -> None:
    with pytest.raises(ValueError, match="reference log-probs"):
        run("grpo", [1.0], [0], torch.ones(1, 1).bool(), None, kl_coef=0.1)


def test_ppo_takes_raw_rewards_and_needs_values() -> None:
    mask = torch.ones(2, 3).bool()
    values = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    advantages, returns = run("ppo", [1.0, 5.0], [0, 0], mask, values, lambd=0.9)
    want = gae(torch.tensor([1.0, 5.0]), values, mask, 1.0, 0.9)
    assert torch.equal(advantages, want[0])
    assert torch.equal(returns, want[1])
    with pytest.raises(ValueError, match="run the critic first"):
        run("ppo", [1.0], [0], torch.ones(1, 1).bool(), None)


def test_ppo_returns_are_taken_before_whitening_with_the_critics_lambda() -> None:
    mask = torch.ones(2, 3).bool()
    values = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    rewards = torch.tensor([1.0, 0.0])
    advantages, returns = run(
        "ppo", rewards, [0, 0], mask, values, lambd=0.5, critic_lambd=1.0, normalize_advantages=True
    )
    actor, _ = gae(rewards, values, mask, 1.0, 0.5)
    flat = actor.flatten().tolist()
    want = (actor - statistics.mean(flat)) / statistics.stdev(flat)
    torch.testing.assert_close(advantages, want)
    torch.testing.assert_close(returns, rewards[:, None].expand(2, 3))


def test_ppo_lambda_grows_with_the_response() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    values = torch.arange(8.0).view(2, 4) / 10
    rewards = torch.tensor([1.0, 2.0])
    advantages, returns = run("ppo", rewards, [0, 1], mask, values, length_adaptive_lambd_alpha=1.0)
    for row, lambd in enumerate((1 - 1 / 2, 1 - 1 / 4)):
        own, _ = gae(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 1.0, lambd)
        torch.testing.assert_close(advantages[row], own[0])
    torch.testing.assert_close(returns, torch.where(mask, rewards[:, None], 0.0))  # lambd stays 1


def test_a_new_estimator_is_one_decorated_function() -> None:
    try:

        @advantage_estimator("test_only", shape=lambda rewards, groups: rewards - rewards.mean())
        def centered(inputs: AdvantageInputs, options: AdvantageOptions):
            return inputs.rewards[:, None] * inputs.mask, None

        advantages, _ = run("test_only", [1.0, 0.0], [0, 1], torch.ones(2, 1).bool(), None)
        torch.testing.assert_close(advantages, torch.tensor([[0.5], [-0.5]]))
    finally:
        REGISTRY.pop("test_only", None)
