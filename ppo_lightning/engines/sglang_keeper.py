"""A server of its own bundle: kept at one address as long as the job runs, for ranks that take it as given.

    python -m ppo_lightning.engines.sglang_keeper HOST PORT ENGINE < config.yaml

Started again when it ends or hangs, it has the checkpoint's weights, under a version that no trainer takes:
rank 0 sees that and sends the current ones.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

from ppo_lightning.config import PPOConfig
from ppo_lightning.engines.base import EngineError
from ppo_lightning.engines.sglang_cpu import PARENT, die_with
from ppo_lightning.engines.sglang_fleet import CONTROL_LIMIT, MAX_RESTARTS
from ppo_lightning.engines.sglang_plan import LOCALHOST, Plan, server_arguments
from ppo_lightning.engines.sglang_served import INCOMPLETE
from ppo_lightning.engines.sglang_server import POLL, ServerProcess, answers


async def keep(config: PPOConfig, host: str, port: int, engine: int) -> None:
    """Raises EngineError when the server does not become ready, or is lost too often between two updates."""
    cuda, rollout = torch.cuda.is_available(), config.rollout
    plan = Plan(
        str(config.model.hf_checkpoint),
        log_dir=config.logging.output_dir or tempfile.gettempdir(),
        health_interval=rollout.rollout_health_check_interval,
        health_timeout=rollout.rollout_health_check_timeout,
    )
    arguments = [*server_arguments(config, cuda), "--skip-server-warmup"]
    log_file, limit = plan.log(f"engine_{engine}"), plan.health_timeout
    server = ServerProcess("server", host, arguments, log_file, not cuda, port, health_timeout=limit)
    restarts, before = 0, ""
    try:
        while restarts <= MAX_RESTARTS:
            server.start("--model-path", plan.checkpoint, "--weight-version", "none")
            served = "none"
            try:
                await server.ready(plan.start_limit, "/ready")
                served = await until_lost(server, plan)
            except EngineError:
                if not restarts:  # wrong flags; later on, its port may have been taken for a moment
                    raise
            if served not in (before, "none"):
                restarts, before = 0, served
            restarts += 1
        raise EngineError(f"the SGLang server was lost {restarts} times between two updates{server.tail()}")
    finally:
        server.kill()


async def until_lost(server: ServerProcess, plan: Plan) -> str:
    """Wait until the server ends, or gives no token in time: it is ended then. The version of the weights
    that it served last. While it takes weights it need not answer sooner than a control call must."""
    version = "none"
    probed = heard = time.monotonic()
    async with httpx.AsyncClient(base_url=server.url, timeout=plan.health_timeout, trust_env=False) as client:
        while server.alive():
            await asyncio.sleep(POLL)
            if time.monotonic() - probed < plan.health_interval:
                continue
            version = before = await weight_version(client) or version
            healthy = await answers(client, "/health")
            version = await weight_version(client) or version
            probed = time.monotonic()
            heard = probed if healthy else heard
            taking = INCOMPLETE in before + version and probed - heard < CONTROL_LIMIT
            if not healthy and not taking:
                print(f"{server.url} gave no token within {plan.health_timeout:g} s: ended", flush=True)
                server.kill()
    return version


async def weight_version(client: httpx.AsyncClient) -> str | None:
    try:
        version: str = (await client.get("/model_info")).json()["weight_version"]
    except (httpx.TransportError, ValueError, KeyError):
        return None
    return version


def main(arguments: list[str]) -> None:
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))
    host, port, engine = arguments
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(sys.stdin.read())
        file.flush()
        config = PPOConfig.from_yaml(Path(file.name))
    asyncio.run(keep(config, host or LOCALHOST, int(port), int(engine)))


if __name__ == "__main__":
    main(sys.argv[1:])
