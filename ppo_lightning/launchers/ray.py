"""Ranks placed by Ray, over one node or several: the user's own script, run again in an actor per rank."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from ppo_lightning.launchers.ray_errors import ended, first_cause
from ppo_lightning.launchers.script import RayLaunchError, Script, failures

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ppo_lightning.config import PPOConfig

log = logging.getLogger(__name__)
URLS = "PPO_LIGHTNING_ROLLOUT_URLS"  # where the ranks find the services, blank between
PLACEMENT_LIMIT = 600.0  # seconds until the cluster must have room for the job


@dataclass(frozen=True, slots=True)
class Service:
    """A process that runs beside the ranks on `gpus` GPUs (on the CPU: cores) of its own, as long as they
    do. In `command`, {host} and {port} stand for the address at which the ranks will look for it; `stdin`
    is fed to it."""

    name: str
    command: tuple[str, ...]
    stdin: str = ""
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an actor stands."""

    host: str
    port: int  # free, when it was asked for
    gpus: tuple[int, ...]


class Rank:
    """What runs in an actor of the placement group: one rank, or one service."""

    def spot(self) -> Spot:
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as s:
            s.bind((host, 0))
            port = s.getsockname()[1]
        gpus = tuple(int(gpu) for gpu in ray.get_gpu_ids())
        return Spot(host, port, gpus)

    def run(self, script: Script, environment: dict[str, str]) -> None:
        script.run(environment)

    def serve(self, service: Service, host: str, port: int, script: Script) -> None:
        """Until it is ended from outside; where `script` runs, and with its variables. Raises RayLaunchError
        with its last words when it ends by itself."""
        words = Path(tempfile.mkstemp(prefix="ppo-lightning-service-")[1])
        command = [part.format(host=host, port=port) for part in service.command]
        environment = os.environ | script.environment | {"PPO_LIGHTNING_SERVER_PARENT": str(os.getpid())}
        try:
            with words.open("wb") as out:
                done = subprocess.run(
                    [sys.executable, "-m", *command],
                    input=service.stdin.encode(),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=script.cwd if os.path.isdir(script.cwd) else None,
                    check=False,
                )
            last = "\n".join(words.read_text(errors="replace").splitlines()[-40:])
        finally:
            words.unlink()
        raise RayLaunchError(f"{service.name} ended with status {done.returncode}:\n{last}")


class RayLauncher(_Launcher):
    """Places `per_node` ranks on each of `nodes` nodes, every rank in a bundle of a placement group (a GPU,
    or a core where the cluster has no GPUs), and every service in a bundle of its own; sets what torchrun
    would set; and runs the user's script again for each rank. The driver's own script ends where it called
    `fit`: what comes after it runs in the ranks.

    RAY_ADDRESS names the cluster; without it a local one is started, with `init` for `ray.init`. Two "nodes"
    may lie on one machine that has room for both. The first failure ends the job with that error. No actor
    outlives the call."""

    def __init__(
        self,
        per_node: int,
        nodes: int = 1,
        services: Sequence[Service] = (),
        *,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        self.per_node, self.nodes, self.services = per_node, nodes, tuple(services)
        self._init = dict(init or {})
        self._actors: list[Any] = []

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    @classmethod
    def from_config(cls, config: PPOConfig) -> RayLauncher:
        """As many ranks as the resolved configuration has; SGLang engines that are not colocated become
        services."""
        cluster, rollout = config.cluster, config.rollout
        size = cluster.rollout_num_gpus_per_engine
        engines = max(1, (cluster.rollout_num_gpus or size) // size)
        if rollout.rollout_engine != "sglang" or cluster.colocate or rollout.rollout_external_urls:
            engines = 0
        keeper = ("ppo_lightning.engines.sglang_keeper", "{host}", "{port}")
        text = config.to_yaml()
        services = [Service(f"engine {e}", (*keeper, str(e)), text, size) for e in range(engines)]
        return cls(cluster.actor_num_gpus_per_node or 1, cluster.actor_num_nodes, services)

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        if "RANK" in os.environ:  # in an actor
            try:
                return function(*args, **kwargs)
            except Exception as error:
                failures.append(error)
                raise
        with self._cluster() as gpus, self._placed(gpus) as spots:
            ranks, services = self._actors[: self.ranks], self._actors[self.ranks :]
            order, environments = arrange(spots[: self.ranks], self.per_node)
            urls = [f"http://{spot.host}:{spot.port}" for spot in spots[self.ranks :]]
            script = Script.current()
            running: dict[Any, str] = {}
            for service, actor, spot in zip(self.services, services, spots[self.ranks :], strict=True):
                running[actor.serve.remote(service, spot.host, spot.port, script)] = service.name
            for rank, (place, environment) in enumerate(zip(order, environments, strict=True)):
                environment |= {URLS: " ".join(urls)} if urls else {}
                running[ranks[place].run.remote(script, environment)] = f"rank {rank} on {spots[place].host}"
            left = self.ranks
            while left:
                errors = ended(running, None)
                if errors:
                    raise first_cause(errors[0], running)
                left -= 1
        sys.exit(0)

    def kill(self, signum: Any) -> None:
        import ray

        while self._actors:
            ray.kill(self._actors.pop())

    @contextmanager
    def _cluster(self) -> Iterator[bool]:
        """Connect to the cluster, or start one; whether it has the GPUs. Raises RayLaunchError if it is too
        small."""
        import ray

        needed = self.ranks + sum(service.gpus for service in self.services)
        ours = not ray.is_initialized()
        if ours:
            local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": max(needed, os.cpu_count() or 1)}
            ray.init(**({"include_dashboard": False} | local | self._init))
        try:
            has = ray.cluster_resources()
            gpus = has.get("GPU", 0) > 0
            kind = "GPU" if gpus else "CPU"
            largest = max(node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"])
            if largest < self.per_node:
                raise RayLaunchError(
                    f"{self.per_node} ranks a node are wanted, the largest node of the Ray cluster has"
                    f" {largest:g} {kind}s: lower --actor-num-gpus-per-node, raise --actor-num-nodes"
                )
            if has.get(kind, 0) < needed:
                raise RayLaunchError(
                    f"the job needs {needed} {kind}s ({self.ranks} ranks and the engines), the Ray cluster"
                    f" has {has.get(kind, 0):g}; add nodes, or lower --actor-num-nodes,"
                    " --actor-num-gpus-per-node or --rollout-num-gpus"
                )
            yield gpus
        finally:
            if ours:
                ray.shutdown()

    @contextmanager
    def _placed(self, gpus: bool) -> Iterator[list[Spot]]:
        """An actor in each bundle; where they stand, ranks first. They are gone afterwards, however it
        ends."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind, more = ("GPU", {"CPU": 1}) if gpus else ("CPU", {})
        sizes = [1] * self.ranks + [service.gpus for service in self.services]
        bundles = [{kind: size} | more for size in sizes]
        node = bundles[: self.per_node]
        groups = [placement_group(node, strategy="STRICT_PACK") for _ in range(self.nodes)]
        if self.services:
            groups.append(placement_group(bundles[self.ranks :], strategy="PACK"))
        places = [(group, index) for group in groups for index in range(group.bundle_count)]
        end = time.monotonic() + PLACEMENT_LIMIT
        try:
            if not all([group.wait(max(0.0, end - time.monotonic())) for group in groups]):
                raise RayLaunchError(
                    f"no room for the job within {PLACEMENT_LIMIT:g} s: it wants {self.nodes} times"
                    f" {self.per_node} {kind}s on one node, and {sizes[self.ranks :]} for engines; free are"
                    f" {ray.available_resources().get(kind, 0):g}"
                )
            for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
                # ranks of a node see each other's GPUs, as under torchrun; services get theirs from Ray
                seen = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if number < self.ranks else {}
                actor = ray.remote(Rank).options(
                    num_cpus=1 if gpus else size,
                    num_gpus=size if gpus else 0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(*place),
                    runtime_env={"env_vars": seen},
                )
                self._actors.append(actor.remote())
            yield ray.get([actor.spot.remote() for actor in self._actors])
        finally:
            self.kill(None)
            for group in groups:
                remove_placement_group(group)


def arrange(spots: Sequence[Spot], per_node: int) -> tuple[list[int], list[dict[str, str]]]:
    """For each rank the index of its spot, and the environment that torchrun would set. Each `per_node` spots
    make a node; its ranks stand in the order of their GPUs."""
    order = sorted(range(len(spots)), key=lambda i: (i // per_node, spots[i].gpus, i))
    environments = []
    for rank in range(len(spots)):
        node = rank // per_node
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(spots)),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": spots[order[0]].host,
            "MASTER_PORT": str(spots[order[0]].port),
            "TORCHELASTIC_RUN_ID": "ray",  # by this Lightning knows that its processes exist already
        }
        gpus = sorted(gpu for i in order[node * per_node :][:per_node] for gpu in spots[i].gpus)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        environments.append(environment)
    return order, environments
