"""PPO's own hooks, beside Lightning's: `PPOCallback` declares them, `emit` calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Experience, Prompt, Sample


class PPOCallback(pl.Callback):
    """A Lightning callback with the stages of a PPO iteration. Every hook is optional and is called on every
    rank, in the order of the Trainer's callbacks. A rank sees *its share* of the samples until the rewards
    are in; whole groups (all samples of a prompt) stay on one rank."""

    def on_rollout_start(self, trainer: pl.Trainer, module: PPOModule, prompts: list[Prompt]) -> None:
        """Prompts of this step, all of them. The rollout callback generates here and fills
        `module.rollout.samples`."""

    def on_response_end(self, trainer: pl.Trainer, module: PPOModule, sample: Sample) -> None:
        """The engine has filled `sample` while it may still write others; not called for partial rollouts,
        a generate function of your own, or evaluation. Comes from the thread that generates or one of the
        engine's, one call at a time and none after generation: be quick, and change nothing."""

    def on_rollout_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        """Responses of this rank are there, rewards are not."""

    def on_reward(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        """Score this rank's samples: `sample.add_reward(value)`."""

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        """The whole scored rollout, the same on every rank; after dynamic sampling and masking."""

    def on_experience_end(self, trainer: pl.Trainer, module: PPOModule, experience: Experience) -> None:
        """Old values, old and reference log-probs of this data rank's samples are there. A callback with this
        hook or the next makes the module run passes that it would leave out (`ppo_lightning.savings`)."""

    def on_advantages_end(self, trainer: pl.Trainer, module: PPOModule, experience: Experience) -> None:
        """Advantages and returns are there; what is changed here is what both updates see."""

    def on_critic_update_start(self, trainer: pl.Trainer, module: PPOModule) -> None: ...

    def on_critic_update_end(self, trainer: pl.Trainer, module: PPOModule) -> None: ...

    def on_actor_update_start(self, trainer: pl.Trainer, module: PPOModule) -> None: ...

    def on_actor_update_end(self, trainer: pl.Trainer, module: PPOModule) -> None: ...

    def on_weights_updated(self, trainer: pl.Trainer, module: PPOModule, version: int) -> None:
        """The actor has new weights, number `version`; the weight-sync callback sends them to the engine."""

    def on_eval_end(self, trainer: pl.Trainer, module: PPOModule, results: dict[str, float]) -> None:
        """`results` holds `eval/NAME/...`, the same on every rank."""


def emit(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call `hook(trainer, module, *args)` on each callback that has it, in the user's order."""
    for callback in trainer.callbacks:
        method = getattr(callback, hook, None)
        if method is not None:
            method(trainer, trainer.lightning_module, *args)


def listens(trainer: pl.Trainer, *hooks: str) -> bool:
    """Whether any callback does something in one of `hooks`."""
    methods = ((getattr(callback, hook, None), hook) for callback in trainer.callbacks for hook in hooks)
    return any(
        method is not None and getattr(method, "__func__", None) is not vars(PPOCallback)[hook]
        for method, hook in methods
    )
