"""Rollout engines: who writes the responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ppo_lightning.engines.base import Engine, EngineError, Finished, SamplingParams, Write, sample_seed

if TYPE_CHECKING:
    import torch

    from ppo_lightning.config import PPOConfig

__all__ = ["Engine", "EngineError", "Finished", "SamplingParams", "Write", "build_engine", "sample_seed"]


def build_engine(
    config: PPOConfig,
    *,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    share: Callable[[Any], list[Any]] | None = None,
) -> Engine:
    """This rank's engine as `--rollout-engine` names it. `device` is where an embedded model lives; `share`
    gathers an object of every rank (for engines whose servers the ranks own together). Raises EngineError."""
    if config.rollout.rollout_engine == "sglang":
        from ppo_lightning.engines.sglang import SGLangEngine

        return SGLangEngine.from_config(config, rank, world, share)
    from ppo_lightning.engines.hf import HFEngine

    return HFEngine.from_config(config, device)
