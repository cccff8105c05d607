"""The command line in forked processes: real ranks of the real launcher, without the seconds of imports.

A warm process that has imported everything forks rank 0, which runs `ppo_lightning.cli.main`; the launcher's
`subprocess.Popen` of further ranks forks again. All else is as in production: environment, gloo, watching,
dying with the parent, exit codes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import ppo_lightning.run  # noqa: F401  (imported for the children, as all that follows)
from ppo_lightning import cli
from ppo_lightning.launchers import ranks
from tests.distributed.ranks import PR_SET_PDEATHSIG, _forget_groups

_LAZY = (
    "matplotlib.pyplot", "ppo_lightning.engines.hf", "ppo_lightning.report", "tokenizers.implementations",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# what a launcher sets, and a launcher that ran in this process may have left
Prepare = Callable[[int], None]


def warm() -> None:
    """Import now what a run imports late, and spare the children's garbage collector what is there."""
    for name in _LAZY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Forked:
    """A child process with what the launcher uses of `subprocess.Popen`."""

    def __init__(self, action: Callable[[], NoReturn]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                action()
            except BaseException as error:  # noqa: BLE001  (the child must not go on as its parent)
                os.write(2, f"{error!r}\n".encode())
            finally:
                os._exit(70)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def command(
    argv: Sequence[str], output: Path, *, environment: Mapping[str, str] | None = None, prepare: Prepare
) -> Forked:
    """Start `ppo-lightning ARGV` as the leader of a process group of its own; its ranks join the group. What
    they print goes to `output`. `prepare(rank)` runs first in every rank."""
    parent = os.getpid()

    def leader() -> NoReturn:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | dict(environment or {})
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        _run_command(argv, prepare)

    return Forked(leader)


def _run_command(argv: Sequence[str], prepare: Prepare) -> NoReturn:
    """In a fresh child: be one rank, from the command line to the exit code."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    inherited = _forget_groups()
    atexit._clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    sys.argv = ["ppo-lightning", *argv]
    for name in ("ppo_lightning", "lightning.pytorch"):  # rank 0's log is not the other ranks'
        logger = logging.getLogger(name)
        logger.handlers = [h for h in logger.handlers if not isinstance(h, logging.FileHandler)]
    rank_zero_only.rank = fabric_rank_zero_only.rank = rank  # type: ignore[attr-defined]
    random.seed(rank)  # a fork is seeded by the clock: two runs could not be compared

    def start(own: Any, *, env: Mapping[str, str], preexec_fn: Callable[[], None], **_: Any) -> Forked:
        def follower() -> NoReturn:
            preexec_fn()
            os.environ.update(env)
            _run_command(argv, prepare)

        return Forked(follower)

    ranks.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    prepare(rank)
    code = cli.main(argv)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    assert inherited is not None
    os._exit(code)


def members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
