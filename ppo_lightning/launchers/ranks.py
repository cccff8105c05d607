"""The further ranks of a machine: the user's command runs again for each, and all end together.

Imports no torch and no Lightning: the command line starts the ranks before it imports those, so that all
import at the same time. `LocalLauncher` takes them over, or starts them itself for a script that never came
by here.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ppo_lightning.launchers.rank_errors import DIRECTORY, RankError, left_behind

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

POLL = 0.2  # seconds
GRACE = 10.0  # seconds that a rank has to come out of a collective, or to end after a signal
_PR_SET_PDEATHSIG = 1
# whoever sets one of these starts the ranks, or may do so: torchrun, Ray, SLURM, LSF
_STARTED_OUTSIDE = ("LOCAL_RANK", "RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "JSM_NAMESPACE_SIZE")


class PortInUseError(RuntimeError):
    """The port given for the ranks to meet at is taken."""


class OtherRanks:
    """Ranks 1 to `per_node` - 1 of this machine. They are killed with this process; one that fails ends all,
    also while the main thread is in a collective or an import."""

    def __init__(self, per_node: int, meeting: Mapping[str, str], port: socket.socket | None = None) -> None:
        self.meeting = dict(meeting)  # what all ranks find in their environment
        self.ending = threading.Event()  # the main thread is dealing with an error
        self.processes: list[subprocess.Popen[bytes]] = []
        self.taken = False  # by a launcher
        self._port, self._per_node = port, per_node
        self._directory = ""

    def start(self, *, deaf: bool = False) -> None:
        """Start them. `deaf` ones do not hear Ctrl-C until they have a handler for it: while Python starts,
        each would print a traceback."""
        self._directory = os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="ppo-lightning-")
        atexit.register(self._join)
        command, prepare = own_command(), _prepare(os.getpid(), deaf)
        for rank in range(1, self._per_node):
            environment = os.environ | self.meeting | {"LOCAL_RANK": str(rank)}
            self.processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=prepare)
            )
        self._notice_interrupts()
        threading.Thread(target=self._watch, name="rank-watcher", daemon=True).start()

    def release_port(self) -> None:
        """The first rank is about to listen there."""
        if self._port is not None:
            self._port.close()

    def dead(self) -> RankError | None:
        """A rank that ended before it could say anything."""
        said = {e.rank for e in left_behind()}
        for rank, child in enumerate(self.processes, start=1):
            code = child.poll()
            if code is not None and code < 0 and rank not in said:
                name = signal.Signals(-code).name
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                return RankError(rank, time.time(), f"process {child.pid} was killed by {name}{hint}", False)
            if code not in (None, 0, 130) and rank not in said:
                text = f"process {child.pid} ended with exit code {code}; what it printed is above"
                return RankError(rank, time.time(), text, False)
        return None

    def end(self, first_signal: int) -> None:
        """Ask, wait, insist; nothing is left running."""
        for child in self.processes:
            if child.poll() is None:
                child.send_signal(first_signal)
        deadline = time.monotonic() + GRACE / 2
        for child in self.processes:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.processes:
            child.kill()
            child.wait()

    def drop(self) -> None:
        """End ranks that have no part in anything yet."""
        self.ending.set()
        self.release_port()
        self.end(signal.SIGKILL)

    def _watch(self) -> None:
        """End everything when a child fails and the main thread does not notice, as in a collective."""
        while True:
            time.sleep(POLL)
            codes = [p.poll() for p in self.processes]
            if all(code == 0 for code in codes):
                return
            if any(code not in (None, 0) for code in codes):
                break
        if self.ending.wait(GRACE):
            return  # the main thread has its own error in hand, and ends the others
        first = self.dead() or next(iter(left_behind()), None)
        sys.stderr.write(f"{first or 'a rank has ended'}\nAll ranks are ended.\n")
        sys.stderr.flush()
        self.end(signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(130 if first is None and 130 in codes else 1)

    def _join(self) -> None:
        """At the end of the script: children would be killed if the parent left before them."""
        deadline = time.monotonic() + (0.0 if self.ending.is_set() else 60.0)
        for child in self.processes:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        if not self.ending.is_set() and (first := next(iter(left_behind()), None)) is not None:
            print(f"error: {first}", file=sys.stderr)  # after the first rank's own good end
        self.end(signal.SIGTERM)
        shutil.rmtree(self._directory, ignore_errors=True)

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
            if number[0] in (signal.SIGINT, signal.SIGTERM) and not self.ending.wait(GRACE):
                sys.stderr.write("interrupted inside a collective: all ranks are ended\n")
                self.end(signal.SIGKILL)
                os._exit(128 + number[0])


# before the imports -----------------------------------------------------------------------------------

_early: OtherRanks | None = None  # those of the command that runs


@contextmanager
def started_early(config: PPOConfig) -> Iterator[None]:
    """Start the further ranks of the resolved `config` now, where they are this process's to start. Those
    that no launcher has taken over are gone after the block."""
    global _early
    cluster = config.cluster
    per_node, nodes = cluster.actor_num_gpus_per_node or 1, cluster.actor_num_nodes
    if cluster.launcher != "local" or per_node == 1 or _may_be_started_outside():
        yield
        return
    port = reserve_port()
    meeting = {  # as Lightning's own environment has it
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": str(port.getsockname()[1]),
        "NODE_RANK": os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")),
        "WORLD_SIZE": str(per_node * nodes),
    }
    ranks = _early = OtherRanks(per_node, meeting, port)
    try:
        ranks.start(deaf=True)
        yield
    finally:
        _early = None
        if not ranks.taken:
            ranks.drop()


def take_early() -> OtherRanks:
    """The ranks that were started early and are not taken yet, perhaps none; they are the caller's then."""
    if _early is None or _early.taken:
        return OtherRanks(1, {})
    _early.taken = True
    return _early


def _may_be_started_outside() -> bool:
    return any(name in os.environ for name in _STARTED_OUTSIDE) or find_spec("mpi4py") is not None


# processes --------------------------------------------------------------------------------------------


def own_command() -> list[str]:
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


def _prepare(parent: int, deaf: bool) -> Callable[[], None]:
    """To be run in a child: the kernel kills it when its parent dies, however that happens."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    return prepare


def reserve_port() -> socket.socket:
    """Hold the port at which the ranks will meet, MASTER_PORT or a free one, so that nobody else takes it
    meanwhile. A port that the user names must be free."""
    given = os.environ.get("MASTER_PORT", "0")
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        port.bind(("", int(given)))
    except OSError as error:
        port.close()
        raise PortInUseError(
            f"MASTER_PORT={given} is taken by another process ({error.strerror}); unset it to have a free"
            " one chosen, or name another"
        ) from error
    return port
