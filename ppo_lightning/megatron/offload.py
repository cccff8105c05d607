"""Making room: a role's state leaves the device between its uses, to pinned memory or to a file.

What moves are storages, not tensors: a storage is emptied (`resize_(0)`) and filled again, so that every
view of it (parameters in Megatron's flat buffers, fp32 copies, shards) stays valid without being told.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from ppo_lightning.megatron.optimizer import inner_optimizers

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.roles import Role

_SMALL = 4096  # bytes below which moving a storage is not worth it


@dataclass
class _Parked:
    """A storage and the place its bytes wait in; None for what need not be kept."""

    storage: torch.UntypedStorage
    size: int  # bytes
    place: Tensor | None  # uint8 [size]


@dataclass
class _Away:
    """What of a role can leave, and whether it has."""

    parked: list[_Parked]
    frozen: bool  # the bytes never change: what was parked once stays valid
    is_away: bool = False
    is_parked: bool = False


@dataclass
class Offload:
    """Where idle roles go. "stay" keeps every role on the device; "cpu" with models on the CPU does the
    same."""

    target: Literal["stay", "cpu", "disk"] = "stay"
    directory: Path | None = None
    _roles: dict[str, _Away] = field(default_factory=dict, repr=False)

    @classmethod
    def from_config(cls, config: PPOConfig) -> Offload:
        """--offload-train, -target and -disk-dir of a resolved configuration."""
        cluster = config.cluster
        if not cluster.offload_train:
            return cls()
        directory = cluster.offload_train_disk_dir
        return cls(cluster.offload_train_target, None if directory is None else Path(directory))

    def is_away(self, role: str) -> bool:
        return role in self._roles and self._roles[role].is_away

    def activate(self, role: Role) -> None:
        """Bring back what `deactivate` moved away; gradients come back as zeros."""
        if not self.is_away(role.name):
            return
        away = self._roles[role.name]
        for parked in away.parked:
            parked.storage.resize_(parked.size)
            view = _bytes_of(parked.storage)
            if parked.place is None:
                view.zero_()
            else:
                view.copy_(parked.place, non_blocking=True)
        away.is_away = False

    def deactivate(self, role: Role) -> None:
        """Move the role's weights and optimizer state away and free what they took on the device."""
        device = role.topology.device
        stays = self.target == "stay" or self.target == device.type
        if stays or self.is_away(role.name):
            return
        away = self._roles.get(role.name)
        if away is None:
            away = self._roles[role.name] = _Away(self._places(role), frozen=role.optimizer is None)
        for parked in away.parked:
            if parked.place is not None and not (away.frozen and away.is_parked):
                parked.place.copy_(_bytes_of(parked.storage), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        for parked in away.parked:
            parked.storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        away.is_away = away.is_parked = True

    def _places(self, role: Role) -> list[_Parked]:
        """A place for every storage of the role, in pinned memory or in one file a rank and role."""
        kept, dropped = list(_kept(role)), list(_dropped(role))
        seen: set[int] = set()
        sized: list[tuple[torch.UntypedStorage, int, bool]] = []
        for tensors, keep in ((kept, True), (dropped, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                if storage.data_ptr() in seen or size < _SMALL or tensor.device != role.topology.device:
                    continue
                seen.add(storage.data_ptr())
                sized.append((storage, size, keep))
        room = self._room(role, sum(size for _, size, keep in sized if keep))
        parked, offset = [], 0
        for storage, size, keep in sized:
            parked.append(_Parked(storage, size, room[offset : offset + size] if keep else None))
            offset += size if keep else 0
        return parked

    def _room(self, role: Role, size: int) -> Tensor:
        if self.target == "cpu":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        directory = Path(tempfile.gettempdir()) if self.directory is None else self.directory
        directory.mkdir(parents=True, exist_ok=True)
        name = directory / f"{role.name}_rank{role.topology.rank}_{os.getpid()}"
        mapped = torch.from_file(str(name), shared=True, size=max(size, 1), dtype=torch.uint8)
        name.unlink()  # the mapping keeps the file; a killed run leaves nothing behind
        return mapped


def _kept(role: Role) -> Iterator[Tensor]:
    """Weights (in Megatron's flat buffers where it has them), fp32 copies, and the optimizer's moments."""
    for chunk in role.chunks:
        for buffer in _buffers(chunk):
            if buffer.param_data is not None:
                yield buffer.param_data
    for model in role.models:
        yield from (p.data for p in model.parameters())
    if role.optimizer is None:
        return
    for inner in inner_optimizers(role.optimizer):
        for group in inner.param_groups:
            yield from (p.data for p in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _dropped(role: Role) -> Iterator[Tensor]:
    """Gradients: every pass begins with zeros."""
    for chunk in role.chunks:
        yield from (buffer.grad_data for buffer in _buffers(chunk))


def _buffers(chunk: torch.nn.Module) -> list[Any]:
    """Megatron's flat buffers of a wrapped model; a frozen one is not wrapped and has none."""
    return chunk.buffers if isinstance(chunk, DistributedDataParallel) else []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
