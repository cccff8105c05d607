"""What became of the actors of a job, and which of their errors was the first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ppo_lightning.launchers.script import RayLaunchError, lost_peer

GRACE = 10.0  # seconds between a broken connection and the word of what broke it


def ended(running: dict[Any, str], limit: float | None) -> list[Exception]:
    """Wait until one of the `running` actors has ended and take it out, or for `limit` seconds: its error."""
    import ray

    errors: list[Exception] = []
    for done in ray.wait(list(running), num_returns=1, timeout=limit)[0]:
        try:
            with _named(running.pop(done)):
                ray.get(done)
        except Exception as error:  # noqa: BLE001 - raised by who asked
            errors.append(error)
    return errors


def first_cause(error: Exception, running: dict[Any, str]) -> Exception:
    """A rank whose peer is gone may say so before it is known what became of the peer: wait for that."""
    end = time.monotonic() + GRACE
    while running and lost_peer(error) and (left := end - time.monotonic()) > 0:
        for other in ended(running, left):
            if not lost_peer(other):
                return other
    return error


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors that pass say whose they are; one of a process that died without a word is a RayLaunchError."""
    from ray.exceptions import ActorDiedError, RayTaskError

    try:
        yield
    except ActorDiedError as error:
        raise RayLaunchError(f"{name} died without an error (killed, or out of memory): {error}") from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(f"raised by {name}")
        raise cause from None
