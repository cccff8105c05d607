"""What `build` puts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_lightning.advantages import REGISTRY, advantage_estimator
from ppo_lightning.callbacks import (
    CriticWarmupCallback,
    OverlongCallback,
    PPOCallback,
    RewardCallback,
    RolloutCallback,
    WeightSyncCallback,
)
from ppo_lightning.config import PPOConfig
from ppo_lightning.run import at_work, default_callbacks


def kinds(**options: Any) -> list[type]:
    flat = {
        "hf_checkpoint": "model",
        "prompt_data": "prompts.jsonl",
        "rollout_batch_size": 4,
        "rollout_max_response_len": 8,
        "num_rollout": 3,
    }
    config, _ = PPOConfig.of(**flat | options).resolve(files=False)
    return [type(callback) for callback in default_callbacks(config)]


@pytest.fixture
def own_estimator() -> Any:
    @advantage_estimator("with_a_critic", needs_critic=True)
    def with_a_critic(inputs: Any, options: Any) -> Any:
        return inputs.rewards[:, None] * inputs.mask - inputs.values, inputs.values

    yield "with_a_critic"
    del REGISTRY["with_a_critic"]


def test_only_a_critic_is_warmed_up(own_estimator: str) -> None:
    """Else the flags of a recipe would hold the actor back while nothing trains."""
    warmup = {"num_critic_only_steps": 2}
    assert CriticWarmupCallback in kinds(advantage_estimator="ppo", **warmup)
    assert CriticWarmupCallback in kinds(advantage_estimator=own_estimator, **warmup)
    for name in sorted(REGISTRY.keys() - {"ppo", own_estimator}):
        assert CriticWarmupCallback not in kinds(advantage_estimator=name, **warmup), name


def test_a_critic_of_an_own_estimator_counts_as_one(own_estimator: str) -> None:
    config = PPOConfig.of(advantage_estimator=own_estimator)
    assert config.ppo
    assert not config.replace(advantage_estimator="grpo").ppo


def test_saved_rollouts_need_neither_rewards_nor_an_engine() -> None:
    """Given callbacks too: a reward would be added to the one that was saved."""
    own = PPOCallback()
    given = [RewardCallback("random"), RolloutCallback(), OverlongCallback(8, 4), WeightSyncCallback(), own]
    assert at_work(given, PPOConfig.of(load_debug_rollout_data="{rollout_id}.pt")) == [own]
    assert at_work(given, PPOConfig()) == given


def test_rollouts_alone_take_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """The engine reads --hf-checkpoint by itself; another policy is sent to it."""
    assert WeightSyncCallback not in kinds(debug_rollout_only=True)
    (tmp_path / "config.json").write_text("{}")
    assert WeightSyncCallback in kinds(debug_rollout_only=True, load=str(tmp_path))
