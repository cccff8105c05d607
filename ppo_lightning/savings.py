"""Forward passes that a rollout does not need, because another pass gives their result exactly.

Until its first optimizer step a model is the one that "old" log-probs and values ask for: the samples of that
step get them from its training pass. With several optimizer steps a rollout, the later steps' samples still
need a pass of their own; further epochs use what the first one has seen. `--no-skip-redundant-passes` runs
every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.samples import TokenFields, TokenOutputs


WATCHERS = ("on_experience_end", "on_advantages_end")  # hooks that see the experience before the updates


@dataclass(frozen=True, slots=True)
class Savings:
    """What a rollout leaves out."""

    old_values: bool = (
        False  # of the first step's samples; the critic is then trained before the advantages are taken
    )
    old_logprobs: bool = False  # of the first step's samples
    idle_actor: bool = False  # old and reference log-probs of a rollout in which only the critic trains

    @classmethod
    def of(cls, config: PPOConfig, *, watched: bool) -> Savings:
        """`watched`: a callback looks at the experience before the updates, where every slot must be filled.

        The critic can be trained first where its targets are plain sums of rewards: gamma 1, and lambda 1 for
        the critic. A KL penalty in the reward, or the engine's log-probs as the old ones, leave the actor's
        pass as it is."""
        a = config.algorithm
        if watched or not config.performance.skip_redundant_passes:
            return cls()
        critic_lambd = a.lambd if a.critic_lambd is None else a.critic_lambd
        sums = a.advantage_estimator == "ppo" and a.gamma == 1.0 and critic_lambd == 1.0 and a.kl_coef == 0.0
        return cls(
            old_values=sums,
            old_logprobs=not a.use_rollout_logprobs and a.kl_coef == 0.0,
            idle_actor=a.kl_coef == 0.0,
        )


@dataclass(slots=True)
class Seen:
    """A loss function that keeps one of the model's outputs ("values", "logprobs") of every micro-batch."""

    objective: Callable[[TokenOutputs, TokenFields], Any]
    output: str
    parts: list[Tensor] = field(default_factory=list)

    def __call__(self, outputs: TokenOutputs, fields: TokenFields) -> Any:
        self.parts.append(getattr(outputs, self.output).detach())
        return self.objective(outputs, fields)
