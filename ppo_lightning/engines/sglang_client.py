"""Generation by SGLang servers over HTTP: tokens in, tokens and log-probs out, lost requests sent again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import tenacity

from ppo_lightning.engines.base import EngineError, Finished, SamplingParams
from ppo_lightning.engines.sglang_control import error_text
from ppo_lightning.engines.sglang_server import answers, first_of
from ppo_lightning.samples import Sample, Status

if TYPE_CHECKING:
    from ppo_lightning.engines.sglang_plan import Plan

log = logging.getLogger(__name__)
GATEWAY_ERRORS = (502, 503, 504)  # no living worker, a server that is starting; a broken connection is 500


class LostRequest(Exception):
    """Nothing usable came back, and it is not the request's fault: send it again."""


@dataclass
class Model:
    """What bounds a request: a token outside of the vocabulary would kill the server."""

    vocabulary: int
    context: int


@dataclass
class Generator:
    """Sends requests to `url` from the loop thread. A request that a server lost is sent again and again
    while the server may still come back; `broken` tells when its keeper has given it up."""

    url: str
    workers: tuple[str, ...]  # the servers behind `url`: control calls go to them
    probed: tuple[
        str, ...
    ]  # those that nobody watches: they are asked for their health while a request waits
    model: Model
    plan: Plan
    broken: Callable[[], EngineError | None]
    retries: int = 0  # requests sent again, so far
    _in_flight: set[str] = field(default_factory=set)
    _aborting: bool = False
    _client: httpx.AsyncClient | None = None

    async def generate(
        self,
        samples: Sequence[Sample],
        params: SamplingParams,
        seeds: Sequence[int],
        version: int | None,
        finished: Finished | None = None,
    ) -> None:
        """Fill every sample once, and tell `finished` of it. `version` None takes answers of any weights. The
        first error ends all requests."""
        self._aborting = False
        gate = asyncio.Semaphore(self.plan.concurrency)

        async def one(sample: Sample, seed: int) -> None:
            body = request(sample, params, seed, self.model)
            async with gate:
                fill(sample, await self._answer(body, version), self.plan.keep_aborted)
            if finished is not None:
                finished(sample)

        try:
            async with asyncio.TaskGroup() as group:
                pulse = group.create_task(self._pulse())
                waiting = [group.create_task(one(s, seed)) for s, seed in zip(samples, seeds, strict=True)]
                await asyncio.gather(*waiting)
                pulse.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    async def _answer(self, body: dict[str, Any], version: int | None) -> dict[str, Any]:
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((LostRequest, httpx.TransportError)),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=5),
            stop=_StopAfterOutage(self.plan.start_limit),
            before_sleep=self._count,
        )
        try:
            async for attempt in attempts:
                with attempt:
                    return await self._send(body, version)
        except tenacity.RetryError as error:
            last = error.last_attempt.exception()
            limit = self.plan.start_limit
            raise EngineError(
                f"no usable answer from {self.url} for {limit:g} s: {type(last).__name__}: {last}"
            ) from last
        raise AssertionError("tenacity ends by an answer or an error")

    async def _send(self, body: dict[str, Any], version: int | None) -> dict[str, Any]:
        broken = self.broken()
        if broken is not None:
            raise broken
        if self._aborting:
            return UNSENT
        rid = uuid.uuid4().hex
        self._in_flight.add(rid)
        try:
            reply = await self.client.post("/generate", json=body | {"rid": rid})
        finally:
            self._in_flight.discard(rid)
        routed = self.url not in self.workers
        if reply.status_code in GATEWAY_ERRORS or (routed and reply.status_code == 500):
            raise LostRequest(f"{reply.status_code}: {error_text(reply)}")
        if reply.status_code == 400:
            raise ValueError(f"SGLang refuses the request: {error_text(reply)}")
        if reply.status_code != 200:
            raise EngineError(f"{self.url}/generate answered {reply.status_code}: {error_text(reply)}")
        answer: dict[str, Any] = reply.json()
        if answer["meta_info"]["finish_reason"]["type"] == "abort" and not self._aborting:
            raise LostRequest(f"the server gave it up: {answer['meta_info']['finish_reason']}")
        if version is not None and versions(answer) != [version]:
            raise LostRequest(f"written by weights {versions(answer)}, the trainer's are {version}")
        return answer

    @property
    def client(self) -> httpx.AsyncClient:
        if self._client is None:
            # no limit on reading: a long response is no fault, and the servers' health is watched elsewhere
            self._client = httpx.AsyncClient(
                base_url=self.url,
                timeout=httpx.Timeout(None, connect=10),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.plan.concurrency),
                trust_env=False,
            )
        return self._client

    async def abort(self) -> None:
        """End this client's requests; they come back with what was generated until then."""
        self._aborting = True
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            while self._aborting and self._in_flight:  # one that has not arrived yet is not known there
                for rid in tuple(self._in_flight):
                    for worker in self.workers:  # only one knows it, the others take no notice
                        await client.post(f"{worker}/abort_request", json={"rid": rid})
                await asyncio.sleep(0.05)

    async def healthy(self) -> bool:
        """Whether every server produces a token in time."""
        return all([await self._probe(worker) for worker in self.workers])

    async def _pulse(self) -> None:
        """End the requests when a server that nobody watches is silent for as long as one may need to
        start."""
        heard = dict.fromkeys(self.probed, time.monotonic())
        while True:
            await asyncio.sleep(self.plan.health_interval)
            for url in self.probed:
                if await self._probe(url):
                    heard[url] = time.monotonic()
                elif time.monotonic() - heard[url] > self.plan.start_limit:
                    raise EngineError(f"{url} has not answered for {self.plan.start_limit:g} s")

    async def _probe(self, url: str) -> bool:
        async with httpx.AsyncClient(timeout=self.plan.health_timeout, trust_env=False) as client:
            return await answers(client, f"{url}/health")

    def _count(self, state: tenacity.RetryCallState) -> None:
        self.retries += 1
        if self.retries & (self.retries - 1) == 0:  # 1, 2, 4, 8, ...: an outage loses many at once
            error = state.outcome.exception() if state.outcome else None
            log.warning("%s: request sent again (%d so far): %s", self.url, self.retries, error)


class _StopAfterOutage(tenacity.stop.stop_base):
    """Gives up `limit` seconds after the first failure, however long the answer before it had taken."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since: float | None = None

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since >= self._limit


def request(sample: Sample, params: SamplingParams, seed: int, model: Model) -> dict[str, Any]:
    """The body of one request. Raises ValueError for a prompt that no server could take."""
    prompt = sample.tokens
    if not prompt:
        raise ValueError(f"sample {sample.index} has an empty prompt; give it at least one token")
    if not 0 <= min(prompt) <= max(prompt) < model.vocabulary:
        raise ValueError(
            f"sample {sample.index} has a token outside of the {model.vocabulary} of the vocabulary"
        )
    room = model.context - len(prompt)
    if room < 1:
        raise ValueError(
            f"the prompt of sample {sample.index} has {len(prompt)} tokens and leaves no room for a response"
            f" in a context of {model.context}: drop it (--rollout-max-prompt-len) or take another model"
        )
    sampling = {
        "max_new_tokens": min(params.max_new_tokens, room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": seed,
    }
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def versions(answer: dict[str, Any]) -> list[int | str]:
    """The versions of the weights that wrote an answer, oldest first; one that is no number as it stands."""
    spans = answer["meta_info"].get("weight_versions") or [{"version": answer["meta_info"]["weight_version"]}]
    found = dict.fromkeys(str(span["version"]) for span in spans)
    return [int(v) if v.isdecimal() else v for v in found]


def fill(sample: Sample, answer: dict[str, Any], keep_aborted: bool) -> None:
    """Write an answer into its sample. Raises EngineError if it contradicts itself."""
    output, meta = answer["output_ids"], answer["meta_info"]
    scored = meta.get("output_token_logprobs") or []
    if [token for _, token, _ in scored] != output:
        raise EngineError(f"sample {sample.index}: SGLang's log-probs are of other tokens than its output")
    log_probs = [math.nan if value is None else float(value) for value, _, _ in scored]
    if not all(map(math.isfinite, log_probs)):
        raise EngineError(
            f"sample {sample.index}: SGLang returned a log-prob that is not finite: {log_probs}"
        )
    reason = meta["finish_reason"]["type"]
    dropped = reason == "abort" and not (keep_aborted and output)
    if dropped:
        output, log_probs = [], []
    sample.tokens = sample.tokens + output
    sample.response = "" if dropped else answer["text"]
    sample.response_length = len(output)
    sample.rollout_log_probs = log_probs
    sample.status = Status.FAILED if dropped else STATUS[reason]
    sample.weight_versions = [v for v in versions(answer) if isinstance(v, int)]


UNSENT: dict[str, Any] = {  # the answer to a request that an abort came before
    "output_ids": [],
    "text": "",
    "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "none"},
}
STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
