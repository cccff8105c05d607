"""One machine, one process a rank: the user's command runs again for every further rank, and all end
together.

Ranks tell each other why they failed through small files, so that the error shown is the first one and not
the broken connections that follow from it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from ppo_lightning.launchers.script import lost_peer

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import ClusterEnvironment

_ERRORS = "PPO_LIGHTNING_ERRORS"  # directory in which ranks leave their errors
_POLL = 0.2  # seconds
_GRACE = 10.0  # seconds that a rank has to come out of a collective, or to end after a signal
_PR_SET_PDEATHSIG = 1


class RankFailedError(RuntimeError):
    """Another rank failed first; the message is its traceback."""


class PortInUseError(RuntimeError):
    """The port given for the ranks to meet at is taken."""


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


class LocalLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher whose ranks live and die together.

    Children are killed with their parent. A rank that fails ends all within seconds, and the first error is
    the one that is raised. Ctrl-C ends all ranks with exit code 130. Recognises ranks that torchrun or SLURM
    started.
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._rank = 0
        self._ending = threading.Event()  # the main thread is dealing with an error

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the other ranks, if they are ours to start, and run `function` as this one."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if not self.procs and not environment.creates_processes_externally and self.num_processes > 1:
            self._start_children()
        self._rank = environment.local_rank()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._ending.set()
            self._end_children(signal.SIGINT)
            raise SystemExit(130) from None
        except Exception as error:
            self._ending.set()
            first = self._first_error(error)
            self._end_children(signal.SIGTERM)
            if first is None or first.rank == self._rank:
                raise
            if self._rank > 0:
                raise SystemExit(1) from None  # rank 0 shows it
            raise RankFailedError(str(first)) from None
        except BaseException:  # an exit by the user or by a signal: no reason to wait for the others
            self._ending.set()
            raise

    def kill(self, signum: int) -> None:
        """Lightning's handler of SIGTERM calls this on a rank that got the signal, and would then enter a
        broadcast that the other ranks may never join: leave at once instead. SLURM that requeues a job sends
        the signal first and wants it ignored."""
        if signum == signal.SIGTERM and not getattr(self.cluster_environment, "auto_requeue", False):
            self._ending.set()
            self._end_children(signal.SIGTERM)
            raise SystemExit(128 + signum)

    # ---- the parent --------------------------------------------------------------------------------------

    def _start_children(self) -> None:
        _require_free_port()
        directory = tempfile.mkdtemp(prefix="ppo-lightning-")
        os.environ[_ERRORS] = directory
        os.environ |= {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            "NODE_RANK": str(self.cluster_environment.node_rank()),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        command, die = _own_command(), _die_with(os.getpid())
        for rank in range(1, self.num_processes):
            environment = os.environ | {"LOCAL_RANK": str(rank)}
            self.procs.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=die)
            )
        atexit.register(self._join)
        self._notice_interrupts()
        threading.Thread(target=self._watch, name="rank-watcher", daemon=True).start()

    def _watch(self) -> None:
        """End everything when a child fails and the main thread does not notice, as in a collective."""
        while True:
            time.sleep(_POLL)
            codes = [p.poll() for p in self.procs]
            if all(code == 0 for code in codes):
                return
            if any(code not in (None, 0) for code in codes):
                break
        if self._ending.wait(_GRACE):
            return  # the main thread has its own error in hand, and ends the others
        first = self._dead_child() or next(iter(_errors()), None)
        sys.stderr.write(f"{first or 'a rank has ended'}\nAll ranks are ended.\n")
        sys.stderr.flush()
        self._end_children(signal.SIGKILL)
        os._exit(130 if first is None and 130 in codes else 1)

    def _first_error(self, error: BaseException) -> RankError | None:
        """The error that came first anywhere; waits for it where `error` only says that another rank is
        gone."""
        mine = _leave_error(self._rank, error)
        deadline = time.monotonic() + (_GRACE if mine.lost_peer else 0.0)
        while True:
            causes = [e for e in [*_errors(), self._dead_child()] if e is not None and not e.lost_peer]
            if causes or time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        first = min(causes or [mine], key=lambda e: e.time)
        return mine if first.message == mine.message else first  # one cause, raised on every rank

    def _dead_child(self) -> RankError | None:
        """A child that was killed before it could say anything."""
        said = {e.rank for e in _errors()}
        for rank, child in enumerate(self.procs, start=1):
            code = child.poll()
            if code is not None and code < 0 and rank not in said:
                name = signal.Signals(-code).name
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                return RankError(rank, time.time(), f"process {child.pid} was killed by {name}{hint}", False)
            if code not in (None, 0, 130) and rank not in said:
                text = f"process {child.pid} ended with exit code {code}; what it printed is above"
                return RankError(rank, time.time(), text, False)
        return None

    def _end_children(self, first_signal: int) -> None:
        """Ask, wait, insist; nothing is left running."""
        for child in self.procs:
            if child.poll() is None:
                child.send_signal(first_signal)
        deadline = time.monotonic() + _GRACE / 2
        for child in self.procs:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.procs:
            child.kill()
            child.wait()

    def _join(self) -> None:
        """At the end of the script: children would be killed if the parent left before them."""
        deadline = time.monotonic() + (0.0 if self._ending.is_set() else 60.0)
        for child in self.procs:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        self._end_children(signal.SIGTERM)
        shutil.rmtree(os.environ[_ERRORS], ignore_errors=True)

    def _notice_interrupts(self) -> None:
        """See Ctrl-C and SIGTERM even while the main thread is inside a collective, where Python's handler
        cannot run."""
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._insist, args=[reader, writer], daemon=True).start()

    def _insist(self, reader: socket.socket, writer: socket.socket) -> None:
        while number := reader.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM) and not self._ending.wait(_GRACE):
                sys.stderr.write("interrupted inside a collective: all ranks are ended\n")
                self._end_children(signal.SIGKILL)
                os._exit(128 + number[0])


# errors that travel -----------------------------------------------------------------------------------


def _leave_error(rank: int, error: BaseException) -> RankError:
    text = "".join(traceback.format_exception(error)).rstrip()
    left = RankError(rank, time.time(), text, lost_peer(error))
    directory = os.environ.get(_ERRORS)
    if directory is not None and Path(directory).is_dir():
        record = {"rank": left.rank, "time": left.time, "text": left.text, "lost_peer": left.lost_peer}
        temporary = Path(directory, f".{rank}")
        temporary.write_text(json.dumps(record), encoding="utf-8")
        os.replace(temporary, Path(directory, f"rank_{rank}.json"))
    return left


def _errors() -> list[RankError]:
    """What ranks of this machine have left, the first cause first."""
    directory = os.environ.get(_ERRORS)
    if directory is None:
        return []
    found = [RankError(**json.loads(p.read_text("utf-8"))) for p in Path(directory).glob("rank_*.json")]
    return sorted(found, key=lambda e: (e.lost_peer, e.time))


# processes --------------------------------------------------------------------------------------------


def _own_command() -> list[str]:
    """The command that started this process, interpreter flags included: script, console script, `-m` or
    `-c`."""
    original, arguments = sys.orig_argv, sys.argv[1:]
    start = len(original) - len(sys.argv)  # where the script, the module's or the code's name stands
    if start < 1 or original[start + 1 :] != arguments:
        return [sys.executable, os.path.abspath(sys.argv[0]), *arguments]
    head, name = original[1:start], original[start]
    if not head or head[-1] not in ("-m", "-c"):
        name = os.path.abspath(name)
    return [sys.executable, *head, name, *arguments]


def _die_with(parent: int) -> Callable[[], None]:
    """To be run in a child: the kernel kills it when its parent dies, however that happens."""
    libc = ctypes.CDLL(None)

    def die() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return die


def _require_free_port() -> None:
    """A port that the user names must be free; an unnamed one is chosen so."""
    given = os.environ.get("MASTER_PORT")
    if given is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(given)))
        except OSError as error:
            raise PortInUseError(
                f"MASTER_PORT={given} is taken by another process ({error.strerror}); unset it to have a free"
                " one chosen, or name another"
            ) from error
