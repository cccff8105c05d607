"""The harness that runs ranks: the rank that failed first is heard, in time, and nobody stays behind."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, run_ranks


def share(rank: int, world: int, value: float) -> float:
    tensor = torch.tensor([rank + value])
    dist.all_reduce(tensor)
    return tensor.item()


def fail(rank: int, world: int, how: str) -> None:
    if rank == 1 and how == "raise":
        raise KeyError("the needle")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(60)
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(share, 3, 0.5) == [4.5] * 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 of 2:(.|\n)*KeyError: 'the needle'"),
        ("die", r"rank 1 of 2:\ndied without a word, exit code -9"),
        ("sleep", r"ranks \[0, 1\] of 2 gave no answer within 3 s"),
    ],
)
def test_the_first_failure_is_told_and_nobody_stays(how: str, message: str) -> None:
    before = set(psutil.Process().children())  # other tests of this worker may keep workers of a sandbox
    with pytest.raises(RankError, match=message):
        run_ranks(fail, 2, how, timeout=3 if how == "sleep" else 60)
    stayed = set(psutil.Process().children()) - before
    assert not [p for p in stayed if p.status() != psutil.STATUS_ZOMBIE]


def test_group_of_the_test_process_does_not_reach_the_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert run_ranks(share, 2, 0.0) == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
    assert run_ranks(share, 2, 0.0) == [1.0, 1.0]
