"""Making room: a role's state leaves the device between its uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.roles import Role


@dataclass
class Offload:
    """Every role resident: nothing to do."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> Offload:
        return cls()

    def activate(self, role: Role) -> None:
        """Make the role's tensors usable."""

    def deactivate(self, role: Role) -> None:
        """The role is not needed for a while."""
