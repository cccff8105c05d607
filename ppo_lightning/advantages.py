"""Advantages and returns: GAE and the group estimators, in a registry.

    B samples, T longest response in tokens; all [B, T] tensors are read through `mask`

An estimator is one decorated function of tensors:

    @advantage_estimator("mine")
    def mine(inputs, options):
        return inputs.rewards[:, None] * inputs.mask, None

Statistics over a prompt's group need all its samples, which may lie on several data ranks: they belong into
`shape`, which sees the whole rollout's rewards before the ranks take their shares."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from ppo_lightning.gae import gae, length_adaptive_lambda, sum_to_go
from ppo_lightning.masked import Reduce, identity, whiten

if TYPE_CHECKING:
    from torch import Tensor

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.samples import Experience

__all__ = [
    "AdvantageInputs",
    "AdvantageOptions",
    "Estimator",
    "advantage_estimator",
    "estimate",
    "estimator",
    "gae",
    "length_adaptive_lambda",
    "needs_critic",
    "shape_rewards",
]

GROUP_STD_FLOOR = 1e-6  # added to a group's standard deviation
ROUNDING = 1e-6  # a group whose rewards differ by less than this share of their size has equal rewards


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an estimator may look at, for the samples of one data rank."""

    rewards: Tensor  # [B], shaped
    mask: Tensor  # [B, T] bool
    values: Tensor | None = None  # [B, T]
    kl: Tensor | None = None  # [B, T], log(old / reference) of each token


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    estimator: str = "grpo"
    gamma: float = 1.0
    lambd: float = 1.0
    critic_lambd: float | None = None  # lambda of the returns; None: lambd
    length_adaptive_lambd_alpha: float | None = None  # lambda of the advantages = 1 - 1 / (alpha * length)
    kl_coef: float = 0.0  # weight of the KL penalty inside the reward
    normalize_advantages: bool = False

    @classmethod
    def from_config(cls, config: PPOConfig, *, kl_coef: float | None = None) -> AdvantageOptions:
        """The options of a run; `kl_coef` where a controller moved it."""
        a = config.algorithm
        return cls(
            estimator=a.advantage_estimator,
            gamma=a.gamma,
            lambd=a.lambd,
            critic_lambd=a.critic_lambd,
            length_adaptive_lambd_alpha=a.length_adaptive_lambd_alpha,
            kl_coef=a.kl_coef if kl_coef is None else kl_coef,
            normalize_advantages=a.normalize_advantages,
        )


Result: TypeAlias = (
    "tuple[Tensor, Tensor | None]"  # advantages [B, T], returns [B, T] for a critic; 0 where masked
)
Shape: TypeAlias = (
    "Callable[[Tensor, Tensor], Tensor]"  # (rewards, group ids) of the whole rollout -> rewards
)


@dataclass(frozen=True, slots=True)
class Estimator:
    name: str
    function: Callable[[AdvantageInputs, AdvantageOptions], Result]
    shape: Shape | None
    needs_critic: bool
    whitens: bool  # whitening is part of the method, --normalize-advantages or not
    constant_length: bool  # its loss divides by a constant length instead of the response's own


REGISTRY: dict[str, Estimator] = {}


def advantage_estimator(
    name: str,
    *,
    shape: Shape | None = None,
    needs_critic: bool = False,
    whitens: bool = False,
    constant_length: bool = False,
) -> Callable[[Callable[[AdvantageInputs, AdvantageOptions], Result]], Callable[..., Result]]:
    """Register the decorated function as `--advantage-estimator name`."""

    def register(function: Callable[[AdvantageInputs, AdvantageOptions], Result]) -> Callable[..., Result]:
        if name in REGISTRY:
            raise ValueError(f"advantage estimator {name!r} is registered twice; choose another name")
        REGISTRY[name] = Estimator(name, function, shape, needs_critic, whitens, constant_length)
        return function

    return register


def estimator(name: str) -> Estimator:
    """The registered estimator, or ValueError naming the nearest ones."""
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"registered are {', '.join(REGISTRY)}"
        raise ValueError(f"unknown advantage estimator {name!r}: {hint}")
    return REGISTRY[name]


def needs_critic(name: str) -> bool:
    return estimator(name).needs_critic


def shape_rewards(name: str, rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards as estimator `name` wants them. `rewards` and `groups` (ids): the whole rollout, [all]."""
    shape = estimator(name).shape
    return rewards if shape is None else shape(rewards, groups)


def estimate(share: Experience, options: AdvantageOptions, reduce: Reduce = identity) -> Result:
    """Advantages and returns of one data rank's share, whose `rewards` went through `shape_rewards`.

    Advantages are whitened over all ranks (`reduce`) if asked for; returns never are."""
    chosen = estimator(options.estimator)
    kl = None
    if options.kl_coef != 0.0:
        if share.old_logprobs is None or share.ref_logprobs is None:
            raise ValueError("a KL penalty in the reward (--kl-coef) needs old and reference log-probs")
        kl = share.old_logprobs - share.ref_logprobs
    inputs = AdvantageInputs(share.rewards, share.mask, share.old_values, kl)
    advantages, returns = chosen.function(inputs, options)
    if options.normalize_advantages or chosen.whitens:
        advantages = whiten(advantages, share.mask, reduce)
    return advantages, returns


# ---- rewards of a group ----------------------------------------------------------------------------------


def _group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Size, mean and Bessel-corrected standard deviation of each sample's group, float64 [all]."""
    _, member = torch.unique(groups, return_inverse=True)
    zeros = torch.zeros(
        int(member.max()) + 1 if len(member) else 0, dtype=torch.float64, device=rewards.device
    )
    r = rewards.double()
    size = zeros.index_add(0, member, torch.ones_like(r))[member]
    mean = zeros.index_add(0, member, r)[member] / size
    square = zeros.index_add(0, member, (r - mean) ** 2)[member]
    std = (square / (size - 1).clamp(min=1)).sqrt()
    largest = zeros.scatter_reduce(0, member, r.abs(), "amax")[member]
    equal = std <= ROUNDING * largest
    return size, torch.where(equal, r, mean), torch.where(equal, 0.0, std)


def group_centered(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group; 0 for a sample alone in its group."""
    _, mean, _ = _group_statistics(rewards, groups)
    return (rewards.double() - mean).to(rewards.dtype)


def group_normalized(rewards: Tensor, groups: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) of the group; 0 where all its rewards are equal but for rounding."""
    _, mean, std = _group_statistics(rewards, groups)
    return ((rewards.double() - mean) / (std + GROUP_STD_FLOOR)).to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group's other samples; 0 for a sample alone in its group, which has no baseline."""
    size, mean, _ = _group_statistics(rewards, groups)
    return ((rewards.double() - mean) * size / (size - 1).clamp(min=1)).to(rewards.dtype)


# ---- estimators ------------------------------------------------------------------------------------------


@advantage_estimator("ppo", needs_critic=True)
def ppo(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """GAE (Schulman 2015); the critic's returns may have their own lambda, the actor's lambda may grow with
    the response (VAPO, 2025)."""
    if inputs.values is None:
        raise ValueError(
            "the ppo estimator needs old values: run the critic first, or choose a critic-free one"
        )
    rewards, mask, values = inputs.rewards, inputs.mask, inputs.values
    actor: float | Tensor = options.lambd
    if options.length_adaptive_lambd_alpha is not None:
        actor = length_adaptive_lambda(mask.sum(1), options.length_adaptive_lambd_alpha)
    advantages, returns = gae(rewards, values, mask, options.gamma, actor)
    critic = options.lambd if options.critic_lambd is None else options.critic_lambd
    if isinstance(actor, float | int) and critic == actor:
        return advantages, returns
    return advantages, gae(rewards, values, mask, options.gamma, critic)[1]


def _reward_to_go(inputs: AdvantageInputs, options: AdvantageOptions, gamma: float) -> Result:
    """Reward at the last trainable token, less the KL penalty at every token, summed from each token on."""
    penalty = None if inputs.kl is None else -options.kl_coef * inputs.kl
    return sum_to_go(inputs.rewards, inputs.mask, gamma, penalty), None


@advantage_estimator("grpo", shape=group_normalized)
def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """Group-normalised reward on every token (DeepSeekMath, 2024)."""
    return _reward_to_go(inputs, options, gamma=1.0)


@advantage_estimator("gspo", shape=group_normalized)
def gspo(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """GRPO's advantages; the ratio is taken per sequence, in the loss (Qwen, 2025)."""
    return _reward_to_go(inputs, options, gamma=1.0)


@advantage_estimator("rloo", shape=leave_one_out)
def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """Reward less the mean of the group's other samples (Ahmadian 2024)."""
    return _reward_to_go(inputs, options, gamma=1.0)


@advantage_estimator("dr_grpo", shape=group_centered, constant_length=True)
def dr_grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """GRPO without the division by the standard deviation and by the response's length (Liu 2025)."""
    return _reward_to_go(inputs, options, gamma=1.0)


@advantage_estimator("reinforce_plus_plus", whitens=True)
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """Discounted reward to go, whitened over the whole batch (Hu 2025)."""
    return _reward_to_go(inputs, options, options.gamma)


@advantage_estimator("reinforce_plus_plus_baseline", shape=group_centered, whitens=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Result:
    """Reward less its group's mean, whitened over the whole batch (Hu 2025)."""
    return _reward_to_go(inputs, options, gamma=1.0)
