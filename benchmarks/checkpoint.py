"""Time of a checkpoint of actor and critic with their Adam moments, against `torch.save` of the same tensors.

    python benchmarks/checkpoint.py [--hidden 768] [--layers 8] [--directory DIR] [--repeats 5]

Both sides end with the bytes on disk (fsync). The asynchronous figure is how long training waits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from ppo_lightning.megatron import topology as groups
from ppo_lightning.megatron.checkpoint import MegatronCheckpointIO, Shards
from ppo_lightning.megatron.model import ModelOptions
from ppo_lightning.megatron.offload import Offload
from ppo_lightning.megatron.optimizer import OptimizerOptions, inner_optimizers
from ppo_lightning.megatron.rng import rng_state
from ppo_lightning.megatron.roles import Role, build_role
from ppo_lightning.megatron.strategy import MegatronStrategy


def build(hidden: int, layers: int) -> MegatronStrategy:
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
    )
    strategy = MegatronStrategy(offload=Offload())
    topology = groups.initialize()
    for name in ("critic", "actor"):
        role = build_role(
            name, config, topology, ModelOptions(), OptimizerOptions(), use_distributed_optimizer=False
        )
        with torch.no_grad():
            for parameter in (p for model in role.models for p in model.parameters()):
                parameter.normal_()
        strategy.roles[name] = role
    return strategy


def tensors_of(role: Role) -> list[torch.Tensor]:
    held = [p.detach() for model in role.models for p in model.parameters()]
    for inner in inner_optimizers(role.optimizer):
        held += [v for state in inner.state.values() for v in state.values()]
    return held


def save_plainly(strategy: MegatronStrategy, directory: Path) -> None:
    for name, role in strategy.roles.items():
        with (directory / f"{name}.pt").open("wb") as stream:
            torch.save(tensors_of(role), stream)
            stream.flush()
            os.fsync(stream.fileno())


def seconds(action: Callable[[Path], Any], directory: Path) -> float:
    """Time of `action` in a fresh directory."""
    place = Path(tempfile.mkdtemp(dir=directory))
    started = time.perf_counter()
    action(place)
    taken = time.perf_counter() - started
    shutil.rmtree(place)
    return taken


def measure(strategy: MegatronStrategy, directory: Path) -> dict[str, float]:
    """Every kind of save once, one after another, so that the machine's moods fall on all of them."""
    shards = Shards(strategy.roles, True, rng_state(), strategy.resident)

    def save(place: Path, io: MegatronCheckpointIO) -> None:
        io.save_checkpoint({"global_step": 1}, place / "save" / "iter_0000001", shards)

    def waited(io: MegatronCheckpointIO) -> float:
        place = Path(tempfile.mkdtemp(dir=directory))
        started = time.perf_counter()
        save(place, io)
        taken = time.perf_counter() - started
        io.finish(wait=True)
        shutil.rmtree(place)
        return taken

    behind = MegatronCheckpointIO(async_save=True)
    behind.reserve(shards)  # as when training starts: the first rollout is time enough
    behind.wait_for_memory()
    return {
        "torch.save": seconds(lambda place: save_plainly(strategy, place), directory),
        "checkpoint": seconds(lambda place: save(place, MegatronCheckpointIO()), directory),
        "first": waited(behind),
        "later": waited(behind),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("hidden", 768), ("layers", 8), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    store = tempfile.mktemp()
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=1, timeout=timedelta(minutes=5))
    strategy = build(given.hidden, given.layers)
    size = sum(t.nbytes for role in strategy.roles.values() for t in tensors_of(role))
    load = os.getloadavg()[0]
    measure(strategy, given.directory)  # the first of all pays for imports
    rounds = [measure(strategy, given.directory) for _ in range(given.repeats)]

    def median(name: str, over: str | None = None) -> float:
        return statistics.median(r[name] / (r[over] if over else 1.0) for r in rounds)

    print(
        f"{size / 1e9:.2f} GB of actor and critic with Adam moments, medians of {given.repeats} rounds, "
        f"{load:.1f} processes running before"
    )
    print(f"  torch.save                {median('torch.save'):6.2f} s")
    ratio = median("checkpoint", "torch.save")
    print(f"  checkpoint                {median('checkpoint'):6.2f} s   {ratio:.2f} x torch.save")
    for name in ("first", "later"):
        share = median(name, "checkpoint")
        print(f"  asynchronous, {name} wait  {median(name):6.2f} s   {share:.0%} of the synchronous one")


if __name__ == "__main__":
    main()
