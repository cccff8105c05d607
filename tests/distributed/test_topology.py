"""Megatron's process groups as `initialize` forms them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ppo_lightning.megatron import topology
from tests.distributed.ranks import run_ranks


def loops_and_sums(rank: int, world: int) -> tuple[int, list[float]]:
    here = topology.initialize(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    sums = []
    for group in (here.tp_group, here.pp_group, here.dp_group):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    return names.count("gloo_tcp_loop"), sums


def test_groups_share_one_thread_that_waits_for_the_network() -> None:
    results = run_ranks(loops_and_sums, 4)
    assert [loops for loops, _ in results] == [1] * 4
    assert [sums for _, sums in results] == [[1, 2, 0], [1, 4, 1], [5, 2, 2], [5, 4, 3]]
