"""Passes that are left out change nothing: two ways of the same rollouts, gradients and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.callbacks import PPOCallback
from ppo_lightning.config import PPOConfig
from ppo_lightning.gae import gae, sum_to_go
from ppo_lightning.hooks import listens
from ppo_lightning.savings import Savings
from tests.distributed.ranks import run_ranks
from tests.fitting import Record, fit_rank, prepare


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = prepare(tmp_path_factory.mktemp("savings"))
    return made | {"num_rollout": 2, "critic_lr": 1e-3, "value_clip": 0.02, "clip_grad": 0.0}


class Watch(PPOCallback):
    """Needs the experience before the updates; writes down which slots are full."""

    def __init__(self) -> None:
        self.full: list[bool] = []

    def on_experience_end(self, trainer: pl.Trainer, module: Any, experience: Any) -> None:
        self.full.append(experience.old_values is not None and experience.old_logprobs is not None)


class Passes(Record):
    """Which roles make a forward pass beside their training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        inner = trainer.strategy.forward

        def watched(role: str, batches: Any, output: str) -> Any:
            self.seen.append((role, sum(len(b.rows) for b in batches)))
            return inner(role, batches, output)

        trainer.strategy.forward = watched


def fitted(rank: int, world: int, options: dict[str, Any], watch: bool = False) -> dict[str, Any]:
    passes, watcher = Passes(), Watch()
    told = fit_rank(rank, world, options, [passes, *([watcher] if watch else [])])
    return told | {"passes": passes.seen, "full": watcher.full}


def both(options: dict[str, Any], place: Path, world: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same run with passes left out and with every pass."""
    one = run_ranks(fitted, world, options | {"output_dir": str(place / "short")}, group=False, timeout=240)
    plain = options | {"skip_redundant_passes": False, "output_dir": str(place / "whole")}
    return one[0], run_ranks(fitted, world, plain, group=False, timeout=240)[0]


CASES = {
    "one step": {"global_batch_size": 8},
    "two steps, two epochs": {"global_batch_size": 4, "ppo_epochs": 2},
    "truncated importance sampling": {"global_batch_size": 8, "use_tis": True, "rollout_top_p": 0.9},
    "only the targets are sums": {"global_batch_size": 8, "critic_lambd": 1.0, "lambd": 0.9},
}


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_gradients_are_those_of_every_pass(
    options: dict[str, Any], tmp_path: Path, case: str
) -> None:
    short, whole = both(options | CASES[case], tmp_path)
    assert sum(rows for _, rows in short["passes"]) < sum(rows for _, rows in whole["passes"])
    assert short["rollouts"] == whole["rollouts"]
    for ours, plain in zip(short["rows"], whole["rows"], strict=True):
        assert ours.keys() == plain.keys()
        assert ours == pytest.approx(plain, rel=1e-5, abs=1e-6)


def test_the_last_pipeline_stage_tells_the_others(options: dict[str, Any], tmp_path: Path) -> None:
    layout = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "num_rollout": 1}
    short, whole = both(options | layout | {"ppo_epochs": 2}, tmp_path, world=4)
    assert short["rows"][0] == pytest.approx(whole["rows"][0], rel=1e-5, abs=1e-6)


def test_one_step_needs_no_pass_and_later_steps_their_own(options: dict[str, Any], tmp_path: Path) -> None:
    once = options | {"num_rollout": 1, "output_dir": str(tmp_path / "out")}
    assert run_ranks(fitted, 1, once | {"global_batch_size": 8}, group=False)[0]["passes"] == []
    twice = run_ranks(fitted, 1, once | {"global_batch_size": 4}, group=False)[0]["passes"]
    assert twice == [("critic", 4), ("actor", 4)]
    discounted = once | {
        "global_batch_size": 8,
        "lambd": 0.9,
        "num_critic_only_steps": 1,
        "use_kl_loss": True,
    }
    assert run_ranks(fitted, 1, discounted, group=False)[0]["passes"] == [("critic", 8)]


def test_a_callback_that_looks_finds_every_slot_full(options: dict[str, Any], tmp_path: Path) -> None:
    watched = options | {"num_rollout": 1, "global_batch_size": 8, "output_dir": str(tmp_path / "out")}
    told = run_ranks(fitted, 1, watched, True, group=False)[0]
    assert told["full"] == [True]
    assert sorted(told["passes"]) == [("actor", 8), ("critic", 8)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"advantage_estimator": "ppo"}, Savings(True, True, True)),
        ({"advantage_estimator": "ppo", "lambd": 0.95}, Savings(False, True, True)),
        ({"advantage_estimator": "ppo", "lambd": 0.95, "critic_lambd": 1.0}, Savings(True, True, True)),
        ({"advantage_estimator": "ppo", "gamma": 0.99}, Savings(False, True, True)),
        ({"advantage_estimator": "ppo", "use_rollout_logprobs": True}, Savings(True, False, True)),
        ({"advantage_estimator": "grpo", "kl_coef": 0.1}, Savings()),
        ({"advantage_estimator": "grpo"}, Savings(False, True, True)),
        ({"advantage_estimator": "ppo", "skip_redundant_passes": False}, Savings()),
    ],
)
def test_what_is_left_out(changes: dict[str, Any], expected: Savings) -> None:
    assert Savings.of(PPOConfig.of(**changes), watched=False) == expected
    assert Savings.of(PPOConfig.of(**changes), watched=True) == Savings()


def test_targets_need_no_values_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(4, generator=generator), torch.randn(4, 9, generator=generator)
    mask = torch.rand(4, 9, generator=generator) > 0.3
    assert torch.equal(gae(rewards, values, mask, 1.0, 1.0)[1], sum_to_go(rewards, mask, 1.0))


def test_who_listens() -> None:
    def trainer(*callbacks: Any) -> Any:
        return type("Trainer", (), {"callbacks": list(callbacks)})()

    hooks = ("on_experience_end", "on_advantages_end")
    assert not listens(trainer(PPOCallback(), Record(), pl.Callback()), *hooks)
    assert listens(trainer(PPOCallback(), Watch()), *hooks)
