"""Dynamic sampling, the overlong penalty, and runs taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_lightning import PPOConfig
from ppo_lightning.callbacks import OverlongCallback
from ppo_lightning.loop import DynamicSampling, DynamicSamplingError, rewards_differ
from ppo_lightning.samples import Sample, Status
from tests.distributed.ranks import RankError, run_ranks
from tests.fitting import fit_rank, prepare


def group(place: int, *rewards: float) -> list[Sample]:
    return [
        Sample(
            "p",
            tokens=[place],
            reward=r,
            group_index=place,
            index=place * len(rewards) + i,
            status=Status.COMPLETED,
        )
        for i, r in enumerate(rewards)
    ]


def sampling(**changes: Any) -> DynamicSampling:
    path = "ppo_lightning.loop:rewards_differ"
    return DynamicSampling(PPOConfig.of(rollout_batch_size=2, dynamic_sampling_filter_path=path, **changes))


def test_equal_rewards_are_dropped_and_the_batch_is_filled() -> None:
    draws = [group(0, 1, 1) + group(1, 0, 1), group(0, 1, 0) + group(1, 0, 1)]
    chosen = sampling()
    samples = chosen.fill(draws[0], lambda count: draws[1])
    assert [s.reward for s in samples] == [0, 1, 1, 0]
    assert [(s.group_index, s.index) for s in samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert (chosen.drawn, chosen.kept) == (4, 3)


def test_groups_beyond_the_batch_are_carried_also_through_a_checkpoint() -> None:
    chosen = sampling()
    chosen.fill(group(0, 0, 1) + group(1, 1, 0) + group(2, 0, 5), lambda count: [])
    resumed = sampling()
    resumed.load_state_dict(chosen.state_dict())
    for again in (chosen, resumed):
        samples = again.fill(group(0, 1, 1) + group(1, 3, 0), lambda count: [])
        assert [s.reward for s in samples] == [0, 5, 3, 0]


def test_a_filter_that_passes_too_little_ends_the_run_with_the_numbers() -> None:
    with pytest.raises(DynamicSamplingError, match=r"1 of 6 groups .* in 3 draws, a rollout needs 2"):
        sampling(max_num_gen_batches=3).fill(
            group(0, 1, 1) + group(1, 0, 1), lambda count: group(0, 1, 1) + group(1, 2, 2)
        )


def test_rewards_differ() -> None:
    assert rewards_differ(group(0, 0, 1))
    assert not rewards_differ(group(0, 1, 1))


@pytest.mark.parametrize(("length", "penalty"), [(10, 0), (80, 0), (90, -0.25), (100, -0.5), (120, -0.5)])
def test_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    """Formula 13 of the DAPO paper, with a factor of one half."""
    assert OverlongCallback(longest=100, buffer=20, factor=0.5).penalty(length) == pytest.approx(penalty)


def test_rollouts_saved_by_one_run_train_another_alike(tmp_path: Path) -> None:
    options = prepare(tmp_path) | {"num_rollout": 2}
    saved = {"save_debug_rollout_data": str(tmp_path / "rollouts" / "{rollout_id}.pt")}
    (first,) = run_ranks(
        fit_rank, 1, options | saved | {"output_dir": str(tmp_path / "a")}, group=False, timeout=240
    )
    loaded = {"load_debug_rollout_data": saved["save_debug_rollout_data"], "output_dir": str(tmp_path / "b")}
    (again,) = run_ranks(fit_rank, 1, options | loaded, group=False, timeout=240)
    assert again["weights"] == first["weights"]
    only = {"debug_rollout_only": True, "output_dir": str(tmp_path / "c")}
    (generated,) = run_ranks(fit_rank, 1, options | only, group=False, timeout=240)
    assert generated["step"] == 2
    assert generated["weights"] == {}
    assert generated["rows"][0]["rollout/reward"] == pytest.approx(first["rows"][0]["rollout/reward"])
    torch.save([], tmp_path / "rollouts" / "0.pt")
    with pytest.raises(RankError, match="holds 0 samples, a rollout here has 8"):
        run_ranks(
            fit_rank, 1, options | loaded | {"output_dir": str(tmp_path / "d")}, group=False, timeout=240
        )
