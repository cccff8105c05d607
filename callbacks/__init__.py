"""Behaviours of a PPO run that users exchange: one a file, none knows another."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.callbacks.checkpoint import MegatronCheckpoint
    from ppo_lightning.callbacks.critic_warmup import CriticWarmupCallback
    from ppo_lightning.callbacks.debug_rollout import LoadRollouts, SaveRollouts
    from ppo_lightning.callbacks.evaluation import EvalCallback
    from ppo_lightning.callbacks.offload import OffloadCallback
    from ppo_lightning.callbacks.overlong import OverlongCallback
    from ppo_lightning.callbacks.progress import ProgressCallback
    from ppo_lightning.callbacks.reward import RewardCallback
    from ppo_lightning.callbacks.rollout import RolloutCallback
    from ppo_lightning.callbacks.samples import SamplesCallback
    from ppo_lightning.callbacks.weight_sync import WeightSyncCallback
    from ppo_lightning.hooks import PPOCallback

_HOMES = {
    "SaveRollouts": "ppo_lightning.callbacks.debug_rollout",
    "OverlongCallback": "ppo_lightning.callbacks.overlong",
    "LoadRollouts": "ppo_lightning.callbacks.debug_rollout",
    "CriticWarmupCallback": "ppo_lightning.callbacks.critic_warmup",
    "EvalCallback": "ppo_lightning.callbacks.evaluation",
    "MegatronCheckpoint": "ppo_lightning.callbacks.checkpoint",
    "OffloadCallback": "ppo_lightning.callbacks.offload",
    "PPOCallback": "ppo_lightning.hooks",
    "ProgressCallback": "ppo_lightning.callbacks.progress",
    "RewardCallback": "ppo_lightning.callbacks.reward",
    "RolloutCallback": "ppo_lightning.callbacks.rollout",
    "SamplesCallback": "ppo_lightning.callbacks.samples",
    "WeightSyncCallback": "ppo_lightning.callbacks.weight_sync",
}
__all__ = [
    "CriticWarmupCallback",
    "EvalCallback",
    "LoadRollouts",
    "MegatronCheckpoint",
    "OffloadCallback",
    "OverlongCallback",
    "PPOCallback",
    "ProgressCallback",
    "RewardCallback",
    "RolloutCallback",
    "SamplesCallback",
    "SaveRollouts",
    "WeightSyncCallback",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
