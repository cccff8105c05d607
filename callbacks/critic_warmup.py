"""Critic warm-up: the actor waits until the critic has seen some rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppo_lightning.hooks import PPOCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.module import PPOModule
    from ppo_lightning.samples import Sample


class CriticWarmupCallback(PPOCallback):
    """Train the critic alone for the first `num_critic_only_steps` rollouts. A fresh value head says nothing
    yet, and advantages made of it would push the actor about at random."""

    def __init__(self, num_critic_only_steps: int) -> None:
        self.num_critic_only_steps = num_critic_only_steps

    def on_samples_end(self, trainer: pl.Trainer, module: PPOModule, samples: list[Sample]) -> None:
        if module.rollout.index < self.num_critic_only_steps:
            module.rollout.train_actor = False
