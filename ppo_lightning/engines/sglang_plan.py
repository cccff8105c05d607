"""Which servers an engine starts, where, and with which flags: made of the configuration, before anything
runs."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lightning.engines.sglang_server import address_towards, free_port

if TYPE_CHECKING:
    from ppo_lightning.config import PPOConfig

URLS = "PPO_LIGHTNING_ROLLOUT_URLS"  # servers that the launcher has started, blank between
LOCALHOST = "127.0.0.1"
OUTSIDE = "192.0.2.1"  # reserved for documentation (RFC 5737): stands for any other machine
CPU_FLAGS = {"--device": "cpu", "--attention-backend": "torch_native", "--dtype": "float32"}
CPU_KV_TOKENS = 32768  # left to itself SGLang sizes this cache by the machine's memory: millions of tokens
START_LIMIT = 900.0  # seconds until a server must be ready: weights of some hundred GB come from a slow disk


@dataclass(frozen=True, slots=True)
class Place:
    """One engine: the rank that starts and controls it, and its GPUs on that rank's node."""

    owner: int
    first_gpu: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that `SGLangEngine` needs. `concurrency` counts the requests of one rank."""

    checkpoint: str
    places: tuple[Place, ...] = (Place(0, 0),)
    urls: tuple[str, ...] = ()  # given servers instead of own ones; rank 0 controls them
    ranks_per_engine: int = 1
    arguments: tuple[str, ...] = ()
    cpu: bool = True
    host: str = LOCALHOST
    mode: str = "tensor"
    bucket_size: int = 512 * 1024**2
    weights_dir: str | None = None
    log_dir: str = "."
    concurrency: int = 512
    check_equal: bool = False
    keep_aborted: bool = True
    start_limit: float = START_LIMIT
    health_interval: float = 30.0
    health_timeout: float = 30.0

    @classmethod
    def from_config(cls, config: PPOConfig, world: int, *, cuda: bool) -> Plan:
        """Raises ValueError for servers that no rank can start."""
        r, c = config.rollout, config.cluster
        urls = tuple(map(address, r.rollout_external_urls or os.environ.get(URLS, "").split()))
        per_engine = c.rollout_num_gpus_per_engine
        places = () if urls else place(config, world, cuda)
        engines = len(urls) or len(places)
        return cls(
            checkpoint=str(config.model.hf_checkpoint),
            places=places,
            urls=urls,
            ranks_per_engine=per_engine,
            arguments=server_arguments(config, cuda),
            cpu=not cuda,
            host=LOCALHOST if c.actor_num_nodes == 1 else own_address(),
            mode=r.update_weight_transfer_mode or "tensor",
            bucket_size=r.update_weight_buffer_size,
            weights_dir=r.update_weight_disk_dir,
            log_dir=config.logging.output_dir or tempfile.gettempdir(),
            concurrency=max(1, r.sglang_server_concurrency * engines // world),
            check_equal=r.check_weight_update_equal,
            keep_aborted=r.keep_aborted_samples,
            health_interval=r.rollout_health_check_interval,
            health_timeout=r.rollout_health_check_timeout,
        )

    def log(self, name: str) -> Path:
        return Path(self.log_dir) / f"sglang_{name}.log"


def address(url: str) -> str:
    """A server's address as it is asked: HOST:PORT is enough to name one."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def place(config: PPOConfig, world: int, cuda: bool) -> tuple[Place, ...]:
    """Engine e of colocated ones lives on the GPUs of the ranks from e * its size on, and its first rank
    owns it. Others live behind the trainers' GPUs of a single node. On the CPU the engines are spread over
    the ranks."""
    c = config.cluster
    size, per_node = c.rollout_num_gpus_per_engine, c.actor_num_gpus_per_node or 1
    engines = max(1, (c.rollout_num_gpus or size) // size)
    if not cuda:
        return tuple(
            Place(e * world // engines if engines <= world else e % world, 0) for e in range(engines)
        )
    if per_node % size and c.colocate:
        raise ValueError(
            f"engines of {size} GPUs do not fill nodes of {per_node}: choose a --rollout-num-gpus-per-engine"
            " that divides it, or start servers yourself and give --rollout-external-urls"
        )
    if c.colocate:
        return tuple(Place(e * size, e * size % per_node) for e in range(engines))
    if c.actor_num_nodes > 1:
        raise ValueError(
            "engines on GPUs of their own beside several training nodes: use --launcher ray, --colocate, or"
            " servers of your own with --rollout-external-urls"
        )
    return tuple(Place(e % world, per_node + e * size) for e in range(engines))


def server_arguments(config: PPOConfig, cuda: bool) -> tuple[str, ...]:
    """Flags of every server; those of the user, --sglang-NAME, come last and win."""
    ours = {"--tp-size": str(config.cluster.rollout_num_gpus_per_engine)}
    if not cuda:
        ours |= CPU_FLAGS | {"--max-total-tokens": str(CPU_KV_TOKENS)}
    flags = [part for pair in ours.items() for part in pair]
    if config.model.trust_remote_code:
        flags.append("--trust-remote-code")
    if cuda and config.cluster.colocate:
        flags.append("--enable-memory-saver")
    for argument in config.rollout.sglang_args:
        name = re.sub("^--sglang-", "--", argument)
        flags += name.split("=", 1) if name.startswith("--") else [name]
    return tuple(flags)


def router_arguments(urls: Sequence[str], host: str) -> list[str]:
    flags = ["--worker-urls", *urls, "--policy", "round_robin"]
    flags += ["--prometheus-host", host, "--prometheus-port", str(free_port(host))]
    # /ready, because /health asks for a token: memory may be released only while nothing runs
    flags += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
    flags += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
    # requests are sent again by the client, which knows when the servers are given up
    flags += ["--disable-retries", "--disable-circuit-breaker", "--request-timeout-secs", "86400"]
    return [*flags, "--worker-startup-check-interval", "1", "--log-level", "warn"]


def own_address() -> str:
    """This node's address as the other nodes see it."""
    master = os.environ.get("MASTER_ADDR", LOCALHOST)
    mine = address_towards(master)
    if mine.startswith("127.") and not master.startswith(("127.", "localhost")):
        # the master's own node, whose name its /etc/hosts gives to itself alone
        with contextlib.suppress(OSError):
            return address_towards(OUTSIDE)
    return mine
