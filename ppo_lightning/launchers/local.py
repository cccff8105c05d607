"""One machine, one process a rank: the user's command runs again for every further rank, and all end
together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from ppo_lightning.launchers.rank_errors import RankError, RankFailedError, leave, left_behind
from ppo_lightning.launchers.ranks import GRACE, POLL, OtherRanks, reserve_port, take_early

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import ClusterEnvironment


class LocalLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher whose ranks live and die together.

    Takes over the ranks that the command line has started already. Children are killed with their parent. A
    rank that fails ends all within seconds, and the first error is the one that is raised. Ctrl-C ends all
    ranks with exit code 130. Recognises ranks that torchrun or SLURM started.
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._rank = 0
        self._others = OtherRanks(1, {})  # none, except in the rank that owns them

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the other ranks, if they are ours to start, and run `function` as this one."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if not self.procs:
            self._gather()
        self._rank = environment.local_rank()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._end(signal.SIGINT)
            raise SystemExit(130) from None
        except Exception as error:
            self._others.ending.set()
            first = self._first_error(error)
            self._end(signal.SIGTERM)
            if first is None or first.rank == self._rank:
                raise
            if self._rank > 0:
                raise SystemExit(1) from None  # rank 0 shows it
            raise RankFailedError(str(first)) from None
        except BaseException:  # an exit by the user or by a signal: no reason to wait for the others
            self._others.ending.set()
            raise

    def kill(self, signum: int) -> None:
        """Lightning's handler of SIGTERM calls this on a rank that got the signal, and would then enter a
        broadcast that the other ranks may never join: leave at once instead. SLURM that requeues a job sends
        the signal first and wants it ignored."""
        if signum == signal.SIGTERM and not getattr(self.cluster_environment, "auto_requeue", False):
            self._end(signal.SIGTERM)
            raise SystemExit(128 + signum)

    def _gather(self) -> None:
        """Take over the ranks that are there if they are what this Trainer wants, else start those."""
        early, environment = take_early(), self.cluster_environment
        if environment.creates_processes_externally or self.num_processes == 1:
            early.drop()
            return
        if early.processes:
            os.environ.setdefault("MASTER_PORT", early.meeting["MASTER_PORT"])
        meeting = {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        if len(early.processes) == self.num_processes - 1 and early.meeting == meeting:
            self._others = early
            early.release_port()
        else:
            early.drop()
            reserve_port().close()  # one that the user names must be free
            self._others = OtherRanks(self.num_processes, meeting)
            self._others.start()
        self.procs = self._others.processes
        os.environ |= meeting | {"LOCAL_RANK": "0"}

    def _end(self, first_signal: int) -> None:
        self._others.ending.set()
        self._others.end(first_signal)

    def _first_error(self, error: BaseException) -> RankError | None:
        """The error that came first anywhere; waits for it where `error` only says that another rank is
        gone."""
        mine = leave(self._rank, error)
        deadline = time.monotonic() + (GRACE if mine.lost_peer else 0.0)
        while True:
            causes = [e for e in [*left_behind(), self._others.dead()] if e is not None and not e.lost_peer]
            if causes or time.monotonic() > deadline:
                break
            time.sleep(POLL)
        first = min(causes or [mine], key=lambda e: e.time)
        return mine if first.message == mine.message else first  # one cause, raised on every rank
