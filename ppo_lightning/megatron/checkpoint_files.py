"""Checkpoints as files: layout, trackers, manifests, completeness. No torch, no process groups.

    <save>/iter_0000020/                        the actor, the trainer's own state, the random states
    <save>/latest_checkpointed_iteration.txt    "20": the tracker, replaced after everything else is on disk
    <critic save>/iter_0000020/ and tracker     the critic of the same moment

A checkpoint is written to `.partial-iter_0000020` beside its final place and renamed when all of it is on
disk. Its `manifest.json`, the last file written, lists every other file with size and checksum; so damage
has a name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
TRAINER_FILE = "trainer.pt"
PARTIAL = ".partial-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written; the message names the file, the cause and the cure."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint directory says of itself."""

    iteration: int
    save_id: str  # the same in all directories that one save wrote
    role: str  # "actor" | "critic"
    optimizer: str | None  # Megatron's optimizer class; None: weights only
    layout: dict[str, Any]  # tp, pp, cp, dp, vpp
    files: dict[str, tuple[int, str]]  # relative name -> bytes, xxh3


# names ------------------------------------------------------------------------------------------------


def iteration_dir(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def iteration_of(path: str | Path) -> int | None:
    """20 for `.../iter_0000020`, None for any other name."""
    match = re.fullmatch(r"iter_(\d{7,})", Path(path).name)
    return int(match[1]) if match else None


def iterations(root: str | Path) -> list[int]:
    """Iterations whose directory is there, oldest first, whole or not."""
    if not Path(root).is_dir():
        return []
    return sorted(i for p in Path(root).iterdir() if (i := iteration_of(p)) is not None and p.is_dir())


def staging_dir(final: Path) -> Path:
    """Where the checkpoint that will be `final` is written."""
    return final.with_name(PARTIAL + final.name)


def critic_root(root: str | Path) -> Path:
    """The critic's place where none is given: `<save>_critic`."""
    root = Path(root)
    return root.with_name(root.name + "_critic")


# trackers ---------------------------------------------------------------------------------------------


def latest_iteration(root: str | Path) -> int | None:
    """The iteration that the tracker names; without a tracker the newest whole one; None if there is none.

    A tracker of "release" (Megatron-LM's converted weights) names no iteration. Raises CheckpointError for a
    tracker that holds anything else.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return next((i for i in reversed(iterations(root)) if not problems(iteration_dir(root, i))), None)
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return None
    if not text.isdigit():
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r} instead of an iteration; write into it the one to go on from"
            f" (there are: {listed(iterations(root))})"
        )
    return int(text)


def write_tracker(root: Path, iteration: int) -> None:
    """Replace the tracker in one step."""
    temporary = root / (PARTIAL + TRACKER)
    write_durably(temporary, str(iteration).encode())
    os.replace(temporary, root / TRACKER)
    sync(root)


# completeness -----------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in `path`; None where there is none (other tools')."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        checksum = raw.pop("checksum", None)
        if checksum not in (None, _checksum(raw)):
            raise ValueError("its checksum is not the one that was written")
        files = {name: (int(size), str(digest)) for name, (size, digest) in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def write_manifest(path: Path, digests: dict[str, str], **facts: Any) -> None:
    """List all files under `path`, made durable now except those in `digests`, which are known to be."""
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path).as_posix()
        if name not in digests:
            sync(file)
        files[name] = (file.stat().st_size, digests.get(name) or digest_of(file))
    content = {**facts, "files": files}
    write_durably(path / MANIFEST, json.dumps({"checksum": _checksum(content), **content}, indent=1).encode())


def _checksum(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def problems(path: Path, *, contents: bool = False, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with a checkpoint directory, one line a file; empty: nothing.

    Sizes always; with `contents` also checksums, of every n-th file from the k-th for `share` (k, n).
    """
    if not path.is_dir():
        return [f"{path} is missing"]
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return _foreign_problems(path)
    found = []
    for name, (size, digest) in sorted(manifest.files.items())[share[0] :: share[1]]:
        file = path / name
        if not file.is_file():
            found.append(f"{file} is missing")
        elif file.stat().st_size != size:
            found.append(f"{file} has {file.stat().st_size} bytes, {size} were written")
        elif contents and digest_of(file) != digest:
            found.append(f"{file} is damaged: its checksum is not the one that was written")
    return found


def _foreign_problems(path: Path) -> list[str]:
    """A directory of another tool has no checksums; one of ours never lacks the manifest."""
    ours = (path / TRAINER_FILE).exists()
    wanted = [MANIFEST] if ours else ["metadata.json", ".metadata", "common.pt"]
    return [f"{path / name} is missing" for name in wanted if not (path / name).is_file()]


def is_distributed_checkpoint(path: Path) -> bool:
    """Whether `path` is one `torch_dist` checkpoint (not the directory above it)."""
    return (path / "metadata.json").is_file()


def newest_whole(root: str | Path, before: int) -> int | None:
    """The newest iteration older than `before` in which nothing is missing or cut short."""
    older = [i for i in iterations(root) if i < before]
    return next((i for i in reversed(older) if not problems(iteration_dir(root, i))), None)


# bytes on disk ----------------------------------------------------------------------------------------


def digest_of(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_durably(file: Path, data: bytes | memoryview) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
