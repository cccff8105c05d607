"""Samples to tensors to micro-batches and back, against plain lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning.experience import gather, microbatches, scatter
from ppo_lightning.samples import Sample, Status


def sample(index: int, length: int, prompt: int = 2, **fields) -> Sample:
    logprobs = [-0.1 * (t + 1) - index for t in range(length)]
    return Sample(
        prompt="",
        tokens=list(range(100 * index, 100 * index + prompt + length)),
        response_length=length,
        index=index,
        **({"rollout_log_probs": logprobs} | fields),
    )


SAMPLES = [
    sample(0, 3, loss_mask=[1, 0, 1]),
    sample(1, 1),
    sample(2, 0),
    sample(3, 4, status=Status.FAILED, rollout_log_probs=None),
]


def test_gather_lays_samples_out() -> None:
    share = gather(SAMPLES, torch.tensor([1.0, 2, 3, 4]), torch.tensor([0.25, 0.5, 0.0, 0.0]))
    assert share.lengths.tolist() == [3, 1, 0, 4]
    assert share.mask.int().tolist() == [[1, 0, 1, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert share.weights.tolist() == [[0.25, 0, 0.25, 0], [0.5, 0, 0, 0], [0] * 4, [0] * 4]
    want = torch.tensor([[-0.1, -0.2, -0.3, 0], [-1.1, 0, 0, 0], [0] * 4, [0] * 4])
    torch.testing.assert_close(share.rollout_logprobs, want)
    assert share.old_values is None
    assert share.advantages is None


def test_micro_batches_hold_whole_responses_and_the_slots_of_the_moment() -> None:
    share = gather(SAMPLES, torch.zeros(4), torch.tensor([0.25, 0.5, 0.0, 0.0]))
    share.old_values = torch.arange(16.0).view(4, 4)
    first, dummy = microbatches(share, [[1, 0, 2], []])
    assert [t.tolist() for t in first.tokens] == [SAMPLES[i].tokens for i in (1, 0, 2)]
    assert first.response_lengths == [1, 3, 0]
    assert first.num_response_tokens == 4
    assert first.fields.mask.tolist() == [True, True, False, True]
    assert first.fields.weight.tolist() == [0.5, 0.25, 0.0, 0.25]
    assert first.fields.old_values.tolist() == [4, 0, 1, 2]
    assert first.fields.sequence.tolist() == [0, 1, 1, 1]
    assert first.fields.num_sequences == 3
    assert first.fields.old_logprobs is None
    # a dummy has the same slots, so that metrics have the same names on every rank
    assert dummy.rows == []
    assert dummy.tokens == []
    for name in ("mask", "weight", "rollout_logprobs", "old_values", "sequence"):
        assert getattr(dummy.fields, name).dtype == getattr(first.fields, name).dtype
        assert getattr(dummy.fields, name).shape == (0,)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_scatter_undoes_the_cut(lengths: list[int], data) -> None:
    share = gather(
        [sample(i, n) for i, n in enumerate(lengths)], torch.zeros(len(lengths)), torch.ones(len(lengths))
    )
    order = data.draw(st.permutations(range(len(lengths))))
    where = data.draw(st.integers(0, len(lengths)))
    batches = microbatches(share, [order[:where], order[where:], []])
    flats = [b.fields.rollout_logprobs for b in batches]
    torch.testing.assert_close(scatter(share, batches, flats), share.rollout_logprobs)
    part = scatter(share, batches[:1], flats[:1])
    assert (part[list(order[where:])] == 0).all()


def test_a_rank_without_samples_has_empty_slots() -> None:
    share = gather([], torch.zeros(0), torch.zeros(0), with_rollout_logprobs=True)
    assert share.rollout_logprobs.shape == (0, 0)
    batches = microbatches(share, [[]])
    assert batches[0].fields.rollout_logprobs.shape == (0,)
    assert scatter(share, batches, [torch.zeros(0)]).shape == (0, 0)


def test_engine_log_probs_are_for_all_or_for_none() -> None:
    none = [sample(i, 2, rollout_log_probs=None) for i in range(2)]
    assert gather(none, torch.zeros(2), torch.zeros(2)).rollout_logprobs is None
    with pytest.raises(ValueError, match="sample 1 has no rollout_log_probs"):
        gather([sample(0, 2), none[1]], torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (sample(7, 3, loss_mask=[1, 1]), "sample 7: 2 entries in loss_mask for 3"),
        (sample(7, 2, rollout_log_probs=[0.0]), "sample 7: 1 entries in rollout_log_probs for 2"),
        (sample(7, 3, prompt=-1), "response_length 3 of 2 tokens"),
    ],
)
def test_contradictions_name_the_sample(broken: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather([broken], torch.zeros(1), torch.zeros(1))


def test_scatter_refuses_the_wrong_number_of_tokens() -> None:
    share = gather(SAMPLES[:2], torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="3 numbers for 4"):
        scatter(share, microbatches(share, [[0, 1]]), [torch.zeros(3)])
