"""Whole runs without a critic: every estimator, the KL in the reward, dynamic sampling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from ppo_lightning.callbacks import PPOCallback
from ppo_lightning.samples import Sample
from tests.distributed.ranks import run_ranks
from tests.fitting import fit_rank, prepare

CRITIC_FREE = ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare(tmp_path_factory.mktemp("estimators")) | {
        "advantage_estimator": "grpo",
        "normalize_advantages": False,
        "num_rollout": 2,
    }


def fit(world: int, options: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
    return run_ranks(fit_rank, world, options, *args, group=False, timeout=240)


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_the_actor_trains_from_the_first_rollout(options: dict[str, Any], tmp_path: Path, name: str) -> None:
    """No critic is built, and none of its flags is in force: `num_critic_only_steps` holds nobody back."""
    changed = {"advantage_estimator": name, "num_critic_only_steps": 2, "output_dir": str(tmp_path / "out")}
    (seen,) = fit(1, options | changed)
    assert {key.split("/")[0] for key in seen["weights"]} == {"actor"}
    assert len(seen["rows"]) == 2
    for row in seen["rows"]:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/grad_norm"] > 0
        assert not any(key.startswith("critic/") for key in row)


class NoteKL(PPOCallback):
    """Writes the KL's coefficient of each rollout down."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_samples_end(self, trainer: pl.Trainer, module: Any, samples: list[Sample]) -> None:
        with self.path.open("a") as file:
            file.write(f"{module.kl.coef}\n")

    def read(self) -> list[float]:
        return [float(line) for line in self.path.read_text().split()]


def test_an_adapted_kl_coefficient_goes_on_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    notes = [NoteKL(tmp_path / name) for name in ("straight", "parts")]
    changed = options | {"kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 40, "num_rollout": 3}
    (straight,) = fit(1, changed | {"output_dir": str(tmp_path / "a")}, [notes[0]])
    fit(1, changed | {"num_rollout": 2, "output_dir": str(tmp_path / "b")}, [notes[1]])
    (resumed,) = fit(1, changed | {"output_dir": str(tmp_path / "b")}, [notes[1]], True)
    assert resumed["rows"] == straight["rows"][2:]
    assert resumed["weights"] == straight["weights"]
    coefficients = notes[0].read()
    assert notes[1].read() == coefficients
    # no KL at first: the greatest step down; 8 samples of a horizon of 40
    assert coefficients[:2] == pytest.approx([0.1, 0.1 * (1 - 0.2 * 8 / 40)])


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.02), (0.02, 0.0)])
def test_a_resumed_run_takes_the_kl_coefficient_it_is_given(
    options: dict[str, Any], tmp_path: Path, before: float, after: float
) -> None:
    note = NoteKL(tmp_path / "kl")
    changed = options | {"output_dir": str(tmp_path / "out")}
    fit(1, changed | {"kl_coef": before, "num_rollout": 1}, [note])
    fit(1, changed | {"kl_coef": after}, [note], True)
    assert note.read() == [before, after]


# ---- dynamic sampling --------------------------------------------------------------------------------------


def two_in_three(group: list[Sample]) -> bool:
    """A filter that drops some groups, whatever the rewards."""
    return sum(sum(s.tokens) for s in group) % 3 != 0


class NotePrompts(PPOCallback):
    """Writes the rows of the data that each draw is for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_rollout_start(self, trainer: pl.Trainer, module: Any, prompts: list[Any]) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps([p.index for p in prompts]) + "\n")

    def read(self) -> list[list[int]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_groups_are_carried_through_a_run_and_its_resume(options: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, the same on two ranks, and every prompt is drawn once, in the data's order."""
    changed = options | {
        "dynamic_sampling_filter_path": f"{__name__}:two_in_three",
        "over_sampling_batch_size": 13,
        "rollout_shuffle": False,
        "num_rollout": 6,
    }
    notes = {name: NotePrompts(tmp_path / name) for name in ("straight", "parts", "two")}
    (straight,) = fit(1, changed | {"output_dir": str(tmp_path / "a")}, [notes["straight"]])
    draws = notes["straight"].read()
    drawn = [index for draw in draws for index in draw]
    assert drawn == [i % 24 for i in range(len(drawn))]
    assert draws[0] == list(range(13))
    assert [] in draws  # carried groups were a batch
    carried = [row["rollout/groups_carried"] for row in straight["rows"]]
    assert carried[0] == 0
    assert max(carried) == 4
    assert all(row["rollout/groups_kept"] < 1 for row in straight["rows"][:1])
    fit(1, changed | {"num_rollout": 2, "output_dir": str(tmp_path / "b")}, [notes["parts"]])
    (resumed,) = fit(1, changed | {"output_dir": str(tmp_path / "b")}, [notes["parts"]], True)
    assert notes["parts"].read() == draws
    assert resumed["rollouts"] == straight["rollouts"][2:]
    for row, expected in zip(resumed["rows"], straight["rows"][2:]):
        assert row.items() <= expected.items()  # Lightning also remembers what an earlier step logged last
    assert resumed["weights"] == straight["weights"]
    two = fit(2, changed | {"num_rollout": 2, "output_dir": str(tmp_path / "c")}, [notes["two"]])
    assert two[0]["rollouts"] == two[1]["rollouts"]
    assert two[0]["rollouts"][0] == straight["rollouts"][0]
