"""PPO with a critic for language models, under a plain Lightning Trainer.

Names are imported on first use, so that `import ppo_lightning` costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.data import PromptDataModule
    from ppo_lightning.megatron.strategy import MegatronStrategy
    from ppo_lightning.module import PPOModule
    from ppo_lightning.run import build, fit
    from ppo_lightning.samples import Prompt, Sample

__version__ = "0.1.0"

_HOMES = {
    "MegatronStrategy": "ppo_lightning.megatron.strategy",
    "PPOConfig": "ppo_lightning.config",
    "PPOModule": "ppo_lightning.module",
    "Prompt": "ppo_lightning.samples",
    "PromptDataModule": "ppo_lightning.data",
    "Sample": "ppo_lightning.samples",
    "build": "ppo_lightning.run",
    "fit": "ppo_lightning.run",
}
__all__ = [
    "MegatronStrategy",
    "PPOConfig",
    "PPOModule",
    "Prompt",
    "PromptDataModule",
    "Sample",
    "build",
    "fit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
