"""Plans against exhaustive search, counting, and the causal cost of each context-parallel rank."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning.packing import (
    balanced_parts,
    contiguous_parts,
    first_fit_decreasing,
    plan_rollout,
    zigzag_indices,
)


def log_normal(count: int, seed: int, mean: float = 6.5, sigma: float = 0.8) -> list[int]:
    rng = random.Random(seed)
    return [min(max(int(rng.lognormvariate(mean, sigma)), 16), 8192) for _ in range(count)]


@given(
    st.lists(st.integers(1, 300), min_size=0, max_size=40),
    st.integers(1, 3),
    st.integers(1, 6),
    st.one_of(st.tuples(st.integers(1, 4), st.none()), st.tuples(st.none(), st.integers(50, 600))),
    st.booleans(),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_every_sample_is_trained_once_and_ranks_keep_step(lengths, num_steps, ranks, cut, balance, multiple):
    lengths = lengths[: len(lengths) // num_steps * num_steps]
    size, budget = cut
    kwargs = {
        "num_steps": num_steps,
        "data_ranks": ranks,
        "micro_batch_size": size,
        "max_tokens": budget,
        "balance": balance,
        "multiple_of": multiple,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_rollout(lengths, **kwargs)
        assert plan == plan_rollout(lengths, **kwargs)
    each = len(lengths) // num_steps
    assert [s.samples for s in plan.steps] == [
        list(range(i * each, (i + 1) * each)) for i in range(num_steps)
    ]
    for step in plan.steps:
        counts = {len(batches) for batches in step.ranks}
        assert len(step.ranks) == ranks
        assert len(counts) == 1
        assert min(counts) >= 1
        assert min(counts) % multiple == 0
        for batch in itertools.chain(*step.ranks):
            if budget is not None:
                assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
            else:
                assert len(batch) <= size
    assert plan.oversized == [i for i, n in enumerate(lengths) if budget is not None and n > budget]
    for rank in range(ranks):
        mine = plan.samples_of(rank)
        rows = [[[mine[r] for r in batch] for batch in step] for step in plan.rows_of(rank)]
        assert rows == [step.ranks[rank] for step in plan.steps]


def test_worked_by_hand() -> None:
    plan = plan_rollout([5, 3, 4, 1, 2, 2, 2, 2], num_steps=2, data_ranks=2, max_tokens=6, balance=False)
    assert [step.ranks for step in plan.steps] == [
        [[[0], [1]], [[2], [3]]],  # rank 1 could do with one, and keeps step
        [[[4, 5]], [[6, 7]]],
    ]
    assert plan.efficiency == 21 / (6 * 6)


def test_samples_in_order_differ_by_one_between_ranks() -> None:
    assert contiguous_parts([1] * 7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert contiguous_parts([1], 3) == [[0], [], []]
    plan = plan_rollout([4], num_steps=1, data_ranks=3, micro_batch_size=2)
    assert plan.steps[0].ranks == [[[0]], [[]], [[]]]


@given(st.lists(st.integers(1, 40), min_size=0, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_balance_is_near_the_best_possible(lengths: list[int], parts: int) -> None:
    got = balanced_parts(lengths, parts)
    assert sorted(itertools.chain(*got)) == list(range(len(lengths)))
    best = min(
        max(sum(n for n, p in zip(lengths, places) if p == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(lengths))
    )
    # the bound of differencing: 7/6 of the best for two sets, 4/3 - 1/(3k) for k
    assert max(sum(lengths[i] for i in p) for p in got) <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rollouts_tokens_are_balanced(ranks: int) -> None:
    lengths = log_normal(512, seed=ranks)
    loads = [sum(lengths[i] for i in part) for part in balanced_parts(lengths, ranks)]
    assert max(loads) - min(loads) <= 0.001 * max(loads)
    in_order = [sum(lengths[i] for i in part) for part in contiguous_parts(lengths, ranks)]
    assert max(in_order) - min(in_order) > 0.02 * max(in_order)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_log_normal_mix_packs_well(ranks: int, seed: int) -> None:
    lengths = log_normal(512, seed)
    plan = plan_rollout(lengths, num_steps=1, data_ranks=ranks, max_tokens=9216, balance=True)
    assert plan.efficiency >= 0.9
    batches = sum(len(b) for b in plan.steps[0].ranks)
    assert plan.efficiency == pytest.approx(sum(lengths) / (batches * 9216))


def test_spare_room_is_spread_evenly() -> None:
    plan = plan_rollout([10] * 8, num_steps=1, data_ranks=1, max_tokens=50, multiple_of=4)
    assert [len(b) for b in plan.steps[0].ranks[0]] == [2, 2, 2, 2]


def test_first_fit_decreasing() -> None:
    assert first_fit_decreasing([0, 1, 2, 3, 4], [4, 8, 1, 2, 12], 10) == [[4], [1, 3], [0, 2]]


def test_an_oversized_sample_stands_alone_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="longer than a micro-batch's budget of 10") as caught:
        plan = plan_rollout([4, 25, 5, 30], num_steps=1, data_ranks=1, max_tokens=10)
    assert len(caught) == 1
    assert plan.oversized == [1, 3]
    assert sorted(plan.steps[0].ranks[0]) == [[0, 2], [1], [3]]


def test_what_does_not_divide_or_contradicts_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 samples do not divide into 2"):
        plan_rollout([1] * 5, num_steps=2, data_ranks=1, micro_batch_size=1)
    with pytest.raises(ValueError, match="either"):
        plan_rollout([1], num_steps=1, data_ranks=1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_zigzag_shares_positions_and_causal_work_equally(units: list[int], cp: int) -> None:
    lengths = [2 * cp * u for u in units]
    held = [zigzag_indices(lengths, cp, r) for r in range(cp)]
    assert sorted(itertools.chain(*held)) == list(range(sum(lengths)))
    starts = list(itertools.accumulate(lengths, initial=0))
    within = {s + k: k for s, n in zip(starts, lengths) for k in range(n)}
    work = {sum(within[p] + 1 for p in positions) for positions in held}
    assert len({len(h) for h in held}) == 1
    assert len(work) == 1


def test_zigzag_by_hand_and_its_error() -> None:
    assert zigzag_indices([4, 8], 2, 0) == [0, 3, 4, 5, 10, 11]
    assert zigzag_indices([4, 8], 2, 1) == [1, 2, 6, 7, 8, 9]
    assert zigzag_indices([3, 2], 1, 0) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="pad the sequence"):
        zigzag_indices([6], 2, 0)
