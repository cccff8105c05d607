"""Objectives against plain Python over tokens, finite differences, and what must add exactly nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning.losses import (
    PolicyLossOptions,
    ValueLossOptions,
    policy_objective,
    value_objective,
)
from ppo_lightning.samples import TokenFields, TokenOutputs
from tests.test_masked import Ranks

PPO = PolicyLossOptions(eps_clip=0.2, eps_clip_high=0.28)
VARIANTS = {
    "ppo": PPO,
    "dual_clip": replace(PPO, eps_clip_c=1.5),
    "entropy": replace(PPO, entropy_coef=0.3),
    "cispo": replace(PPO, policy_loss="cispo"),
    "gspo": replace(PPO, policy_loss="gspo"),
    "tis": replace(PPO, use_tis=True, tis_clip=1.1, tis_clip_low=0.9),
    "rollout_logprobs": replace(PPO, use_rollout_logprobs=True),
    "opsm": replace(PPO, use_opsm=True, opsm_delta=1e-4),
    **{
        f"kl_{k}": replace(PPO, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type=k)
        for k in ("k1", "k2", "k3")
    },
    "low_var_kl": replace(PPO, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type="low_var_kl"),
    "unbiased_kl": replace(PPO, use_kl_loss=True, kl_loss_coef=0.7, use_unbiased_kl=True),
    "watched_kl": replace(PPO, use_kl_loss=True),
}
SIZES = [3, 1, 4]  # tokens of three sequences


def case(seed: int = 0, spread: float = 0.4) -> tuple[TokenOutputs, TokenFields]:
    """Eight tokens of three sequences, float64."""
    g = torch.Generator().manual_seed(seed)
    n = sum(SIZES)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    new = noise(1.0) - 2
    outputs = TokenOutputs(logprobs=new, entropy=noise(1.0) ** 2, values=noise(1.0))
    fields = TokenFields(
        mask=torch.tensor([1, 0, 1, 1, 1, 1, 0, 1]).bool(),
        weight=torch.tensor([0.1, 0.0, 0.1, 0.2, 0.3, 0.0, 0.0, 0.3], dtype=torch.float64),
        old_logprobs=new + noise(spread),
        rollout_logprobs=new + noise(spread),
        ref_logprobs=new + noise(spread),
        old_values=outputs.values + noise(spread),
        advantages=noise(1.0),
        returns=noise(1.0),
        sequence=torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES)),
        num_sequences=3,
    )
    return outputs, fields


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def slow_kl(kind: str, d: float) -> float:
    if kind == "low_var_kl":
        d = clamp(d, -20, 20)
        return clamp(math.exp(-d) - 1 + d, -10, 10)
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def slow_policy_loss(outputs: TokenOutputs, fields: TokenFields, o: PolicyLossOptions) -> float:
    """One token after the other, in Python floats."""
    lists = {name: getattr(fields, name).tolist() for name in ("old_logprobs", "rollout_logprobs")}
    new, advantages, ref = outputs.logprobs.tolist(), fields.advantages.tolist(), fields.ref_logprobs.tolist()
    old = lists["rollout_logprobs" if o.use_rollout_logprobs else "old_logprobs"]
    live = [t for t in range(len(new)) if fields.mask[t] and fields.weight[t] != 0]
    total = 0.0
    for t in live:
        own = [s for s in live if fields.sequence[s] == fields.sequence[t]]
        log_ratio = new[t] - old[t]
        if o.policy_loss == "gspo":
            log_ratio = sum(new[s] - old[s] for s in own) / len(own)
        ratio = math.exp(clamp(log_ratio, -20, 20))
        a, bounded = advantages[t], clamp(ratio, 1 - o.eps_clip, 1 + o.eps_clip_high)
        loss = -bounded * a * new[t] if o.policy_loss == "cispo" else max(-ratio * a, -bounded * a)
        if o.eps_clip_c is not None and a < 0:
            loss = min(loss, -o.eps_clip_c * a)
        if o.use_tis:
            loss *= clamp(
                math.exp(lists["old_logprobs"][t] - lists["rollout_logprobs"][t]), o.tis_clip_low, o.tis_clip
            )
        drift = sum(lists["rollout_logprobs"][s] - new[s] for s in own) / len(own)
        if o.use_opsm and a < 0 and drift > o.opsm_delta:
            loss = 0.0
        loss -= o.entropy_coef * outputs.entropy[t].item()
        if o.use_kl_loss:
            weight = math.exp(new[t] - old[t]) if o.use_unbiased_kl else 1.0
            loss += o.kl_loss_coef * weight * slow_kl(o.kl_loss_type, new[t] - ref[t])
        total += fields.weight[t].item() * loss
    return total


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_policy_objective_is_the_loop_over_tokens(name: str, seed: int) -> None:
    outputs, fields = case(seed)
    loss, metrics = policy_objective(outputs, fields, VARIANTS[name])
    assert loss.item() == pytest.approx(slow_policy_loss(outputs, fields, VARIANTS[name]), rel=1e-12)
    assert metrics["loss"] == loss
    assert all(not x.requires_grad and x.ndim == 0 for x in metrics.values())


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("cispo", "gspo")])
@pytest.mark.parametrize("seed", range(3))
def test_policy_gradients_are_finite_differences(name: str, seed: int) -> None:
    outputs, fields = case(seed)
    new = outputs.logprobs.clone().requires_grad_()
    entropy = outputs.entropy.clone().requires_grad_()

    def loss(new: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_objective(TokenOutputs(logprobs=new, entropy=entropy), fields, VARIANTS[name])[0]

    assert torch.autograd.gradcheck(loss, (new, entropy))


def gradient(outputs: TokenOutputs, fields: TokenFields, options: PolicyLossOptions) -> torch.Tensor:
    new = outputs.logprobs.clone().requires_grad_()
    loss, _ = policy_objective(replace(outputs, logprobs=new), fields, options)
    return torch.autograd.grad(loss, new)[0]


def test_cispo_gradient_is_the_bounded_weight() -> None:
    outputs, fields = case()
    ratio = (outputs.logprobs - fields.old_logprobs).exp()
    want = -fields.weight * ratio.clamp(0.8, 1.28) * fields.advantages
    torch.testing.assert_close(
        gradient(outputs, fields, VARIANTS["cispo"]), torch.where(fields.weight > 0, want, 0.0)
    )
    assert ((ratio < 0.8) | (ratio > 1.28)).any()  # clipped tokens keep a gradient


def sequence_objective(new: torch.Tensor, fields: TokenFields) -> torch.Tensor:
    """GSPO as its paper writes it: one clipped ratio a sequence, exp of its mean log-ratio."""
    total = new.new_zeros(())
    for s in range(3):
        own = (fields.sequence == s) & (fields.weight > 0)
        if own.any():
            ratio = (new[own] - fields.old_logprobs[own]).mean().exp()
            a = fields.advantages[own][0]
            loss = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.28) * a)
            total = total + fields.weight[own].sum() * loss
    return total


@pytest.mark.parametrize("seed", range(4))
def test_gspo_has_the_gradient_of_its_sequence_objective(seed: int) -> None:
    outputs, fields = case(seed)
    fields.advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[fields.sequence]
    new = outputs.logprobs.clone().requires_grad_()
    want = torch.autograd.grad(sequence_objective(new, fields), new)[0]
    torch.testing.assert_close(gradient(outputs, fields, VARIANTS["gspo"]), want)


@pytest.mark.parametrize("name", ["gspo", "opsm"])
@pytest.mark.parametrize("cut", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 0, 1, 0, 1], [0] * 8])
def test_sequence_terms_hold_when_ranks_share_sequences(name: str, cut: list[int]) -> None:
    outputs, fields = case(2)
    size = max(cut) + 2  # the last rank holds no token
    want = gradient(outputs, fields, VARIANTS[name])

    def work(rank: int, reduce) -> torch.Tensor:
        mine = (torch.tensor(cut) == rank).nonzero().squeeze(1)
        part = TokenOutputs(logprobs=outputs.logprobs[mine], entropy=outputs.entropy[mine])
        out = torch.zeros_like(want)
        out[mine] = gradient(part, fields.take(mine), replace(VARIANTS[name], reduce_sequence=reduce))
        return out

    ranks = Ranks(size)
    torch.testing.assert_close(sum(ranks.run(work)), want)
    assert ranks.calls == [1] * size


@pytest.mark.parametrize("name", VARIANTS)
@given(st.integers(0, 50), st.permutations(range(3)), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_sums_do_not_depend_on_the_cut_into_micro_batches(name: str, seed: int, order, first: int) -> None:
    outputs, fields = case(seed)
    whole = policy_objective(outputs, fields, VARIANTS[name])[1]
    parts = []
    for sequences in (order[:first], order[first:]):
        chosen = [t for s in sequences for t in range(8) if fields.sequence[t] == s]
        index = torch.tensor(chosen, dtype=torch.int64)
        part = TokenOutputs(logprobs=outputs.logprobs[index], entropy=outputs.entropy[index])
        parts.append(policy_objective(part, fields.take(index), VARIANTS[name])[1])
    assert parts[0].keys() == parts[1].keys() == whole.keys()
    for metric, value in whole.items():
        torch.testing.assert_close(parts[0][metric] + parts[1][metric], value)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", VARIANTS)
def test_masked_or_weightless_tokens_add_exactly_nothing(name: str, garbage: float) -> None:
    outputs, fields = case(1)
    dead = ~(fields.mask & (fields.weight != 0))
    dirty_outputs = TokenOutputs(
        logprobs=torch.where(dead, garbage, outputs.logprobs),
        entropy=torch.where(dead, garbage, outputs.entropy),
    )
    dirty = {
        slot: torch.where(dead, garbage, getattr(fields, slot))
        for slot in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    }
    dirty_fields = replace(fields, **dirty)
    clean = policy_objective(outputs, fields, VARIANTS[name])
    got = policy_objective(dirty_outputs, dirty_fields, VARIANTS[name])
    assert clean == got
    grad = gradient(dirty_outputs, dirty_fields, VARIANTS[name])
    assert torch.equal(grad, gradient(outputs, fields, VARIANTS[name]))
    assert (grad[dead] == 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_weight_under_mask_zero_counts_for_nothing(name: str) -> None:
    outputs, fields = case(1)
    heavy = replace(fields, weight=torch.where(fields.mask, fields.weight, 7.0))
    assert policy_objective(outputs, heavy, VARIANTS[name]) == policy_objective(
        outputs, fields, VARIANTS[name]
    )


def test_a_watched_term_cannot_spoil_the_loss() -> None:
    outputs, fields = case()
    fields.ref_logprobs = torch.full_like(fields.ref_logprobs, float("-inf"))
    loss, metrics = policy_objective(outputs, fields, VARIANTS["watched_kl"])
    assert loss.isfinite()
    assert not metrics["kl_loss"].isfinite()
    assert gradient(outputs, fields, VARIANTS["watched_kl"]).isfinite().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_no_tokens_give_zero_and_a_graph(name: str) -> None:
    outputs, fields = case()
    none = torch.zeros(0, dtype=torch.int64)
    new = outputs.logprobs.clone().requires_grad_()
    loss, _ = policy_objective(
        TokenOutputs(new[none], outputs.entropy[none]), fields.take(none), VARIANTS[name]
    )
    assert loss.item() == 0
    assert torch.equal(torch.autograd.grad(loss, new)[0], torch.zeros(8, dtype=torch.float64))


def test_without_old_log_probs_the_ratio_is_exactly_one() -> None:
    outputs, fields = case()
    fields = replace(fields, old_logprobs=None)
    _, metrics = policy_objective(outputs, fields, PPO)
    assert metrics["ppo_kl"] == 0
    assert metrics["pg_clipfrac"] == 0
    torch.testing.assert_close(gradient(outputs, fields, PPO), -fields.weight * fields.advantages)


@pytest.mark.parametrize(("name", "trainer"), [("ppo", "old_logprobs"), ("rollout_logprobs", None)])
def test_the_gap_between_trainer_and_engine_is_logged(name: str, trainer: str | None) -> None:
    outputs, fields = case()
    ours = outputs.logprobs if trainer is None else getattr(fields, trainer)
    want = (fields.weight * (ours - fields.rollout_logprobs).abs()).sum()
    got = policy_objective(outputs, fields, VARIANTS[name])[1]["train_rollout_logprob_abs_diff"]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("slot", "name"), [("ref_logprobs", "kl_k1"), ("rollout_logprobs", "tis")])
def test_a_missing_field_is_named(slot: str, name: str) -> None:
    outputs, fields = case()
    with pytest.raises(ValueError, match=slot):
        policy_objective(outputs, replace(fields, **{slot: None}), VARIANTS[name])
    with pytest.raises(ValueError, match="entropy"):
        policy_objective(replace(outputs, entropy=None), fields, VARIANTS["entropy"])


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_objective(clip: float | None) -> None:
    outputs, fields = case(3)
    values = outputs.values.clone().requires_grad_()
    want = clipped = 0.0
    for t in range(8):
        if fields.mask[t] and fields.weight[t] != 0:
            v, old, r = (x[t].item() for x in (values, fields.old_values, fields.returns))
            bounded = v if clip is None else old + clamp(v - old, -clip, clip)
            want += fields.weight[t].item() * max((v - r) ** 2, (bounded - r) ** 2)
            clipped += fields.weight[t].item() * (clip is not None and abs(v - old) > clip)

    def loss(v: torch.Tensor) -> torch.Tensor:
        return value_objective(TokenOutputs(values=v), fields, ValueLossOptions(clip))[0]

    _, metrics = value_objective(TokenOutputs(values=values), fields, ValueLossOptions(clip))
    got = metrics["value_loss"].item(), metrics["value_clipfrac"].item()
    assert got == pytest.approx((want, clipped), rel=1e-12)
    assert torch.autograd.gradcheck(loss, (values,))
    dead = ~(fields.mask & (fields.weight != 0))
    grad = torch.autograd.grad(loss(torch.where(dead, float("nan"), values)), values)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(loss(values), values)[0], rtol=0, atol=0)
