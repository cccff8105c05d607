"""Losses of the actor and the critic: functions of tensors.

    n response tokens of one micro-batch (or of the part that a context-parallel rank holds)

`policy_objective` and `value_objective` return *sums* weighted with `fields.weight`, whose denominator is
that of the whole optimizer batch: adding up over micro-batches and ranks gives the batch's mean. Tokens
under mask 0 or weight 0 are left out before any arithmetic: they add exactly nothing, to value and
gradient, even where they are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from ppo_lightning.loss_terms import (
    KLType,
    cispo_loss,
    importance_weights,
    kl,
    ppo_loss,
    probability_ratio,
    value_loss,
)
from ppo_lightning.masked import Reduce, identity
from ppo_lightning.samples import TokenFields, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from ppo_lightning.config import PPOConfig

__all__ = [
    "KLController",
    "PolicyLossOptions",
    "ValueLossOptions",
    "cispo_loss",
    "importance_weights",
    "kl",
    "off_policy_sequences",
    "policy_objective",
    "ppo_loss",
    "probability_ratio",
    "sequence_mean",
    "token_weights",
    "value_loss",
    "value_objective",
]

Metrics: TypeAlias = "dict[str, Tensor]"


# ---- terms per sequence ----------------------------------------------------------------------------------


def sequence_mean(x: Tensor, fields: TokenFields, reduce: Reduce = identity) -> Tensor:
    """Mean of `x` [n] over each token's own sequence, [n], without gradient.

    `reduce` adds up over the ranks that hold the sequence's other tokens (context parallel); its argument
    has the same shape on all of them. Needs `fields.sequence`."""
    if fields.sequence is None:
        raise ValueError("a sequence-level term needs TokenFields.sequence; experience.microbatches fills it")
    sums = torch.zeros(2, max(fields.num_sequences, 1), dtype=torch.float64, device=x.device)
    sums[0].index_add_(0, fields.sequence, x.detach().double())
    sums[1].index_add_(0, fields.sequence, torch.ones_like(x, dtype=torch.float64))
    total, count = reduce(sums).unbind()
    return (total / count.clamp(min=1))[fields.sequence].to(x.dtype)


def off_policy_sequences(
    new: Tensor, behaviour: Tensor, fields: TokenFields, delta: float, reduce: Reduce = identity
) -> Tensor:
    """Tokens [n] bool of samples to drop: a negative advantage and a mean log(behaviour / new) beyond `delta`
    (off-policy sequence masking, DeepSeek-V3.2, 2025)."""
    drift = sequence_mean(behaviour - new, fields, reduce)
    return (drift > delta) & (_filled(fields.advantages, "advantages") < 0)


# ---- objectives ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyLossOptions:
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    entropy_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: KLType = "k1"
    use_unbiased_kl: bool = False
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    use_rollout_logprobs: bool = False
    reduce_sequence: Reduce = identity  # sum over the ranks that hold parts of the same sequences

    @classmethod
    def from_config(cls, config: PPOConfig, *, reduce_sequence: Reduce = identity) -> PolicyLossOptions:
        a = config.algorithm
        gspo = a.advantage_estimator == "gspo" and a.policy_loss_type == "ppo"
        return cls(
            policy_loss="gspo" if gspo else a.policy_loss_type,
            eps_clip=a.eps_clip,
            eps_clip_high=a.eps_clip_high,
            eps_clip_c=a.eps_clip_c,
            entropy_coef=a.entropy_coef,
            use_kl_loss=a.use_kl_loss,
            kl_loss_coef=a.kl_loss_coef,
            kl_loss_type=a.kl_loss_type,
            use_unbiased_kl=a.use_unbiased_kl,
            use_tis=a.use_tis,
            tis_clip=a.tis_clip,
            tis_clip_low=a.tis_clip_low,
            use_opsm=a.use_opsm,
            opsm_delta=a.opsm_delta,
            use_rollout_logprobs=a.use_rollout_logprobs,
            reduce_sequence=reduce_sequence,
        )


@dataclass(frozen=True, slots=True)
class ValueLossOptions:
    value_clip: float | None = 0.2

    @classmethod
    def from_config(cls, config: PPOConfig) -> ValueLossOptions:
        return cls(value_clip=config.algorithm.value_clip)


def policy_objective(
    outputs: TokenOutputs, fields: TokenFields, options: PolicyLossOptions
) -> tuple[Tensor, Metrics]:
    """Policy loss - entropy_coef * entropy + kl_loss_coef * KL, a weighted sum over the given tokens, and
    metrics (sums of the same kind). Without old log-probs the new ones stand in: the ratio is exactly 1."""
    live = _live(fields)
    new, fields = _filled(outputs.logprobs, "logprobs")[live], fields.take(live)
    rollout = fields.rollout_logprobs
    if options.use_rollout_logprobs or fields.old_logprobs is None:
        trainer = new.detach()
    else:
        trainer = fields.old_logprobs
    old = _filled(rollout, "rollout_logprobs") if options.use_rollout_logprobs else trainer

    def total(x: Tensor) -> Tensor:
        return (x * fields.weight).sum()

    policy, clipped, log_ratio = _policy_terms(new, old, fields, options)
    metrics = {"pg_clipfrac": total(clipped), "ppo_kl": total(-log_ratio)}
    if options.use_tis:
        weight, cut = importance_weights(
            trainer, _filled(rollout, "rollout_logprobs"), options.tis_clip_low, options.tis_clip
        )
        policy = policy * weight
        metrics |= {"tis": total(weight), "tis_clipfrac": total(cut)}
    if options.use_opsm:
        behaviour = old if rollout is None else rollout
        drop = off_policy_sequences(new, behaviour, fields, options.opsm_delta, options.reduce_sequence)
        policy = torch.where(drop, torch.zeros_like(policy), policy)
        metrics["opsm_dropped"] = total(drop.float())
    loss = metrics["pg_loss"] = total(policy)
    if outputs.entropy is not None or options.entropy_coef != 0.0:
        metrics["entropy"] = total(_filled(outputs.entropy, "entropy")[live])
        loss = _add(loss, -options.entropy_coef, metrics["entropy"])
    if options.use_kl_loss:
        divergence = kl(options.kl_loss_type, new, _filled(fields.ref_logprobs, "ref_logprobs"))
        if options.use_unbiased_kl:
            divergence = probability_ratio(new, old) * divergence
        metrics["kl_loss"] = total(divergence)
        loss = _add(loss, options.kl_loss_coef, metrics["kl_loss"])
    if rollout is not None:
        metrics["train_rollout_logprob_abs_diff"] = total((trainer - rollout).abs())
    metrics["loss"] = loss
    return loss, {name: x.detach() for name, x in metrics.items()}


def value_objective(
    outputs: TokenOutputs, fields: TokenFields, options: ValueLossOptions
) -> tuple[Tensor, Metrics]:
    """The critic's loss, a weighted sum over the given tokens, and metrics (sums of the same kind)."""
    live = _live(fields)
    values, fields = _filled(outputs.values, "values")[live], fields.take(live)
    old = values.detach() if fields.old_values is None else fields.old_values
    term, clipped = value_loss(values, old, _filled(fields.returns, "returns"), options.value_clip)
    loss = (term * fields.weight).sum()
    clipfrac = (clipped * fields.weight).sum()
    return loss, {"value_loss": loss.detach(), "value_clipfrac": clipfrac.detach(), "loss": loss.detach()}


def _policy_terms(
    new: Tensor, old: Tensor, fields: TokenFields, options: PolicyLossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, clip indicator and log-ratio per token."""
    advantages = _filled(fields.advantages, "advantages")
    log_ratio = new - old
    if options.policy_loss == "gspo":
        # The sequence's mean log-ratio as value, the token's own as gradient: for one advantage per
        # sequence this has GSPO's gradient (its GSPO-token form), and no gradient has to cross context-
        # parallel ranks.
        mean = sequence_mean(log_ratio, fields, options.reduce_sequence)
        log_ratio = mean + (new - new.detach())
    ratio = probability_ratio(log_ratio, torch.zeros_like(log_ratio))
    if options.policy_loss == "cispo":
        loss, clipped = cispo_loss(new, ratio, advantages, options.eps_clip, options.eps_clip_high)
    else:
        loss, clipped = ppo_loss(
            ratio, advantages, options.eps_clip, options.eps_clip_high, options.eps_clip_c
        )
    return loss, clipped, log_ratio


def _live(fields: TokenFields) -> Tensor:
    """Indices of the tokens that count."""
    return (fields.mask.bool() & (fields.weight != 0)).nonzero().squeeze(1)


def _add(loss: Tensor, coefficient: float, term: Tensor) -> Tensor:
    """A term with coefficient 0 is only watched: 0 * inf must not reach the loss."""
    return loss if coefficient == 0.0 else loss + coefficient * term


def _filled(x: Tensor | None, name: str) -> Tensor:
    if x is None:
        raise ValueError(f"the loss needs {name}, which nobody computed; check the options that ask for it")
    return x


# ---- weights and coefficients ----------------------------------------------------------------------------


def token_weights(
    num_trainable: Tensor | Sequence[int], per_token: bool, constant_length: int | None = None
) -> Tensor:
    """Weight of each trainable token of each sample, fp32 [B], for one whole optimizer batch of B samples.

    Mean over samples of the mean over their tokens; `per_token`: mean over all tokens; `constant_length`:
    sum over tokens / constant_length, mean over samples (Dr. GRPO). A sample without trainable tokens is
    not counted."""
    counts = torch.as_tensor(num_trainable, dtype=torch.float64)
    num_samples = (counts > 0).sum().clamp(min=1)
    if per_token:
        weights = torch.full_like(counts, 1.0) / counts.sum().clamp(min=1)
    elif constant_length is not None:
        weights = torch.full_like(counts, 1.0) / (num_samples * constant_length)
    else:
        weights = 1.0 / (num_samples * counts.clamp(min=1))
    return torch.where(counts > 0, weights, 0.0).float()


@dataclass(frozen=True, slots=True)
class KLController:
    """The coefficient of a KL penalty that steers towards `target` (Ziegler 2019); fixed where target is
    None."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    @classmethod
    def from_config(cls, config: PPOConfig) -> KLController:
        a = config.algorithm
        return cls(coef=a.kl_coef, target=a.kl_target, horizon=a.kl_horizon)

    def observe(self, kl_value: float, num_samples: int) -> KLController:
        """The controller after `num_samples` samples whose mean KL was `kl_value`."""
        if self.target is None or kl_value != kl_value:
            return self
        error = min(max(kl_value / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_samples / self.horizon))
