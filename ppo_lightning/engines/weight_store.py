"""The weights an engine was sent last, on disk: what a restarted server loads and what a failed transfer
repeats."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import psutil
from safetensors import safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from torch import Tensor

Bucket: TypeAlias = "list[tuple[str, Tensor]]"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
PREFIX = "ppo-lightning-weights-"


def buckets(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Consecutive tensors, as many as fit into `size` bytes; a larger one stands alone. Holds one bucket."""
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


class WeightStore:
    """One directory per version under a directory of its own, each a whole Hugging Face checkpoint: the
    files of `checkpoint` with other weights. A version that is not complete is never seen under its name.

    The directory goes with `close`; one left by a process that was killed goes when the next store of this
    machine is made at the same `place` (default: the system's temporary directory)."""

    def __init__(self, checkpoint: str, place: str | None = None) -> None:
        parent = Path(place or tempfile.gettempdir()).resolve()  # a server may stand in another directory
        parent.mkdir(parents=True, exist_ok=True)
        machine = socket.gethostname()
        for left in parent.glob(f"{PREFIX}*@{machine}@*"):
            pid = left.name.removeprefix(PREFIX).partition("@")[0]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        self.root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}@{machine}@", dir=parent))
        self.root.chmod(0o755)  # disk transfer: a server may run as another user
        self.checkpoint = checkpoint

    def path(self, version: int) -> Path:
        return self.root / f"v{version}"

    def record(self, version: int, stream: Iterator[Bucket]) -> Iterator[Bucket]:
        """Write each bucket as a file, then hand it on; the version is there once the iterator has ended."""
        part = self.root / f"v{version}.part"
        shutil.rmtree(part, ignore_errors=True)
        copy_without_weights(self.checkpoint, part)
        weight_map: dict[str, str] = {}
        total = 0
        for number, bucket in enumerate(stream, start=1):
            file = f"model-{number:05d}.safetensors"
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket}
            save_file(tensors, part / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
            del tensors
            yield bucket
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (part / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(self.path(version), ignore_errors=True)
        part.rename(self.path(version))

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version, in the order in which they came, one at a time."""
        for file, names in groupby(self.names(version).items(), key=itemgetter(1)):
            with safe_open(self.path(version) / file, framework="pt") as opened:
                for name, _ in names:
                    yield name, opened.get_tensor(name)

    def names(self, version: int) -> dict[str, str]:
        """Names of a version's tensors, and the file each lies in."""
        text = (self.path(version) / "model.safetensors.index.json").read_text(encoding="utf-8")
        names: dict[str, str] = json.loads(text)["weight_map"]
        return names

    def getter(self, version: int) -> Callable[[str], Tensor]:
        """A version's tensor by its name."""
        names = self.names(version)

        def get(name: str) -> Tensor:
            with safe_open(self.path(version) / names[name], framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor

        return get

    def keep_only(self, version: int | None) -> None:
        for entry in self.root.iterdir():
            if version is None or entry != self.path(version):
                shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def copy_without_weights(checkpoint: str, target: Path) -> None:
    """Configuration and tokenizer of a Hugging Face directory, or of a repository in the local cache or the
    Hub."""
    source = Path(checkpoint)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [f"*{suffix}" for suffix in WEIGHT_FILES]
        source = Path(snapshot_download(checkpoint, ignore_patterns=patterns))
    target.mkdir(parents=True)
    for file in source.iterdir():
        weights = file.suffix in WEIGHT_FILES or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, target / file.name)
