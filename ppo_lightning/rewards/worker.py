"""What runs in a scoring process: one line of JSON in (a batch), lines of JSON out (a value each).

The limits are the kernel's: CPU time, so that a busy machine changes no reward. The first timer raises in
Python code; the second ends the process where C code does not come back. Nothing is read from a response
but its characters.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
HARD_FACTOR = 2.0  # CPU time, in units of the soft limit, at which the kernel ends the process


class Expired(BaseException):
    """The soft limit; no Exception, so that no library takes it for one of its own."""


def _expire(signum: int, frame: Any) -> None:
    raise Expired


def _set_timers(seconds: float) -> None:
    # The soft timer fires again and again: an Expired raised inside a destructor is swallowed by the
    # interpreter.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds * HARD_FACTOR)


def _score(function: Callable[[str, Any], float], response: str, label: Any, seconds: float) -> list[Any]:
    try:
        _set_timers(seconds)
        try:
            return [float(function(response, label))]
        finally:
            _set_timers(0)
    except Expired:
        return [0.0, "time"]
    except MemoryError:
        return [0.0, "memory"]
    except Exception:  # noqa: BLE001 - travels to the parent, which raises
        return [0.0, "error", traceback.format_exc(limit=-6)]


def _load(target: str) -> Callable[[str, Any], float]:
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    if hasattr(
        module, "warm_up"
    ):  # slow first calls, such as building a grammar, are nobody's response either
        module.warm_up()
    return getattr(module, attribute)


def _die_with_parent(parent: int) -> None:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # not Linux: the end of standard input still ends the loop
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _private_stdout() -> BinaryIO:
    """The pipe to the parent, out of reach of a stray print."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return pipe


def serve(parent: int, memory_bytes: int) -> None:
    """Score batches until the parent closes the pipe."""
    _die_with_parent(parent)
    out = _private_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGPROF, _expire)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)

    def send(message: Any) -> None:
        out.write(json.dumps(message).encode() + b"\n")

    send("ready")
    for line in sys.stdin.buffer:
        batch = json.loads(line)
        try:
            function = _load(batch["target"])
        except Exception:  # noqa: BLE001 - travels to the parent, which raises
            send([0.0, "error", traceback.format_exc(limit=-6)])
            continue
        send("loaded")  # imports may take seconds and are nobody's response
        for response, label in batch["pairs"]:
            send(_score(function, response, label, batch["seconds"]))
