"""Evaluation on the embedded engine, and what it reports."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from ppo_lightning.callbacks.evaluation import PassAtK, Ranks, Row, eval_params, evaluate, summary
from ppo_lightning.config import PPOConfig
from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.engines.hf import HFEngine
from ppo_lightning.samples import MissingSlotError, Prompt, Sample
from tests.tinymodel import make_tiny_model

PARAMS = SamplingParams(6, temperature=0.8)
SETS = {
    name: [Prompt(i, f"{name} {i}", tokens=list(f"{name} {i}".encode())) for i in range(count)]
    for name, count in (("short", 5), ("tiny", 1))
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluation") / "model"
    make_tiny_model(directory)
    return directory


def score(samples: list[Sample]) -> None:
    """By the text alone; also uses every generator there is, as a careless reward may."""
    torch.rand(3), random.random(), np.random.rand()
    for sample in samples:
        sample.add_reward(sum(sample.tokens) % 3)


def test_the_same_numbers_on_any_number_of_ranks(checkpoint: Path) -> None:
    """More ranks than prompts too: their share is empty, and they take part all the same."""
    alone = evaluate(SETS, HFEngine(str(checkpoint)).generate, score, PARAMS, n_samples=4, seed=1)
    assert set(alone) == {
        f"eval/{name}/{key}"
        for name in SETS
        for key in ("mean", "response_length", "truncated", "pass@1", "pass@2", "pass@4")
    }
    for world in (2, 3, 7):
        assert evaluate_on(world, checkpoint) == [alone] * world


def evaluate_on(world: int, checkpoint: Path) -> list[dict[str, float]]:
    """Ranks as threads that exchange objects at a barrier. Models are made before, as transformers makes only
    one at a time."""
    barrier = Barrier(world)
    slots: list[Any] = [None] * world
    engines = [HFEngine(str(checkpoint)) for _ in range(world)]
    for engine in engines:
        engine.generate([], PARAMS, [])

    def gather_as(rank: int) -> Any:
        def gather(own: Any) -> list[Any]:
            slots[rank] = own
            barrier.wait(60)
            everything = list(slots)
            barrier.wait(60)
            return everything

        return gather

    def work(rank: int) -> dict[str, float]:
        ranks = Ranks(rank, world, gather_as(rank))
        return evaluate(SETS, engines[rank].generate, score, PARAMS, n_samples=4, seed=1, ranks=ranks)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


def test_evaluation_leaves_the_random_states_alone(checkpoint: Path) -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    evaluate(SETS, HFEngine(str(checkpoint)).generate, score, PARAMS)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_a_sets_draws_do_not_depend_on_the_other_sets(checkpoint: Path) -> None:
    write = HFEngine(str(checkpoint)).generate
    both = evaluate(SETS, write, score, PARAMS, n_samples=2)
    alone = evaluate({"tiny": SETS["tiny"]}, write, score, PARAMS, n_samples=2)
    assert alone.items() <= both.items()
    other = evaluate(SETS, write, score, PARAMS, n_samples=2, seed=5)
    assert other != both


def test_prompts_are_left_as_they_were(checkpoint: Path) -> None:
    before = [list(p.tokens) for p in SETS["short"]]
    evaluate(SETS, HFEngine(str(checkpoint)).generate, score, PARAMS)
    assert [p.tokens for p in SETS["short"]] == before


def test_a_reward_that_nobody_gave_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(MissingSlotError, match="reward of evaluation sample 0"):
        evaluate(SETS, HFEngine(str(checkpoint)).generate, lambda samples: None, PARAMS)


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (6, 1)])
def test_pass_at_k_counts_all_subsets(n: int, right: int) -> None:
    solved = [i < right for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(solved, k))
        metric = PassAtK(k)
        metric.update(solved)
        assert metric.compute().item() == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_the_mean_over_prompts_and_needs_enough_responses() -> None:
    metric = PassAtK(2)
    metric.update([True, False, False, False])  # 1 - 3/6
    metric.update([False, False])
    assert metric.compute().item() == pytest.approx(0.25)
    with pytest.raises(ValueError, match="pass@2 needs 2 responses"):
        metric.update([True])


def test_the_summary_of_rows_in_any_order() -> None:
    rows = [Row(0, 1.0, 10, False), Row(1, 0.5, 20, True), Row(0, -1.0, 30, False), Row(1, 1.5, 40, False)]
    expected = {"mean": 0.5, "response_length": 25.0, "truncated": 0.25, "pass@1": 0.5, "pass@2": 1.0}
    assert summary(rows, 2) == pytest.approx(expected)
    assert summary(rows[::-1], 2) == pytest.approx(expected)
    assert summary(rows, 2, solved_at=0.5) == pytest.approx(expected | {"pass@1": 0.75})


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_pass_at_k_of_all_responses_is_always_there(n: int, ks: list[int]) -> None:
    values = summary([Row(0, float(i == 0), 10, False) for i in range(n)], n)
    assert [name for name in values if name.startswith("pass@")] == [f"pass@{k}" for k in ks]
    assert values[f"pass@{n}"] == 1.0


def test_sampling_parameters_come_from_the_flags(checkpoint: Path) -> None:
    config = PPOConfig.of(
        hf_checkpoint=str(checkpoint),
        eval_prompt_data=("a", "b"),
        eval_temperature=0.0,
        eval_max_response_len=9,
        rollout_top_p=0.9,
        rollout_stop=("END",),
        rollout_stop_token_ids=(4,),
    )
    resolved, _ = config.resolve(command="evaluate", files=False)
    assert eval_params(resolved) == SamplingParams(
        9, temperature=0.0, top_p=0.9, stop=("END",), stop_token_ids=(4,)
    )
