"""Rollouts by SGLang servers: own ones, started by the ranks, or ones that run already."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ppo_lightning.background import LoopThread
from ppo_lightning.engines.base import EngineError, Finished, SamplingParams
from ppo_lightning.engines.sglang_checksums import Layout
from ppo_lightning.engines.sglang_client import Generator, Model
from ppo_lightning.engines.sglang_control import TransferError
from ppo_lightning.engines.sglang_fleet import Fleet
from ppo_lightning.engines.sglang_plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from ppo_lightning.config import PPOConfig
    from ppo_lightning.samples import Sample

R = TypeVar("R")
Share = Callable[[Any], list[Any]]


class SGLangEngine:
    """One object per rank. The rank that owns an engine starts its server and controls it; every rank sends
    its own requests, through a router where there are several engines. A server that dies or hangs is
    started again with the current weights and its requests are sent again, each sample being filled once.

    `share` gathers an object of every rank into a list, in rank order (`strategy.gather_objects`); the
    constructor, `update_weights` and `sleep` call it, so they must be called on all ranks alike. SGLang
    promises no reproducible draws; `seeds` are passed on for servers started with
    --enable-deterministic-inference. Raises EngineError, on all ranks alike, when servers cannot be started
    or do not take weights."""

    def __init__(self, plan: Plan, rank: int = 0, world: int = 1, share: Share | None = None) -> None:
        if world > 1 and share is None:
            raise ValueError("several ranks need `share`, a gather of objects over all of them")
        self._share: Share = share or (lambda own: [own])
        self._closed = False
        self._loop = LoopThread("sglang-engine")
        config = text_config(plan.checkpoint, trust_remote_code="--trust-remote-code" in plan.arguments)
        layout = Layout(
            plan.ranks_per_engine, config.num_key_value_heads, served_dtype(plan, config), not plan.cpu
        )
        self._fleet = Fleet(plan, rank, self._loop, layout) if owns(plan, rank) else None
        atexit.register(self.close)
        try:
            urls = [url for part in self._agree(self._start) for url in part or ()]
            router = self._agree(lambda: self._route(urls) if rank == 0 else None)[0]
            context = self._agree(lambda: self._context() if rank == 0 else 0)[0] or 0
        except BaseException:
            self.close()
            raise
        self._generator = Generator(
            url=router or urls[0],
            workers=tuple(urls),
            probed=plan.urls,
            model=Model(config.vocab_size, context),
            plan=plan,
            broken=lambda: None if self._fleet is None else self._fleet.broken,
        )
        self.version: int | None = None if plan.urls else 0

    @classmethod
    def from_config(
        cls, config: PPOConfig, rank: int = 0, world: int = 1, share: Share | None = None
    ) -> SGLangEngine:
        return cls(Plan.from_config(config, world, cuda=torch.cuda.is_available()), rank, world, share)

    # ---- the contract --------------------------------------------------------------------------------------

    def generate(
        self,
        samples: Sequence[Sample],
        params: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> None:
        """See `Engine.generate`; `finished` is called from the engine's loop thread."""
        self._loop.run(self._generator.generate(samples, params, seeds, self.version, finished))

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        def work() -> None:
            if self._fleet is not None:
                self._fleet.update(tensors, version)
            for _ in tensors:  # collective: the others wait for this rank
                pass

        self._agree(work)
        self.version = version

    def sleep(self) -> None:
        self._share(None)  # SGLang must be idle: no rank may still wait for a response
        if self._fleet is not None and not self._fleet.asleep:
            self._fleet.sleep()

    def wake(self) -> None:
        if self._fleet is not None and self._fleet.asleep:
            self._fleet.wake()

    def health(self) -> bool:
        return not self._closed and self._loop.run(self._generator.healthy())

    def abort(self) -> None:
        """End the requests of this rank's running `generate`, from another thread. What they have written
        is kept (`aborted`) or dropped (`failed`), as configured (`--keep-aborted-samples` keeps it)."""
        self._loop.run(self._generator.abort())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._loop.stop()
        if self._fleet is not None:
            self._fleet.close()

    # ---- parts ---------------------------------------------------------------------------------------------

    def _agree(self, work: Callable[[], R]) -> list[R]:
        """Do `work` here, and raise its EngineError on every rank."""
        result: R | None = None
        failure: str | None = None
        try:
            result = work()
        except EngineError as error:
            failure = str(error)
        outcomes = self._share((result, failure))
        failures = dict.fromkeys(why for _, why in outcomes if why is not None)
        if failures:
            raise EngineError("\n".join(failures))
        return [each for each, _ in outcomes]

    def _start(self) -> list[str]:
        if self._fleet is None:
            return []
        self._fleet.start()
        return [served.url for served in self._fleet.servers]

    def _route(self, urls: list[str]) -> str | None:
        return self._fleet.route(urls) if self._fleet is not None and len(urls) > 1 else None

    def _context(self) -> int:
        assert self._fleet is not None  # rank 0 always owns an engine
        try:
            return int(self._fleet.servers[0].control.get("/v1/models")["data"][0]["max_model_len"])
        except TransferError as error:
            raise EngineError(str(error)) from error


def owns(plan: Plan, rank: int) -> bool:
    return rank == 0 if plan.urls else rank in {place.owner for place in plan.places}


def text_config(checkpoint: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).get_text_config()


def served_dtype(plan: Plan, config: Any) -> torch.dtype:
    """The type in which the servers hold weights: their --dtype, last one given, else the checkpoint's."""
    named = [b for a, b in zip(plan.arguments, plan.arguments[1:]) if a == "--dtype"] or ["auto"]
    short = {"half": "float16", "float": "float32"}
    name = short.get(named[-1], named[-1])
    found = config.dtype if name == "auto" else getattr(torch, name)
    return found if isinstance(found, torch.dtype) else torch.float32
