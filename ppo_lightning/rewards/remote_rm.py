"""`remote_rm`: a reward service. Each sample is POSTed to `--rm-url` as `{"prompt", "response", "label"}`;
the reply is a JSON number, or an object of which `--reward-key` names the number.

Connection errors, time-outs and the statuses 408, 429 and 5xx are tried again with growing pauses; any
other status, and a reply that is no such JSON, is a mistake that waiting does not mend, and raises at
once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ppo_lightning.rewards import RewardError

if TYPE_CHECKING:
    import httpx

    from ppo_lightning.samples import Sample

AGAIN = frozenset({408, 425, 429})
HEAD_CHARS = 200


class RemoteReward:
    """An HTTP client of one service. `seconds`: limit of one request; `attempts`: requests per sample in
    all; `concurrency`: requests under way at a time; `pause`: seconds before the second attempt, doubled
    each time up to 30."""

    def __init__(
        self,
        url: str,
        *,
        seconds: float = 120.0,
        attempts: int = 6,
        concurrency: int = 64,
        pause: float = 1.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--rm-url {url!r} is no address of a service: write http://host:port/path")
        self.url, self.seconds, self.attempts = url, seconds, attempts
        self.concurrency, self.pause = concurrency, pause

    async def score(self, samples: Sequence[Sample]) -> list[Any]:
        """The decoded replies, in order. RewardError names the service and its last answer."""
        async with self.session() as send:
            tasks = [asyncio.ensure_future(send(body_of(sample))) for sample in samples]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # the first error ends all
                    task.cancel()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Callable[[bytes], Awaitable[Any]]]:
        """A function that sends one body and returns the decoded reply; its calls share the connections."""
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        slots = asyncio.Semaphore(self.concurrency)
        async with httpx.AsyncClient(timeout=self.seconds, limits=limits) as client:
            yield partial(self._one, client, slots)

    async def _one(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, body: bytes) -> Any:
        import httpx
        import tenacity

        retry = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_exponential_jitter(initial=self.pause, max=30.0, jitter=self.pause),
            retry=tenacity.retry_if_exception_type((httpx.TransportError, TimeoutError, _Busy)),
            reraise=True,
        )
        async with slots:
            try:
                return await retry(self._request, client, body)
            except httpx.InvalidURL as error:
                raise RewardError(
                    f"remote_rm: {self.url} is no address of a service ({error}); check --rm-url"
                ) from error
            except (httpx.TransportError, TimeoutError, _Busy) as error:
                cause = str(error) or f"no reply within {self.seconds:g} s"
                kind = "" if isinstance(error, _Busy) else f"{type(error).__name__}: "
                raise RewardError(
                    f"remote_rm: {self.url} failed {self.attempts} times, last with {kind}{cause};"
                    " is the service up?"
                ) from error

    async def _request(self, client: httpx.AsyncClient, body: bytes) -> Any:
        # httpx limits each phase; a service that drips bytes would never meet that.
        async with asyncio.timeout(self.seconds):
            reply = await client.post(self.url, content=body, headers={"content-type": "application/json"})
        head = reply.text[:HEAD_CHARS]
        if reply.status_code in AGAIN or reply.status_code >= 500:
            raise _Busy(f"HTTP {reply.status_code}: {head!r}")
        if reply.status_code != 200:
            raise RewardError(
                f"remote_rm: {self.url} answered HTTP {reply.status_code}: {head!r}; check --rm-url"
            )
        try:
            return reply.json()
        except (ValueError, RecursionError) as error:  # JSON may be nested deeper than Python can follow
            raise RewardError(f"remote_rm: {self.url} answered no JSON that can be read: {head!r}") from error


def body_of(sample: Sample) -> bytes:
    """What is sent to the service."""
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    # ASCII with escapes: a lone surrogate in a response cannot be written as UTF-8.
    return json.dumps(payload, default=str).encode("ascii")


class _Busy(RuntimeError):
    """A status that may pass."""
