"""Megatron-Core's `torch_dist` format, written by this process itself and read without running what it holds.

Megatron writes through helper processes, which re-import the user's script and outlive a killed trainer. Here
every rank writes one file, in the calling thread or in one of its own, and its checksum comes with it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from ppo_lightning.megatron import cpu, safe_pickle
from ppo_lightning.megatron.checkpoint_files import CheckpointError, write_durably

T = TypeVar("T")
_WRITE_ERRORS = (OSError, RuntimeError)  # torch reports a failed write as RuntimeError


def everywhere(what: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank; where it fails on one, all ranks raise one CheckpointError. Collective."""
    result: T | None = None
    error = ""
    try:
        result = action()
    except CheckpointError as caught:
        error = str(caught)
    except _WRITE_ERRORS as caught:
        error = f"{what} failed on rank {dist.get_rank()}: {str(caught) or repr(caught)}"
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        raise CheckpointError(next(e for e in errors if e))
    return result  # type: ignore[return-value]


# writing ----------------------------------------------------------------------------------------------


class Write:
    """One rank's share of a save: `write` may run in any thread; making and `finish` are collective."""

    def __init__(
        self, state: dict[str, Any], directory: Path, *, copies: dict[Any, torch.Tensor] | None = None
    ) -> None:
        """Plan a save of `state` into the empty `directory`. With `copies` its tensors are copied now, into
        what is there from the last save where it fits."""
        cpu.prepared()
        self.directory = directory
        flat, common = _flat(state)
        everywhere(f"writing {directory / COMMON_STATE_FNAME}", lambda: self._write_common(common))
        self._writer = _Writer(directory, copies)
        planned, *_ = save_state_dict_async_plan(flat, self._writer, None, 0, planner=_planner())
        self._metadata: Metadata = planned[1]  # on rank 0

    def write(self) -> None:
        """Write this rank's file; an error is kept for `finish`."""
        self._writer.write()

    def finish(self) -> dict[str, str]:
        """Write the metadata (rank 0); checksums of the files of this rank. Raises on all ranks if one
        failed."""
        everywhere(f"writing {self.directory}", self._writer.check)
        rank, everyone = dist.get_rank(), [None] * dist.get_world_size()
        dist.gather_object(self._writer.written, everyone if rank == 0 else None)
        everywhere(f"writing {self.directory / '.metadata'}", lambda: self._write_metadata(everyone))
        return self._writer.digests

    def _write_common(self, common: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            save_file(common, self.directory / COMMON_STATE_FNAME)

    def _write_metadata(self, results: list[Any]) -> None:
        if dist.get_rank() == 0:
            self._writer.finish(self._metadata, results)
            save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))


class _Writer(FileSystemWriterAsync):
    """One file a rank, written in order by whoever calls `write`."""

    def __init__(self, path: Path, copies: dict[Any, torch.Tensor] | None) -> None:
        super().__init__(path, thread_count=1)
        self.digests: dict[str, str] = {}
        self.written: list[Any] = []
        self._copies = copies
        self._name = ""
        self._items: list[tuple[Any, Any]] = []
        self._error: Exception | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._name = f"{plan.storage_data.prefix}0.distcp"
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO:
                data = data.detach()
                if self._copies is not None:
                    data = _copied(data, self._copies, item.index)
            self._items.append((item, data))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def write(self) -> None:
        if not self._items:
            return
        stream: _Hashed | None = None
        try:
            with open(os.path.join(self.checkpoint_dir, self._name), "wb") as file:
                stream = _Hashed(file)
                self.written = [self._write_one(stream, item, data) for item, data in self._items]
                file.flush()
                os.fsync(file.fileno())
            self.digests[self._name] = stream.digest.hexdigest()
        except _WRITE_ERRORS as error:
            self._error = stream.error if stream is not None and stream.error is not None else error
        self._items.clear()

    def _write_one(self, stream: Any, item: Any, data: Any) -> Any:
        if item.type != WriteItemType.BYTE_IO:
            data = data.cpu()
            if data.untyped_storage().size() != data.numel() * data.itemsize:
                data = data.clone()  # a view would drag the whole buffer behind it along
        return _write_item(self.transforms, stream, data, item, self._name, SerializationFormat.TORCH_SAVE)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def room_for(state: dict[str, Any], copies: dict[Any, torch.Tensor]) -> Callable[[], None]:
    """What makes, in any thread, the memory that `Write(state, ..., copies=copies)` will copy into: to make
    and touch it takes longer than to copy."""
    planner = _planner()
    planner.set_up_planner(_flat(state)[0], is_coordinator=dist.get_rank() == 0)
    items = [item for item in planner.create_local_plan().items if item.type != WriteItemType.BYTE_IO]
    wanted = {item.index: planner.resolve_data(item) for item in items}
    kinds = {key: (data.shape, data.dtype, data.is_cuda) for key, data in wanted.items()}

    def make() -> None:
        for key, (shape, dtype, pinned) in kinds.items():
            copies[key] = torch.empty(shape, dtype=dtype, pin_memory=pinned).zero_()

    return make


def _flat(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded part of `state` as torch's planners want it, and the rest."""
    sharded, common = save_preprocess(state)
    flat, _, _ = mcore_torch._replace_state_dict_keys_with_sharded_keys(sharded, True)
    return mcore_torch.mcore_to_pyt_state_dict(flat, False), common


def _planner() -> mcore_torch.MCoreSavePlanner:
    return mcore_torch.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _copied(data: torch.Tensor, copies: dict[Any, torch.Tensor], key: Any) -> torch.Tensor:
    """`data` in host memory; memory that was used before costs no page faults."""
    there = copies.get(key)
    if there is None or there.shape != data.shape or there.dtype != data.dtype:
        there = copies[key] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
    return there.copy_(data, non_blocking=True)


class _Hashed:
    """A binary stream that checksums what passes, and remembers why it could not pass: torch makes "enforce
    fail ... unexpected pos" of a full disk."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, xxhash.xxh3_128()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()


def save_file(value: Any, path: Path) -> None:
    """`torch.save`, durably. Raises CheckpointError for a value that could not be loaded safely again."""
    buffer = BytesIO()
    torch.save(value, buffer)
    try:
        safe_pickle.loads(buffer)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} would hold {safe_pickle.reason(error)} and could not be loaded again; keep the state of"
            " callbacks and modules to numbers, strings, lists, dicts and tensors"
        ) from error
    write_durably(path, buffer.getbuffer())


# reading ----------------------------------------------------------------------------------------------


def load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Fill `state` (of `Role.sharded_state(loading=True)`) from a checkpoint. Collective.

    Raises CheckpointError where something is missing, or is more than tensors and plain values.
    """
    cpu.prepared()
    safe_pickle.install()
    try:
        return dist_checkpointing.load(state, str(directory), common_strategy=safe_pickle.CommonLoad())
    except (CheckpointingException, CheckpointException, KeyError) as error:
        cause = _first_cause(error)
        raise CheckpointError(f"{directory} does not hold what this run needs: {cause}") from error


def tensors_in(directory: Path) -> dict[str, ShardedTensor]:
    """Names and shapes of all tensors in a checkpoint; read from its metadata by this rank alone."""
    metadata = safe_pickle.SafeReader(directory).read_metadata()
    return mcore_torch.TorchDistLoadShardedStrategy().load_tensors_metadata(directory, metadata)


def _first_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> (exception, stack)
    if failures:
        return str(next(iter(failures.values()))[0])
    return str(error)
