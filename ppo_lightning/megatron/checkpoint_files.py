"""Checkpoints as files: layout, completeness, publication, trackers, retention. No torch, no process groups.

    <save>/iter_0000020/                        the actor, the trainer's own state, the random states
    <save>/latest_checkpointed_iteration.txt    "20": the tracker, replaced after everything else is on disk
    <critic save>/iter_0000020/ and tracker     the critic of the same moment

A checkpoint is written to `.partial-iter_0000020` beside its final place and renamed when all of it is on
disk. Its `manifest.json`, the last file written, lists every other file with size and checksum; so damage
has a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
TRAINER_FILE = "trainer.pt"
_PARTIAL, _OLD = ".partial-", ".old-"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # of linux/fs.h and fcntl.h


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
    return final.with_name(_PARTIAL + final.name)


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
    temporary = root / (_PARTIAL + TRACKER)
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
    write_durably(path / MANIFEST, json.dumps({**facts, "files": files}, indent=1).encode())


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


# publication ------------------------------------------------------------------------------------------


def publish(finals: Sequence[Path]) -> None:
    """Move written checkpoints to their final places, then replace the trackers, each in the given order.

    Give the actor's last: whoever finds it finds the critic's too.
    """
    for final in finals:
        for directory in [staging_dir(final), *[p for p in staging_dir(final).rglob("*") if p.is_dir()]]:
            sync(directory)
        _replace_dir(staging_dir(final), final)
    for final in finals:
        iteration = iteration_of(final)
        if iteration is not None:
            write_tracker(final.parent, iteration)


def _replace_dir(source: Path, target: Path) -> None:
    """Rename a directory over another; one of the two is there at every moment, where the file system can."""
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        os.rename(source, target)
    elif _exchange(source, target):
        shutil.rmtree(source)
    else:
        old = target.with_name(_OLD + target.name)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        os.rename(source, target)
        shutil.rmtree(old)
    sync(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories atomically; False where the system has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill half way leaves no directory that looks like one."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = path.with_name(_PARTIAL + "removed-" + path.name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def clean(root: str | Path) -> list[Path]:
    """Remove what killed saves left in `root`, put back what a killed replacement moved away."""
    root = Path(root)
    if not root.is_dir():
        return []
    left = [p for p in root.iterdir() if p.name.startswith((_PARTIAL, _OLD))]
    for path in left:
        target = path.with_name(path.name.removeprefix(_OLD))
        if path.name.startswith(_OLD) and not target.exists():
            os.rename(path, target)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return left


def prune(roots: Iterable[Path], newest: int, keep: int, protected: Iterable[int] = ()) -> list[int]:
    """Delete all but `keep` iterations up to `newest` from `roots`; never a protected one, nor `newest`
    itself.

    Later ones, from before a return to an earlier checkpoint, are left alone. Nothing is deleted while
    `newest` is not whole: it might be the last good one that went.
    """
    roots = list(roots)
    if any(problems(iteration_dir(root, newest)) for root in roots):
        return []
    present = sorted({i for root in roots for i in iterations(root) if i < newest})
    doomed = [i for i in present[: len(present) - max(keep - 1, 0)] if i not in set(protected)]
    for iteration in doomed:
        for root in reversed(roots):  # the actor's first: a critic alone is never mistaken for a checkpoint
            remove(iteration_dir(root, iteration))
    return doomed


# bytes on disk ----------------------------------------------------------------------------------------


def digest_of(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_durably(file: Path, data: bytes) -> None:
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
