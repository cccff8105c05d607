"""Dynamic sampling, the overlong penalty, and runs taken apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_lightning import PPOConfig
from ppo_lightning.callbacks import OverlongCallback
from ppo_lightning.loop import DynamicSampling, DynamicSamplingError, plan_of, rewards_differ, share_of
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
    with pytest.raises(DynamicSamplingError, match=r"1 of 6 groups .* in 5 draws"):  # of one prompt each
        sampling(max_num_gen_batches=3).fill(
            group(0, 1, 1) + group(1, 0, 1), lambda count: group(0, *[1] * 2 * count)
        )


def test_every_draw_takes_what_is_missing() -> None:
    """Carried groups count: a rollout begins with less, or with nothing where they are a batch."""
    chosen, asked = sampling(over_sampling_batch_size=5), []

    def draw(count: int) -> list[Sample]:
        asked.append(count)
        return [s for place in range(count) for s in group(place, 0, 10 + place)]

    assert chosen.first() == 5
    chosen.fill(group(0, 0, 1) + group(1, 1, 1) + group(2, 1, 1) + group(3, 1, 1) + group(4, 1, 1), draw)
    assert asked == [4]
    assert chosen.metrics() == {"rollout/groups_carried": 0.0, "rollout/groups_kept": 5 / 9}
    assert len(chosen.carried) == 3
    assert chosen.first() == 0
    assert [s.reward for s in chosen.fill([], draw)] == [0, 11, 0, 12]  # the oldest
    assert chosen.metrics() == {"rollout/groups_carried": 2.0}  # nothing drawn, no share
    assert chosen.first() == 4
    assert [s.reward for s in chosen.fill(group(0, 7, 8), draw)] == [0, 13, 7, 8]
    assert chosen.metrics()["rollout/groups_carried"] == 1.0


def test_without_over_sampling_nothing_is_carried() -> None:
    chosen, asked = sampling(), []

    def draw(count: int) -> list[Sample]:
        asked.append(count)
        return group(0, 0, 1)

    assert chosen.first() == 2
    chosen.fill(group(0, 0, 1) + group(1, 1, 1), draw)
    assert asked == [1]
    assert chosen.carried == []


def test_a_failed_sample_is_no_part_of_its_group() -> None:
    """Hand-worked: the others' mean and deviation are their own, and a reward of 0 is none."""
    samples = group(0, 1, 1, 1, 0) + group(1, 1, 0, 0, 0)
    samples[3].status = samples[7].status = Status.FAILED
    for sample in samples:
        sample.tokens, sample.response_length = [1, 2], 1
    options = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "num_steps_per_rollout": 1}
    third = 1 / 3
    for name, expected in (
        ("grpo", [0, 0, 0, 0, *(x / (third**0.5 + 1e-6) for x in (2 * third, -third, -third)), 0]),
        ("dr_grpo", [0, 0, 0, 0, 2 * third, -third, -third, 0]),
        ("rloo", [0, 0, 0, 0, 1, -0.5, -0.5, 0]),
    ):
        config = PPOConfig.of(advantage_estimator=name, rollout_max_response_len=8, **options)
        plan = plan_of(samples, config, SimpleNamespace(dp=1, cp=1, pp=1, vpp=None))
        share = share_of(samples, plan, config, 0)
        assert share.rewards.tolist() == pytest.approx(expected), name
        assert share.mask.sum() == 6


def test_rewards_differ() -> None:
    failed = group(0, 1, 1, 0)
    failed[2].status = Status.FAILED
    assert not rewards_differ(failed)
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
    assert again["rows"][0]["rollout/reward"] == first["rows"][0]["rollout/reward"]  # a callback scores too
    only = {"debug_rollout_only": True, "colocate": True, "output_dir": str(tmp_path / "c")}
    (generated,) = run_ranks(fit_rank, 1, options | only, group=False, timeout=240)
    assert generated["step"] == 2
    assert generated["weights"] == {}
    assert generated["rows"][0]["rollout/reward"] == pytest.approx(first["rows"][0]["rollout/reward"])
    torch.save([], tmp_path / "rollouts" / "0.pt")
    with pytest.raises(RankError, match="holds 0 samples, a rollout here has 8"):
        run_ranks(
            fit_rank, 1, options | loaded | {"output_dir": str(tmp_path / "d")}, group=False, timeout=240
        )


def test_a_run_taken_apart_in_the_directory_of_a_finished_one(tmp_path: Path) -> None:
    """It neither does nothing and says "done", nor spoils what lies there; elsewhere, rollouts are written
    with the weights of the checkpoint."""
    options = prepare(tmp_path) | {"num_rollout": 1}
    saved = {"save_debug_rollout_data": str(tmp_path / "rollouts" / "{rollout_id}.pt")}

    def run(**changes: Any) -> dict[str, Any]:
        return run_ranks(fit_rank, 1, options | changes, group=False, timeout=240)[0]

    trained = run(**saved)
    with pytest.raises(RankError, match="iter_0000001 has done all 1 rollouts, nothing is left to train"):
        run(load_debug_rollout_data=saved["save_debug_rollout_data"])
    with pytest.raises(RankError, match="holds a training run, whose metrics and samples it would overwrite"):
        run(debug_rollout_only=True)
    elsewhere = {"debug_rollout_only": True, "output_dir": str(tmp_path / "b"), "num_rollout": 2}
    generated = run(load=str(tmp_path / "out" / "checkpoints"), **elsewhere)
    assert generated["step"] == 2
    assert generated["weights"] == {k: v for k, v in trained["weights"].items() if k.startswith("actor/")}
    first = run(**elsewhere)
    assert first["rollouts"][0] == trained["rollouts"][0]
    assert generated["rollouts"][0] != trained["rollouts"][0]  # the same prompts and draws, other weights
