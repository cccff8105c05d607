"""How a checkpoint becomes visible, and how it goes: renames that survive being killed at any point.

A checkpoint is written to `.partial-iter_0000020` beside its final place and renamed when all of it is on
disk. Where the iteration exists already, old and new swap places; as an actor and its critic cannot swap in
one step, an intent file says what is meant, and the next start ends what was begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from ppo_lightning.megatron.checkpoint_files import (
    PARTIAL,
    CheckpointError,
    iteration_dir,
    iteration_of,
    iterations,
    problems,
    read_manifest,
    staging_dir,
    sync,
    write_durably,
    write_tracker,
)

_OLD, _INTENT = ".old-", ".publish-"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # of linux/fs.h and fcntl.h


def publish(finals: Sequence[Path]) -> None:
    """Move written checkpoints to their final places, then replace the trackers, each in the given order.

    Give the actor's last: whoever finds it finds the critic's too.
    """
    intent: Path | None = None
    if any(final.exists() for final in finals):
        intent = finals[-1].with_name(_INTENT + finals[-1].name)
        record = {"save_id": _save_id(staging_dir(finals[-1])), "finals": [str(f.absolute()) for f in finals]}
        write_durably(intent, json.dumps(record).encode())
        sync(intent.parent)
    for final in finals:
        for directory in [staging_dir(final), *[p for p in staging_dir(final).rglob("*") if p.is_dir()]]:
            sync(directory)
        _replace(staging_dir(final), final)
    _track(finals)
    if intent is not None:
        intent.unlink()


def _track(finals: Sequence[Path]) -> None:
    for final in finals:
        iteration = iteration_of(final)
        if iteration is not None:
            write_tracker(final.parent, iteration)


def _replace(source: Path, target: Path) -> None:
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
    doomed = path.with_name(PARTIAL + "removed-" + path.name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def clean(root: str | Path) -> None:
    """End what a killed publication began, put back what a killed replacement moved away, remove what killed
    saves left in `root`. For the actor's root first."""
    root = Path(root)
    if not root.is_dir():
        return
    for intent in root.glob(_INTENT + "*"):
        _end_publication(intent)
    for path in [p for p in root.iterdir() if p.name.startswith((PARTIAL, _OLD))]:
        target = path.with_name(path.name.removeprefix(_OLD))
        if path.name.startswith(_OLD) and not target.exists():
            os.rename(path, target)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _end_publication(intent: Path) -> None:
    """All of a killed publication's directories were written: swap those in that had not been."""
    with contextlib.suppress(ValueError, KeyError):  # a torn intent was written before anything moved
        record = json.loads(intent.read_text(encoding="utf-8"))
        finals = [Path(final) for final in record["finals"]]
        for final in finals:
            if _save_id(final) != record["save_id"] and _save_id(staging_dir(final)) == record["save_id"]:
                _replace(staging_dir(final), final)
        if all(_save_id(final) == record["save_id"] for final in finals):
            _track(finals)
    intent.unlink()


def _save_id(path: Path) -> str | None:
    """What a directory's manifest says, if it has a readable one."""
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(path)
        return None if manifest is None else manifest.save_id
    return None


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
