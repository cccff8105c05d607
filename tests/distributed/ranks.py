"""Gloo ranks for tests: forked after everything is imported, so that a four-rank case takes seconds.

    def check(rank: int, world: int, x: float) -> float: ...
    results = run_ranks(check, 4, 0.5)

Every layout needs processes of its own (Megatron's groups cannot be formed twice), which is why ranks are
forked for each case and not kept.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ppo_lightning.megatron import cpu, model  # noqa: F401  (imported for the children)

PR_SET_PDEATHSIG = 1

torch.set_num_threads(1)  # a child forked from a process with OpenMP threads would wait for them for ever
cpu.install()


class RankError(AssertionError):
    """What the rank that failed first had to say."""


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 90, group: bool = True
) -> list[Any]:
    """[function(rank, world, *args) for every rank], each in a process with a gloo group over all of them.

    `group=False` leaves the group to the function: MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and
    WORLD_SIZE are set. The first exception of any rank, the death of one, or `timeout` seconds end all
    ranks and raise RankError. Results must be picklable.
    """
    context = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise copy every page that it inherits
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        store = str(Path(directory, "rendezvous")) if group else None
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world):
                reader, writer = context.Pipe(duplex=False)
                child = (function, args, rank, world, environment, store, timeout, writer, os.getpid())
                process = context.Process(target=_child, args=child, daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                pipes.append(reader)
            return _collect(processes, pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(
                f"ranks {sorted(waiting.values())} of {len(pipes)} gave no answer within {timeout:g} s"
            )
        failures: list[tuple[float, int, str]] = []
        while ready:
            for pipe in ready:
                rank = waiting.pop(pipe)
                failure = _receive(pipe, rank, processes[rank], results)
                if failure:
                    failures.append(failure)
            # a peer may tell of its loss before the one that is lost is seen to have ended
            ready = wait(list(waiting), 0.3) if failures and waiting else []
        if failures:
            _, rank, text = min(failures)  # the others fail because a peer is gone
            raise RankError(f"rank {rank} of {len(pipes)}:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _receive(
    pipe: Connection, rank: int, process: BaseProcess, results: dict[int, Any]
) -> tuple[float, int, str] | None:
    try:
        at, succeeded, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5)
        return 0.0, rank, f"died without a word, exit code {process.exitcode}"
    if not succeeded:
        return at, rank, value
    results[rank] = value
    return None


def _forget_groups() -> list[Any]:
    """Make the groups of the test process unknown in this child, and return them, to be kept: destroying one
    here waits for threads that only the parent has."""
    world = dist.distributed_c10d._world
    kept: list[Any] = [*vars(parallel_state).values(), *world.pg_map]
    for name, value in vars(parallel_state).copy().items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    parallel_state.destroy_model_parallel()
    torch._C._distributed_c10d._unregister_all_process_groups()
    dist.distributed_c10d._world = dist.distributed_c10d._World()
    dist.GroupMember.WORLD = None
    return kept


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world: int,
    environment: dict[str, str],
    store: str | None,
    timeout: float,
    writer: Connection,
    parent: int,
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.dump_traceback_later(max(1.0, timeout - 2), file=sys.__stderr__ or 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    inherited = _forget_groups()
    try:
        if store is not None:
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=limit)
        answer = (time.monotonic(), True, function(rank, world, *args))
        writer.send_bytes(pickle.dumps(answer))
        code = 0
    except BaseException:  # noqa: BLE001  (reported to the parent, which raises it)
        lines = traceback.format_exc().strip().split("\n")
        writer.send_bytes(pickle.dumps((time.monotonic(), False, "\n".join(lines[-30:]))))
        code = 1
    writer.close()
    assert inherited is not None
    if code == 0 and dist.is_initialized():
        with suppress(RuntimeError):  # a peer that has left already is no failure: every result is in
            dist.barrier()
    os._exit(code)  # nothing of the parent's clean-up may run here


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
