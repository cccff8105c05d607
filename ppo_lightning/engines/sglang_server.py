"""Processes of SGLang, its servers and its router: started, watched, ended. None outlives the engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from ppo_lightning.engines.base import EngineError
from ppo_lightning.engines.sglang_cpu import PARENT

POLL = 0.25  # seconds between looks at a process or a server that is starting
TAIL = 30  # lines of a log that an error shows


class ServerProcess:
    """One server or router of this machine, at an address that it keeps over restarts. `kind` is "server" or
    "router", `arguments` its flags without host and port. Not thread-safe; `start` belongs on the loop
    thread."""

    def __init__(
        self,
        kind: str,
        host: str,
        arguments: Sequence[str],
        log: Path,
        cpu: bool,
        port: int = 0,
        *,
        health_timeout: float = 30.0,
    ) -> None:
        self.kind, self.host, self.log, self.cpu = kind, host, log, cpu
        self.health_timeout = health_timeout
        self.arguments = tuple(arguments)
        self.port = port or free_port(host)
        self.released = False  # memory given back until the engine wakes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, *more: str) -> None:
        """Start it, with flags beside its own; a former process is ended first."""
        self.kill()
        entry = [sys.executable, "-m", "ppo_lightning.engines.sglang_cpu", self.kind]
        address = ["--host", self.host, "--port", str(self.port)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [*entry, *address, *self.arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is the trainer's; it ends its servers itself
            )
        self.released = False

    def _environment(self) -> dict[str, str]:
        # a rank's place among the trainers means nothing to a server, and SGLang would take some of it for
        # its own
        ours = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "NODE_RANK",
            "MASTER_ADDR",
        )
        kept = {k: v for k, v in os.environ.items() if k not in (*ours, "MASTER_PORT")}
        # else SGLang calls itself ill after 20 s, however long it is given
        kept.setdefault("SGLANG_HEALTH_CHECK_TIMEOUT", str(math.ceil(self.health_timeout)))
        if self.cpu:
            kept |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return kept | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def ready(self, limit: float, path: str) -> None:
        """Wait until `path` answers. Raises EngineError with the log's last lines if the process ends first
        or `limit` seconds pass; it is ended then."""
        end = time.monotonic() + limit
        async with httpx.AsyncClient(base_url=self.url, timeout=limit, trust_env=False) as client:
            while True:
                if not self.alive():
                    raise EngineError(f"the SGLang {self.kind} ended before it was ready{self.tail()}")
                if time.monotonic() > end:
                    self.kill()
                    late = f"the SGLang {self.kind} was not ready within {limit:g} s"
                    raise EngineError(late + self.tail())
                if await answers(client, path):
                    return
                await asyncio.sleep(POLL)

    def kill(self) -> None:
        """End it and all it has started; idempotent."""
        if self._process is None:
            return
        workers = _descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        _, left = psutil.wait_procs(
            workers, timeout=5
        )  # they are bound to it; this is for those that are not yet
        for worker in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(left, timeout=5)
        self._process = None

    def tail(self) -> str:
        """The last lines of its log, to end an error message with."""
        code = None if self._process is None else self._process.poll()
        status = "" if code is None else f" (exit status {code})"
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL:] if self.log.exists() else []
        return f"{status}; end of {self.log}:\n" + "\n".join(lines)


def first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first error of a group of tasks: the others were ended by it."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    """Whether a server says yes there, now."""
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


async def wait_for(url: str, limit: float) -> None:
    """Until a server that somebody else runs answers. Raises EngineError after `limit` seconds."""
    end = time.monotonic() + limit
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        while time.monotonic() < end:
            # a trainer that was killed while it sent weights left it paused
            with contextlib.suppress(httpx.TransportError):
                await client.post(f"{url}/continue_generation", json={})
            if await answers(client, f"{url}/health"):
                return
            await asyncio.sleep(POLL)
    raise EngineError(f"no SGLang server answers at {url} within {limit:g} s; start it first")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_port(host: str) -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        port: int = s.getsockname()[1]
        return port


def address_towards(host: str) -> str:
    """This machine's address as `host` sees it; 127.0.0.1 when they are the same."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: only asks for the route
        address: str = s.getsockname()[0]
        return address
