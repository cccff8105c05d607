"""The servers that one rank controls: started, watched, started again, given weights, put to sleep."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import httpx
from safetensors import SafetensorError

from ppo_lightning.background import LoopThread
from ppo_lightning.engines.base import EngineError
from ppo_lightning.engines.sglang_checksums import Layout
from ppo_lightning.engines.sglang_control import Control, TransferError
from ppo_lightning.engines.sglang_plan import Plan, router_arguments
from ppo_lightning.engines.sglang_served import Served
from ppo_lightning.engines.sglang_server import (
    POLL,
    ServerProcess,
    answers,
    first_of,
    wait_for,
)
from ppo_lightning.engines.transfer import make_transfer
from ppo_lightning.engines.weight_store import Bucket, WeightStore, buckets

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
MAX_RESTARTS = 3  # of one engine between two weight updates; more is no accident
RETRY_WAITS = (1.0, 4.0)  # seconds before a failed update is sent again
Failures: TypeAlias = "dict[str, Exception | None]"  # by the server's address
CONTROL_LIMIT = 600.0  # seconds of one control call: loading from disk is the longest


class Fleet:
    """Owns processes, their control connections and the copy of the weights they serve. `version` is None
    until the first update. All but `start` and the watch runs on the caller's thread."""

    def __init__(self, plan: Plan, rank: int, loop: LoopThread, layout: Layout) -> None:
        self._plan, self._loop = plan, loop
        self._layout = layout if plan.check_equal else None
        self.version: int | None = None
        self.broken: EngineError | None = None
        self.asleep = False
        self._restarts = 0
        self._lock = threading.Lock()  # whoever changes what the servers are: an update, a sleep, a restart
        self._store = WeightStore(plan.checkpoint, plan.weights_dir)
        self._router: ServerProcess | None = None
        self.servers = [self._served(None, url) for url in plan.urls if rank == 0]
        if not plan.urls:
            mine = [e for e, place in enumerate(plan.places) if place.owner == rank]
            self.servers += [self._own(e) for e in mine]

    def _own(self, engine: int) -> Served:
        plan = self._plan
        arguments = [*plan.arguments, "--skip-server-warmup"]  # `ready` asks for a token instead
        if not plan.cpu:
            arguments += ["--base-gpu-id", str(plan.places[engine].first_gpu)]
        file, limit = plan.log(f"engine_{engine}"), plan.health_timeout
        process = ServerProcess("server", plan.host, arguments, file, plan.cpu, health_timeout=limit)
        return self._served(process, process.url)

    def _served(self, process: ServerProcess | None, url: str) -> Served:
        control = Control(url, self._plan.ranks_per_engine, CONTROL_LIMIT)
        transfer = make_transfer(self._plan.mode, control, not self._plan.cpu)
        return Served(process, control, transfer, self._store, self._layout)

    # ---- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All servers up and answering. Raises EngineError with the end of a log."""
        self._loop.run(self._start_all())
        self._loop.spawn(self._watch())

    async def _start_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for served in self.servers:
                    group.create_task(self._up(served))
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    async def _up(self, served: Served) -> None:
        if served.process is not None:
            await self._boot(served.process, self.version)
            return
        await wait_for(served.url, self._plan.start_limit)
        try:
            await asyncio.to_thread(served.check_ranks)
        except TransferError as error:
            raise EngineError(str(error)) from error

    async def _boot(self, process: ServerProcess, version: int | None) -> None:
        """Start a server with the weights of `version`, whole from its first answer on."""
        model = self._plan.checkpoint if version is None else str(self._store.path(version))
        process.start("--model-path", model, "--weight-version", str(version or 0))
        await process.ready(self._plan.start_limit, "/ready")
        await process.ready(self._plan.start_limit, "/health")

    def route(self, urls: list[str]) -> str:
        """Start the router in front of `urls`; its address."""
        plan = self._plan
        flags = router_arguments(urls, plan.host)
        self._router = ServerProcess("router", plan.host, flags, plan.log("router"), plan.cpu)
        self._loop.run(self._boot_router(self._router))
        return self._router.url

    async def _boot_router(self, router: ServerProcess) -> None:
        router.start()
        await router.ready(self._plan.start_limit, "/readiness")

    def close(self) -> None:
        """Call it after the loop has ended: nothing starts anything any more."""
        for process in [s.process for s in self.servers] + [self._router]:
            if process is not None:
                process.kill()
        for served in self.servers:
            if served.process is None:
                served.transfer.end()
            served.control.close()
        self._store.close()

    # ---- the watch, on the loop thread
    # -----------------------------------------------------------------------

    async def _watch(self) -> None:
        probed = time.monotonic()
        while self.broken is None:
            await asyncio.sleep(POLL)
            if not self._lock.acquire(blocking=False):
                continue
            try:
                due = time.monotonic() - probed > self._plan.health_interval
                await self._look(probe=due)
                probed = time.monotonic() if due else probed
            except Exception as error:  # noqa: BLE001 - `generate` raises it
                lost = f"nobody watches the SGLang servers any more: {error!r}"
                self.broken = error if isinstance(error, EngineError) else EngineError(lost)
                log.error("%s", self.broken)
            finally:
                self._lock.release()

    async def _look(self, probe: bool) -> None:
        for served in self.servers if not self.asleep else ():
            if served.process is None:
                await self._look_at_external(served, probe)
            elif served.dead:
                await self._restart(served, served.process, "ended")
            elif probe and not await self._healthy(served.url):
                limit = self._plan.health_timeout
                await self._restart(served, served.process, f"did not answer within {limit:g} s")
        router = self._router  # last: it is ready when a server is
        if router is not None and not (
            router.alive() and (not probe or await self._healthy(router.url, "/liveness"))
        ):
            log.warning("the SGLang router ended or hangs, and is started again%s", router.tail())
            await self._boot_router(router)

    async def _restart(self, served: Served, process: ServerProcess, why: str) -> None:
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            process.kill()
            raise EngineError(f"an SGLang server {why} after {MAX_RESTARTS} restarts{process.tail()}")
        log.warning("the SGLang server at %s %s and is started again%s", process.url, why, process.tail())
        process.kill()  # before the next line asks it anything
        served.transfer.reset()
        try:
            await self._boot(process, self.version)
        except EngineError as error:  # its port may have been taken for a moment: the next look tries again
            log.warning("%s", error)

    async def _healthy(self, url: str, path: str = "/health") -> bool:
        async with httpx.AsyncClient(timeout=self._plan.health_timeout, trust_env=False) as client:
            return await answers(client, f"{url}{path}")

    async def _look_at_external(self, served: Served, probe: bool) -> None:
        """One that its keeper has started again has lost the weights."""
        if not probe or self.version is None:
            return
        try:
            serves = (await asyncio.to_thread(served.control.get, "/model_info")).get("weight_version")
            if serves != str(self.version):
                log.warning(
                    "%s serves weights %s instead of %s: sent again", served.url, serves, self.version
                )
                await asyncio.to_thread(served.replay, self.version, self._plan.bucket_size)
        except TransferError as error:
            log.warning("%s: %s", served.url, error)

    # ---- weights -------------------------------------------------------------------------------------------

    def update(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Give every server the weights, draining `tensors` whatever happens. Raises EngineError, the
        servers being back at the former version, when sending them again did not help."""
        with self._lock:
            stream = self._store.record(version, buckets(tensors, self._plan.bucket_size))
            try:
                failures = self._first_pass(stream, version)
            except (OSError, SafetensorError) as error:
                for _ in tensors:
                    pass
                raise EngineError(
                    f"weights {version} could not be written to {self._store.root}: {error}; make room there,"
                    f" or name another --update-weight-disk-dir; {self._go_back()}"
                ) from error
            for wait in RETRY_WAITS:
                if not failures:
                    break
                log.warning("weights %d are sent again: %s", version, "; ".join(map(str, failures.values())))
                time.sleep(wait)
                failures = self._attempt(failures, version)
            if failures:
                told = "; ".join(map(str, failures.values()))
                raise EngineError(f"weights {version} did not reach the engine: {told}; {self._go_back()}")
            self.version, self._restarts = version, 0
            self._store.keep_only(version)

    def _first_pass(self, stream: Iterator[Bucket], version: int) -> Failures:
        failures: Failures = {}

        def each(step: Callable[[Served], None]) -> None:
            for served in self.servers:
                if served.url in failures:
                    continue
                try:
                    step(served)
                except TransferError as error:
                    failures[served.url] = error

        each(lambda served: served.begin(version))
        for bucket in stream:
            each(lambda served, bucket=bucket: served.transfer.send(bucket))  # type: ignore[misc]
        each(lambda served: served.finish(version))
        return failures

    def _attempt(self, before: Failures, version: int | None) -> Failures:
        """Bring the servers that failed `before` to a stored version; those that fail again."""
        failures: Failures = {}
        for served in [s for s in self.servers if s.url in before]:
            error = before[served.url]
            silent = isinstance(error, TransferError) and not error.answered
            try:
                if served.process is not None and (version is None or served.dead or silent):
                    served.process.kill()
                    served.transfer.reset()
                    self._loop.run(self._boot(served.process, version))
                elif version is not None:
                    if silent:  # somebody else starts it again: that takes as long as our own start may
                        self._loop.run(wait_for(served.url, self._plan.start_limit))
                    served.replay(version, self._plan.bucket_size)
            except (TransferError, EngineError) as again:
                failures[served.url] = again
        return failures

    def _go_back(self) -> str:
        failures = self._attempt(dict.fromkeys(s.url for s in self.servers), self.version)
        if failures or (self.version is None and self._plan.urls):
            return "nor could the former ones be restored"
        return f"it serves weights {self.version or 0} again"

    # ---- memory --------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        with self._lock:
            self.asleep = True
            for served in self.servers:
                if served.process is not None and not served.dead and not served.process.released:
                    self._call(served, "/release_memory_occupation")
                    served.process.released = True

    def wake(self) -> None:
        with self._lock:
            for served in self.servers:
                if served.process is None:
                    continue
                if served.dead:
                    self._loop.run(self._restart(served, served.process, "ended while it slept"))
                if served.process.released:
                    self._call(served, "/resume_memory_occupation")
                    served.process.released = False
            self.asleep = False

    def _call(self, served: Served, path: str) -> None:
        try:
            served.control.post(path)
        except TransferError as error:
            tail = "" if served.process is None else served.process.tail()
            raise EngineError(f"{error}{tail}") from error
