"""The tiny recipe trains: its own warm start, its own reward, PPO through the Trainer; only shorter."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from statistics import mean

import pytest

from ppo_lightning.config import PPOConfig
from ppo_lightning.recipes import tiny_ppo
from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
ROLLOUTS = 12


def small(rollouts: int = ROLLOUTS) -> PPOConfig:
    """On one rank, with half the batch and no evaluation between; relative places, as in the recipe."""
    return tiny_ppo.config().replace(
        actor_num_gpus_per_node=1,
        num_rollout=rollouts,
        rollout_batch_size=64,
        num_critic_only_steps=1,
        eval_interval=None,
        save_interval=rollouts,
        use_tensorboard=False,
        seed=0,
    )


def prepare(rank: int, world: int, folder: Path) -> None:
    from ppo_lightning.recipes._warm_start import WarmStart

    os.chdir(folder)
    tiny_ppo.prepare(small(), WarmStart(steps=200))


def train(rank: int, world: int, folder: Path) -> None:
    from ppo_lightning.run import fit

    os.chdir(folder)
    fit(small())


def readme_example(rank: int, world: int, folder: Path) -> None:
    """The code of README.md as it stands, with the small configuration for the recipe's."""
    os.chdir(folder)
    config = small(2)
    tiny_ppo.config = lambda: config
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(code[1], {})


def rewards(output: Path) -> list[float]:
    with (output / "metrics.csv").open(newline="") as file:
        return [float(row["rollout/reward"]) for row in csv.DictReader(file) if row["rollout/reward"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    for step in (prepare, train):
        run_ranks(step, 1, folder, group=False, timeout=300)
    return folder


def test_the_recipe_improves_its_reward(trained: Path) -> None:
    seen = rewards(trained / "outputs" / "tiny_ppo")
    assert len(seen) == ROLLOUTS
    assert mean(seen[-3:]) > mean(seen[:3]) + 0.1, seen


def test_the_first_example_of_the_readme_trains_after_the_demo(trained: Path) -> None:
    run_ranks(readme_example, 1, trained, group=False, timeout=120)
    seen = rewards(trained / "outputs" / "short")
    assert len(seen) == 2
    assert all(reward < 0.9 for reward in seen)
