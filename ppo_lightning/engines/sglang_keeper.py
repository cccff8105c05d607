"""A server of its own bundle: kept at one address as long as the job runs, for ranks that take it as given.

    python -m ppo_lightning.engines.sglang_keeper HOST PORT ENGINE < config.yaml

Started again when it ends, it has the checkpoint's weights, under a version that no trainer takes: rank 0
sees that and sends the current ones.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import torch

from ppo_lightning.config import PPOConfig
from ppo_lightning.engines.base import EngineError
from ppo_lightning.engines.sglang_cpu import PARENT, die_with
from ppo_lightning.engines.sglang_fleet import MAX_RESTARTS
from ppo_lightning.engines.sglang_plan import LOCALHOST, Plan, server_arguments
from ppo_lightning.engines.sglang_server import POLL, ServerProcess


async def keep(config: PPOConfig, host: str, port: int, engine: int) -> None:
    """Raises EngineError when the server does not become ready, or ends too often."""
    cuda = torch.cuda.is_available()
    plan = Plan(str(config.model.hf_checkpoint), log_dir=config.logging.output_dir or tempfile.gettempdir())
    arguments = [*server_arguments(config, cuda), "--skip-server-warmup"]
    server = ServerProcess("server", host, arguments, plan.log(f"engine_{engine}"), not cuda, port)
    try:
        for _ in range(1 + MAX_RESTARTS):
            server.start("--model-path", plan.checkpoint, "--weight-version", "none")
            await server.ready(plan.start_limit, "/ready")
            while server.alive():
                await asyncio.sleep(POLL)
        raise EngineError(f"the SGLang server ended {1 + MAX_RESTARTS} times{server.tail()}")
    finally:
        server.kill()


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
