"""Terms of the losses, per token: [n] in, [n] out, no masks, no means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

KLType: TypeAlias = Literal["k1", "k2", "k3", "low_var_kl"]

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8 is finite in fp32 and far beyond any clip range
LOW_VAR_KL_BOUND = 10.0


def probability_ratio(new: Tensor, old: Tensor) -> Tensor:
    """exp(clamp(new - old, -20, 20)) of log-probs."""
    return (new - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ppo_loss(
    ratio: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (Schulman 2017) and whether each token was clipped (1 or 0).

    eps_clip_high: own upper range (clip-higher, DAPO 2025), None: eps_clip. eps_clip_c: where the advantage
    is negative the loss is at most -eps_clip_c * advantage (dual clip, Ye 2020)."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > plain).float()


def cispo_loss(
    new: Tensor, ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """-stop_gradient(clip(ratio)) * advantage * log-prob (MiniMax-M1, 2025), and whether the ratio was
    clipped: a clipped token keeps its gradient, with a bounded weight."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    weight = ratio.detach().clamp(1 - eps_clip, 1 + high)
    return -weight * advantages * new, (weight != ratio.detach()).float()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2), no factor 1/2, and whether |V - V_old| >
    value_clip."""
    plain = (values - returns) ** 2
    if value_clip is None:
        return plain, torch.zeros_like(plain)
    change = values - old_values
    clipped = (old_values + change.clamp(-value_clip, value_clip) - returns) ** 2
    return torch.maximum(plain, clipped), (change.abs() > value_clip).float()


def kl(kind: KLType, logp: Tensor, logq: Tensor) -> Tensor:
    """Estimate of KL(p || q) per token drawn from p (Schulman, "Approximating KL divergence", 2020).

    With d = logp - logq: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl = k3 with -d clamped to
    +-20 and the result to +-10. As *values* k1 and k3 are unbiased. As a *loss* only k2 has the gradient of
    KL(p || q): that of k1 is 0 on average (no penalty at all), that of k3 and low_var_kl belongs to KL(q ||
    p). With `use_unbiased_kl` k1 and k3 are right as losses too."""
    d = logp - logq
    if kind == "k1":
        return d
    if kind == "k2":
        return d**2 / 2
    if kind == "k3":
        return (-d).exp() - 1 + d
    if kind == "low_var_kl":
        d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return ((-d).exp() - 1 + d).clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
    raise ValueError(f"unknown KL type {kind!r}; use k1, k2, k3 or low_var_kl")


def importance_weights(old: Tensor, rollout: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (Yao 2025): clip(trainer / engine probability, low, high), and whether
    it was clipped."""
    ratio = probability_ratio(old, rollout)
    weight = ratio.clamp(low, high)
    return weight, (weight != ratio).float()
