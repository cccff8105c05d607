"""Worker processes that score untrusted text under a time and a memory limit.

    shared().score("package.module:function", [(response, label), ...]) -> [Outcome, ...]

A worker is a fresh interpreter (no fork of a process that holds torch and its threads), started when first
needed. It reads JSON and answers JSON, so nothing but numbers and text crosses. A response that meets its
limit scores 0 and is marked; if it took the worker with it, the rest of its batch goes to a new one.
Workers end with their parent, whatever ends the parent. Any thread may call `score`; calls take turns.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ppo_lightning.rewards import Outcome, RewardError

MAX_RESPONSE_CHARS = 1 << 20  # only the end of a longer response is looked at
BATCH_ITEMS = 64
BATCH_CHARS = 1 << 22  # of one message
START_SECONDS = 120.0  # for an interpreter to start, or for a family's imports
WALL_FACTOR = 60.0  # wall time per CPU second after which a silent worker counts as stuck
MAX_WORKERS = 8
LOOK_SECONDS = 0.5  # between looks whether a call is still wanted

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from ppo_lightning.rewards.worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
# An idle worker needs no threads of its own; numeric libraries would start one per core.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUTF8": "1",
}


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    rows: deque[int] = field(default_factory=deque)  # sent and not yet answered
    received: bytes = b""  # a line that has not ended yet
    ready: bool = False  # the interpreter runs
    loaded: bool = False  # the reward of the present batch is imported
    deadline: float = 0.0  # wall time by which the next line must be there

    def lines(self) -> list[Any] | None:
        """Messages that have arrived; None when the worker is gone."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *complete, self.received = (self.received + data).split(b"\n")
        return [json.loads(line) for line in complete] if data else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was left unsent does not matter
                pipe.close()  # type: ignore[union-attr]


class _Job:
    """One call of `score`: what is asked, what is answered."""

    def __init__(self, target: str, pairs: Sequence[tuple[str, Any]], seconds: float, workers: int) -> None:
        self.target, self.pairs, self.seconds = target, pairs, seconds
        self.outcomes: list[Outcome | None] = [None] * len(pairs)
        self.open = len(pairs)
        self.chunks: deque[list[int]] = deque()
        size = max(1, min(BATCH_ITEMS, -(-len(pairs) // (2 * workers))))
        chunk: list[int] = []
        chars = 0
        for row, (response, _) in enumerate(pairs):
            if chunk and (len(chunk) == size or chars + len(response) > BATCH_CHARS):
                self.chunks.append(chunk)
                chunk, chars = [], 0
            chunk.append(row)
            chars += min(len(response), MAX_RESPONSE_CHARS)
        self.chunks.append(chunk)

    def message(self, rows: list[int]) -> bytes:
        pairs = [(self.pairs[row][0][-MAX_RESPONSE_CHARS:], self.pairs[row][1]) for row in rows]
        # ASCII with escapes: NUL, lone surrogates and line ends pass through unchanged.
        body = json.dumps({"target": self.target, "seconds": self.seconds, "pairs": pairs}, default=str)
        return body.encode("ascii") + b"\n"

    def answer(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome
        self.open -= 1


class Sandbox:
    """A pool of scoring processes. `workers`: the cores this rank may use; `memory_bytes`: address space of
    each."""

    def __init__(self, workers: int | None = None, memory_bytes: int = 1 << 30) -> None:
        self.workers = workers or default_workers()
        self.memory_bytes = memory_bytes
        self._pool: list[_Worker] = []
        self._lock = threading.Lock()
        # PR_SET_PDEATHSIG fires when the *thread* that started the child ends: one thread that lives as
        # long as we do.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-spawner")

    def score(
        self,
        target: str,
        pairs: Sequence[tuple[str, Any]],
        seconds: float = 0.5,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """Score each (response, label) with `target`, "package.module:function", in at most `seconds` of
        CPU time each.

        An error raised by the function raises RewardError here, with its traceback; so does `cancelled`,
        within a second of turning true.
        """
        if not pairs:
            return []
        with self._turn(cancelled):
            job = _Job(target, pairs, seconds, self.workers)
            try:
                self._run(job, cancelled)
            except BaseException:  # answers may be under way: no worker is in a known state
                self._stop()
                raise
        return [outcome or Outcome(0.0, True) for outcome in job.outcomes]

    def close(self) -> None:
        """End the workers; a later `score` starts new ones."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        while self._pool:
            self._pool.pop().kill()

    @contextlib.contextmanager
    def _turn(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        while not self._lock.acquire(timeout=LOOK_SECONDS):
            _go_on(cancelled)
        try:
            yield
        finally:
            self._lock.release()

    def _run(self, job: _Job, cancelled: Callable[[], bool]) -> None:
        while job.open:
            _go_on(cancelled)
            self._assign(job)
            if not self._pool:  # every worker was found dead
                continue
            with selectors.DefaultSelector() as selector:
                for worker in self._pool:
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
                waited = min(w.deadline for w in self._pool) - time.monotonic()
                events = selector.select(min(max(0.0, waited), LOOK_SECONDS))
            for key, _ in events:
                messages = key.data.lines()
                if messages is None:
                    self._lost(job, key.data)
                else:
                    self._take(job, key.data, messages)
            for worker in [w for w in self._pool if w.deadline < time.monotonic()]:
                self._lost(job, worker)

    def _assign(self, job: _Job) -> None:
        busy = sum(1 for w in self._pool if w.rows)
        while len(self._pool) < min(self.workers, busy + len(job.chunks)):
            self._pool.append(self._spawner.submit(self._start).result())
        for worker in [w for w in self._pool if not w.rows]:
            worker.deadline = time.monotonic() + START_SECONDS
            if worker.ready and job.chunks:
                self._send(job, worker, job.chunks.popleft())

    def _send(self, job: _Job, worker: _Worker, rows: list[int]) -> None:
        assert worker.process.stdin is not None
        worker.loaded = False
        try:
            worker.process.stdin.write(job.message(rows))
            worker.process.stdin.flush()
        except BrokenPipeError:  # ended while idle, by somebody else: nothing was lost
            job.chunks.appendleft(rows)
            self._remove(worker)
        else:
            worker.rows.extend(rows)

    def _take(self, job: _Job, worker: _Worker, messages: list[Any]) -> None:
        for message in messages:
            if message == "ready":
                worker.ready = True
            elif message == "loaded":
                worker.loaded = True
            elif len(message) == 3:
                raise RewardError(f"{job.target} failed on a response:\n{message[2]}")
            else:
                job.answer(worker.rows.popleft(), Outcome(message[0], len(message) == 2))
        worker.deadline = time.monotonic() + (job.seconds * WALL_FACTOR if worker.loaded else START_SECONDS)

    def _lost(self, job: _Job, worker: _Worker) -> None:
        """The worker ended or is stuck: its present response has met a limit, the others go elsewhere."""
        self._remove(worker)
        code = worker.process.returncode
        if not worker.rows and worker.ready:
            return
        if not worker.loaded:
            raise RewardError(
                f"a scoring process ended (code {code}) or stayed silent for {START_SECONDS:.0f} s before it"
                f" scored anything with {job.target}; its error is above"
            )
        job.answer(worker.rows.popleft(), Outcome(0.0, True))
        if worker.rows:
            job.chunks.appendleft(list(worker.rows))

    def _remove(self, worker: _Worker) -> None:
        self._pool.remove(worker)
        worker.kill()

    def _start(self) -> _Worker:
        command = [
            sys.executable,
            "-c",
            _BOOT,
            json.dumps(sys.path),
            str(os.getpid()),
            str(self.memory_bytes),
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **_ENVIRONMENT}
        )
        return _Worker(process, deadline=time.monotonic() + START_SECONDS)


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise RewardError("the scoring was given up")


def default_workers() -> int:
    """The cores of this process, shared with the ranks beside it; at least one, at most eight."""
    # torchrun sets the first; Lightning's own launcher, for one machine, only the second.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks))


_shared: Sandbox | None = None
_shared_lock = threading.Lock()


def shared() -> Sandbox:
    """The sandbox of this process."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Sandbox()
        return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _forget_after_fork() -> None:
    # The pipes belong to the parent, and its spawner thread does not exist here.
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


atexit.register(_close_shared)
os.register_at_fork(after_in_child=_forget_after_fork)
