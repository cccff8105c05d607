"""Scores of responses while others are still being written.

Only what runs elsewhere and depends on nothing but what it is sent may be asked early: sandboxed rewards
(worker processes) and `remote_rm` (a service). A score counts only if the sample is still what was sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from ppo_lightning.background import LoopThread
from ppo_lightning.rewards import Reward
from ppo_lightning.rewards.remote_rm import RemoteReward, body_of

if TYPE_CHECKING:
    from ppo_lightning.samples import Sample

UNKNOWN = object()  # the answer where the workers had none: they are asked again when it is needed


class EarlyScores:
    """The scores of one draw. `add` may come from any thread; `complete` or `close` ends all threads."""

    def __init__(self, reward: Reward | RemoteReward) -> None:
        self._asker = _Workers(reward) if isinstance(reward, Reward) else _Service(reward)
        # the sample is held: its id must not go to another one
        self._asked: dict[int, tuple[Sample, bytes, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @staticmethod
    def fits(reward: Any) -> bool:
        return (isinstance(reward, Reward) and reward.sandboxed) or type(reward) is RemoteReward

    def add(self, sample: Sample) -> None:
        """Begin to score `sample`, which is not failed."""
        with self._lock:
            if self._closed:
                return
            try:
                body = body_of(sample)
            except (TypeError, ValueError):  # cannot be sent: an error when it is scored with the rest
                return
            self._asked[id(sample)] = (sample, body, self._asker.ask(sample, body))

    def complete(self, samples: Sequence[Sample], score: Callable[[list[Sample]], list[Any]]) -> list[Any]:
        """A score of each sample, in order: what was begun is waited for, `score` gives the rest. Raises the
        first error of a service at once."""
        begun = {}
        for row, sample in enumerate(samples):
            _, body, future = self._asked.get(id(sample), (None, None, None))
            if future is not None and not future.cancelled() and body == body_of(sample):
                begun[row] = future
        for future in wait(begun.values(), return_when=FIRST_EXCEPTION).done:
            future.result()
        known = {row: future.result() for row, future in begun.items()}
        self.close()  # of the others no score is wanted
        rest = [row for row in range(len(samples)) if known.get(row, UNKNOWN) is UNKNOWN]
        if rest:
            known |= zip(rest, score([samples[row] for row in rest]), strict=True)
        return [known[row] for row in range(len(samples))]

    def close(self) -> None:
        """Give up what is under way; idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            for _, _, future in self._asked.values():
                future.cancel()
            self._asker.close()


class _Workers:
    """Asks the sandbox for all that has come since its last answer, so that a call is worth its while."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._waiting: deque[tuple[tuple[str, Any], Future[Any]]] = deque()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="early-reward")

    def ask(self, sample: Sample, body: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append(((sample.response, sample.label), future))
        self._pool.submit(self._answer)
        return future

    def _answer(self) -> None:
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        batch = [(pair, future) for pair, future in batch if future.set_running_or_notify_cancel()]
        outcomes: Sequence[Any] = [UNKNOWN] * len(batch)
        try:
            outcomes = self._reward.batch([pair for pair, _ in batch], self._closed.is_set)
        except Exception:  # noqa: BLE001 - the call that needs the scores meets it again
            return
        finally:
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                future.set_result(outcome)

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)


class _Service:
    """Sends each request at once, as many at a time as the service takes."""

    def __init__(self, reward: RemoteReward) -> None:
        self._reward = reward
        self._loop = LoopThread("early-reward")
        self._stack = AsyncExitStack()
        self._opening: asyncio.Future[Any] | None = None

    def ask(self, sample: Sample, body: bytes) -> Future[Any]:
        return self._loop.spawn(self._send(body))

    async def _send(self, body: bytes) -> Any:
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._stack.enter_async_context(self._reward.session()))
        send = await asyncio.shield(self._opening)
        return await send(body)

    def close(self) -> None:
        try:
            self._loop.run(self._stack.aclose())
        finally:
            self._loop.stop()
