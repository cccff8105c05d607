"""A run that is saved and resumed goes on as if it had never stopped; what is damaged or hostile is refused."""

from __future__ import annotations

import os
import pickle
import random
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from ppo_lightning.megatron import checkpoint_files as files
from ppo_lightning.megatron.checkpoint import CheckpointError, Retention, resume_path
from ppo_lightning.megatron.optimizer import inner_optimizers
from ppo_lightning.megatron.strategy import MegatronStrategy
from tests.distributed.ranks import RankError, run_ranks
from tests.distributed.test_strategy import (
    OPTIONS,
    make_samples,
    make_strategy,
    microbatches,
    policy_loss,
    value_loss,
)
from tests.tinymodel import make_tiny_model

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory)
    return str(directory)


# one rank ---------------------------------------------------------------------------------------------


def build(world: int, model_dir: str, layout: dict[str, Any], roles: tuple[str, ...]) -> MegatronStrategy:
    strategy = make_strategy(world, **layout)
    for role in roles:
        strategy.setup_model(role, model_dir, optimizer=OPTIONS)
        strategy.load_weights(role, model_dir)
    return strategy


def train(strategy: MegatronStrategy, steps: int) -> list[tuple[float, ...]]:
    """Update every role `steps` times on samples that the global random state picks."""
    t, seen = strategy.topology, []
    for _ in range(steps):
        order = torch.randperm(8).tolist()
        dist_order = strategy.broadcast(order)
        samples = make_samples()
        mine = microbatches([samples[i] for i in dist_order[t.dp_rank :: t.dp]])
        for role in strategy.roles:
            loss = value_loss if role == "critic" else policy_loss
            sums = strategy.forward_backward(role, mine, loss, entropy=role != "critic")
            report = strategy.step(role)
            seen.append((sums["loss"], report.grad_norm, report.lr, random.random(), np.random.rand()))
    return seen


def tensors(strategy: MegatronStrategy) -> dict[str, bytes]:
    """Every weight and every tensor of the optimizers that this rank holds, bit by bit."""
    found = {}
    for name, role in strategy.roles.items():
        for i, model in enumerate(role.models):
            found |= {f"{name}.{i}.{k}": bits(p) for k, p in model.named_parameters()}
        for inner in inner_optimizers(role.optimizer):
            state = inner.state_dict()["state"]
            found |= {f"{name}.{k}.{n}": bits(v) for k, s in state.items() for n, v in s.items()}
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def save(strategy: MegatronStrategy, path: str, step: int, **more: Any) -> None:
    strategy.save_checkpoint({"global_step": step, "optimizer_states": [{}], **more}, path)


def run_and_save(rank: int, world: int, model_dir: str, layout: dict[str, Any], root: str, more: int) -> Any:
    strategy = build(world, model_dir, layout, ("actor", "critic"))
    train(strategy, 2)
    save(strategy, f"{root}/iter_0000002", 2, note="kept")
    return train(strategy, more), tensors(strategy)


def resume(rank: int, world: int, model_dir: str, layout: dict[str, Any], root: str, more: int) -> Any:
    strategy = build(world, model_dir, layout, ("actor", "critic"))
    train(strategy, 1)  # to be undone by loading
    loaded = strategy.load_checkpoint(f"{root}/iter_0000002")
    strategy.on_train_start()
    assert loaded["note"] == "kept"
    return train(strategy, more), tensors(strategy)


# what comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, TP2), (2, PP2), (2, SHARDED), (2, {"context_parallel_size": 2})],
    ids=["one", "dp2", "tp2", "pp2", "dp2 sharded", "cp2"],
)
def test_resume_is_bitwise(model_dir: str, tmp_path: Path, world: int, layout: dict[str, Any]) -> None:
    root = str(tmp_path / "save")
    straight = run_ranks(run_and_save, world, model_dir, layout, root, 2)
    again = run_ranks(resume, world, model_dir, layout, root, 2)
    for rank in range(world):
        assert again[rank] == straight[rank], f"rank {rank}"
    assert files.latest_iteration(root) == files.latest_iteration(root + "_critic") == 2


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((2, TP2), (2, PP2)), ((2, PP2), (1, {})), ((2, SHARDED), (2, TP2 | SHARDED)), ((1, {}), (2, TP2))],
    ids=["tp2 to pp2", "pp2 to one", "dp2 to tp2, sharded optimizer", "one to tp2"],
)
def test_resharding_goes_on_alike(model_dir: str, tmp_path: Path, saved: Any, resumed: Any) -> None:
    root = str(tmp_path / "save")
    (straight, _), *_ = run_ranks(run_and_save, saved[0], model_dir, saved[1], root, 2)
    (again, _), *_ = run_ranks(resume, resumed[0], model_dir, resumed[1], root, 2)
    for got, want in zip(again, straight):
        assert got[:3] == pytest.approx(want[:3], rel=1e-5)  # loss, gradient norm, learning rate
