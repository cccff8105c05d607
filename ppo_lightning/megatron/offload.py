"""Making room: a role's state leaves the device between its uses, to pinned memory or to a file.

What moves are storages, not tensors: a storage is emptied (`resize_(0)`) and filled again, so that every
view of it (parameters in Megatron's flat buffers, fp32 copies, shards) stays valid without being told. Only
what a use needs comes back, and only what has changed is written again.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from ppo_lightning.megatron.optimizer import inner_optimizers

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig
    from ppo_lightning.megatron.roles import Role

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")

_SMALL = 4096  # bytes below which moving a storage is not worth it
_PIECE = 16 << 20  # bytes that a thread moves at a time between a device and a file


class OffloadError(RuntimeError):
    """There is no room for what should leave the device."""


Bytes = Sequence[tuple[int, Tensor]]  # where in the room, and the uint8 [n] that goes there or comes back


class Room(Protocol):
    """A place for what one role on one rank can spare."""

    def write(self, data: Bytes) -> None: ...

    def read(self, data: Bytes) -> None: ...


@dataclass
class PinnedRoom:
    """Host memory that the GPU reaches by itself."""

    memory: Tensor  # uint8

    def write(self, data: Bytes) -> None:
        for at, tensor in data:
            self.memory[at : at + tensor.numel()].copy_(tensor, non_blocking=True)

    def read(self, data: Bytes) -> None:
        for at, tensor in data:
            tensor.copy_(self.memory[at : at + tensor.numel()], non_blocking=True)


class FileRoom:
    """A file without a name, which goes with the process however that ends. It is read and written, not
    mapped: pages of a mapped file would count as the process's memory, as what left it did."""

    def __init__(self, directory: Path, size: int, what: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (kept open)
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
        except OSError as error:
            self._file.close()
            free = shutil.disk_usage(directory).free
            raise OffloadError(
                f"{directory}: no room for the {size / 1e9:.2f} GB of {what} ({error.strerror}, "
                f"{free / 1e9:.2f} GB free); make room there, name another --offload-train-disk-dir, or leave"
                " --offload-train-target disk out"
            ) from error

    def write(self, data: Bytes) -> None:
        self._each(self._write, data)

    def read(self, data: Bytes) -> None:
        self._each(self._read, data)

    def _each(self, work: Callable[[int, Tensor], None], data: Bytes) -> None:
        """Piece by piece, on as many threads as torch may use: a file's bytes are copied by the processor."""
        pieces = [
            (at + number * _PIECE, piece)
            for at, tensor in data
            for number, piece in enumerate(tensor.split(_PIECE))
        ]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for done in [pool.submit(work, *piece) for piece in pieces]:
                done.result()

    def _write(self, at: int, piece: Tensor) -> None:
        host = piece.cpu()  # the same tensor where it lies there
        left = _memory(host)
        while left:
            done = os.pwrite(self._file.fileno(), left, at)
            left, at = left[done:], at + done

    def _read(self, at: int, piece: Tensor) -> None:
        host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
        left = _memory(host)
        while left:
            done = os.preadv(self._file.fileno(), [left], at)
            if done == 0:
                raise OffloadError(f"a file of offloaded state ends at byte {at}: something has cut it")
            left, at = left[done:], at + done
        if host is not piece:
            piece.copy_(host)


@dataclass
class _Parked:
    """A storage and where in the room its bytes wait."""

    part: Part
    storage: torch.UntypedStorage
    size: int  # bytes
    at: int
    is_away: bool = False
    is_saved: bool = False  # the room holds the present bytes

    @property
    def bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


@dataclass
class _Away:
    """What of a role can leave."""

    parked: list[_Parked]
    room: Room


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
        """Nothing of the role is on the device (but for what is too small to move)."""
        return role in self._roles and all(parked.is_away for parked in self._roles[role].parked)

    def activate(self, role: Role, parts: Collection[Part] = PARTS) -> None:
        """Bring back what `deactivate` moved away of `parts`; gradients come back as zeros."""
        away = self._roles.get(role.name)
        if away is None:
            return
        coming = [parked for parked in away.parked if parked.is_away and parked.part in parts]
        for parked in coming:
            parked.storage.resize_(parked.size)
            if parked.part == "gradients":
                parked.bytes.zero_()
            parked.is_away = False
        away.room.read([(parked.at, parked.bytes) for parked in coming if parked.part != "gradients"])

    def changing(self, role: Role) -> None:
        """Bring everything back for an optimizer step; it is written anew when it leaves."""
        self.activate(role)
        for parked in self._roles[role.name].parked if role.name in self._roles else ():
            parked.is_saved = False

    def forget(self, role: Role) -> None:
        """Bring everything back: the role is to be filled from outside, and may hold other tensors then."""
        self.activate(role)
        self._roles.pop(role.name, None)

    def deactivate(self, role: Role) -> None:
        """Move the role's weights and optimizer state away and free what they took on the device."""
        device = role.topology.device
        if self.target == "stay" or self.target == device.type or self.is_away(role.name):
            return
        if role.name not in self._roles:
            self._roles[role.name] = self._places(role)
        away = self._roles[role.name]
        # what somebody has looked at through `Tensor.numpy` has its place for ever
        away.parked = [parked for parked in away.parked if parked.storage.resizable()]
        going = [parked for parked in away.parked if not parked.is_away]
        unsaved = [parked for parked in going if not (parked.is_saved or parked.part == "gradients")]
        away.room.write([(parked.at, parked.bytes) for parked in unsaved])
        if device.type == "cuda":
            torch.cuda.synchronize()
        for parked in going:
            parked.storage.resize_(0)
            parked.is_away = parked.is_saved = True
        if device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            _trim()

    def _places(self, role: Role) -> _Away:
        """A place for every storage of the role, in pinned memory or in one file a rank and role."""
        seen: set[int] = set()
        parked: list[_Parked] = []
        end = 0
        for part, tensor in _tensors(role):
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if storage.data_ptr() in seen or size < _SMALL or tensor.device != role.topology.device:
                continue
            seen.add(storage.data_ptr())
            parked.append(_Parked(part, storage, size, end))
            end += size if part != "gradients" else 0
        return _Away(parked, self._room(role, end))

    def _room(self, role: Role, size: int) -> Room:
        if self.target == "cpu":
            return PinnedRoom(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        directory = Path(tempfile.gettempdir()) if self.directory is None else self.directory
        return FileRoom(directory, size, f"the {role.name}'s state (rank {role.topology.rank})")


def _tensors(role: Role) -> Iterator[tuple[Part, Tensor]]:
    """Weights (in Megatron's flat buffers where it has them), gradients, fp32 copies of the weights and the
    optimizer's moments. A storage counts as what it is named first."""
    buffers = [buffer for chunk in role.chunks for buffer in _buffers(chunk)]
    for buffer in buffers:
        if buffer.param_data is not None:
            yield "weights", buffer.param_data
    for model in role.models:
        yield from (("weights", p.data) for p in model.parameters())
    yield from (("gradients", buffer.grad_data) for buffer in buffers)
    if role.optimizer is None:
        return
    for inner in inner_optimizers(role.optimizer):
        for group in inner.param_groups:
            yield from (("optimizer", p.data) for p in group["params"])
        for state in inner.state.values():
            yield from (("optimizer", value) for value in state.values() if torch.is_tensor(value))


def _buffers(chunk: torch.nn.Module) -> list[Any]:
    """Megatron's flat buffers of a wrapped model; a frozen one is not wrapped and has none."""
    return chunk.buffers if isinstance(chunk, DistributedDataParallel) else []


def _memory(host: Tensor) -> memoryview:
    """The bytes of a tensor [n]; `Tensor.numpy` would leave its storage fixed in size for ever."""
    return memoryview((ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())).cast("B")


def _trim() -> None:
    """Give freed memory back to the system: glibc keeps what was freed below its top, which is most of a
    model's many tensors of a few megabytes."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # another C library has none
