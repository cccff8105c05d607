"""Reading files that are pickles without running what they hold: tensors and plain values, nothing else.

All three kinds of pickle in a `torch_dist` checkpoint are covered: `common.pt`, the `.metadata` index, and
objects between the tensors. Megatron-Core and torch unpickle the latter two without restriction.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ppo_lightning.megatron.checkpoint_files import CheckpointError

_METADATA_CLASSES = {
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix", "SerializationFormat"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}  # fmt: skip


def loads(source: Path | BytesIO) -> Any:
    """Tensors and plain values of a file or buffer; raises pickle.UnpicklingError for anything else."""
    register_safe_globals()
    if isinstance(source, BytesIO):
        source.seek(0)
    return torch.load(source, map_location="cpu", weights_only=True)


def load_file(path: Path) -> Any:
    """`torch.load` of tensors and plain values; anything else is refused and not run."""
    try:
        return loads(path)
    except pickle.UnpicklingError as error:
        raise _refused(path, reason(error)) from error
    except (EOFError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class SafeReader(CachedMetadataFileSystemReader):
    """Reads `.metadata`, a pickle, with the classes that such a file is made of and no others."""

    _cached_metadata: Metadata | None

    def read_metadata(self) -> Metadata:
        if self._cached_metadata is None:
            path = Path(self.path) / ".metadata"
            with path.open("rb") as stream:
                metadata = _MetadataUnpickler(stream, path).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            self._cached_metadata = metadata
        return self._cached_metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, path: Path) -> None:
        super().__init__(stream)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _refused(self.path, f"{module}.{name}")


class CommonLoad(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> Any:
        return load_file(Path(checkpoint_dir) / COMMON_STATE_FNAME)


def _load_bytes(self: Any, read_item: ReadItem, value: BytesIO) -> None:
    name = read_item.dest_index.fqn
    try:
        loaded = loads(value)
    except pickle.UnpicklingError as error:
        raise _refused(Path(name), reason(error)) from error
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def install() -> None:
    """Put the safe readers in the place of Megatron's, which unpickle anything."""
    register_safe_globals()
    mcore_torch._get_filesystem_reader = lambda directory, cache_metadata=False: SafeReader(directory)
    mcore_torch.MCoreLoadPlanner.load_bytes = _load_bytes


def _refused(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was refused, and nothing in it was run: it holds {what}, neither a tensor nor a plain value;"
        " take another checkpoint, or convert this one on a machine where you trust it"
    )


def reason(error: pickle.UnpicklingError) -> str:
    """The object that torch's safe loader stumbled over, out of its page of advice."""
    text = str(error)
    marker = "Unsupported global: GLOBAL "
    if marker in text:
        return text.split(marker, 1)[1].split()[0]
    return text.split("WeightsUnpickler error: ")[-1].strip().splitlines()[0]
