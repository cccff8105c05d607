"""Errors that travel: ranks of one machine tell each other why they failed through small files, so that the
error shown is the first one and not the broken connections that follow from it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_lightning.config import ConfigError
from ppo_lightning.launchers.script import lost_peer

DIRECTORY = "PPO_LIGHTNING_ERRORS"  # variable that names where ranks leave their errors


class RankFailedError(RuntimeError):
    """Another rank failed first; the message is its traceback."""


@dataclass(frozen=True, slots=True)
class RankError:
    """What a rank left behind."""

    rank: int
    time: float
    text: str
    lost_peer: bool  # it failed because another one did

    @property
    def message(self) -> str:
        """The exception itself, without where it was raised."""
        return self.text.rsplit("\n", 1)[-1]

    def __str__(self) -> str:
        return f"rank {self.rank} failed first:\n{self.text}"


def leave(rank: int, error: BaseException) -> RankError:
    """Put `error` where the other ranks of this machine look, if there are any."""
    text = "".join(traceback.format_exception(error)).rstrip()
    left = RankError(rank, time.time(), text, lost_peer(error))
    directory = os.environ.get(DIRECTORY)
    if directory is not None and Path(directory).is_dir():
        record = {"rank": left.rank, "time": left.time, "text": left.text, "lost_peer": left.lost_peer}
        temporary = Path(directory, f".{rank}")
        temporary.write_text(json.dumps(record), encoding="utf-8")
        os.replace(temporary, Path(directory, f"rank_{rank}.json"))
    return left


def left_behind() -> list[RankError]:
    """What ranks of this machine have left, the first cause first."""
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return []
    found = [RankError(**json.loads(p.read_text("utf-8"))) for p in Path(directory).glob("rank_*.json")]
    return sorted(found, key=lambda e: (e.lost_peer, e.time))


@contextmanager
def shown_by_first_rank() -> Iterator[None]:
    """Around all that a command does. In a rank that the first one started, an error is left for that one,
    which shows it, and becomes a quiet exit: what is wrong everywhere would be said by everybody."""
    rank = int(os.environ.get("LOCAL_RANK", "0")) if DIRECTORY in os.environ else 0
    if rank == 0:
        yield
        return
    try:
        yield
    except Exception as error:  # noqa: BLE001  (it goes on in the first rank)
        if all(left.rank != rank for left in left_behind()):  # the launcher may have done it
            leave(rank, error)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
