"""Masked statistics against NumPy's own, over simulated ranks that each hold a part."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning.masked import identity, masked_mean, masked_sum, masked_var, moments, whiten

GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e30]


class Ranks:
    """Threads that add up tensors as ranks of an all-reduce do; a rank that stays away breaks the barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[torch.Tensor] = [torch.zeros(())] * size
        self.calls = [0] * size

    def run(self, work: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]) -> list:
        results: list = [None] * self.size

        def rank(r: int) -> None:
            def reduce(x: torch.Tensor) -> torch.Tensor:
                self.slots[r], self.calls[r] = x.clone(), self.calls[r] + 1
                self.barrier.wait()
                total = torch.stack(self.slots).sum(0)
                self.barrier.wait()
                return total

            results[r] = work(r, reduce)

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return results


def numpy_whiten(x: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    kept = x[mask].double().numpy()
    out = np.zeros(x.shape)
    if len(kept):
        var = kept.var(ddof=1) if len(kept) > 1 else 0.0
        out[mask.numpy()] = (kept - kept.mean()) / np.sqrt(var + 1e-8)
    return out


@st.composite
def masked_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    n = rows * columns
    x = draw(st.lists(st.floats(-100, 100, width=32), min_size=n, max_size=n))
    keep = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return torch.tensor(x).view(rows, columns), torch.tensor(keep).view(rows, columns)


@given(masked_tensors(), st.integers(1, 4), st.sampled_from(GARBAGE))
@settings(max_examples=60, deadline=None)
def test_whitening_is_numpys_however_the_rows_are_dealt(data, size: int, garbage: float) -> None:
    x, mask = data
    expected = numpy_whiten(x, mask)
    dirty = torch.where(mask, x, garbage)
    parts = [(dirty[r::size], mask[r::size]) for r in range(size)]  # ranks beyond the rows hold nothing
    ranks = Ranks(size)
    results = ranks.run(lambda r, reduce: whiten(*parts[r], reduce))
    assert ranks.calls == [2] * size
    for r in range(size):
        np.testing.assert_allclose(results[r].numpy(), expected[r::size], atol=2e-4, rtol=2e-5)
        assert (results[r][~parts[r][1]] == 0).all()


@given(masked_tensors(), st.sampled_from(GARBAGE))
@settings(max_examples=40, deadline=None)
def test_sum_mean_variance_are_numpys(data, garbage: float) -> None:
    x, mask = data
    dirty = torch.where(mask, x, garbage)
    kept = x[mask].double().numpy()
    assert masked_sum(dirty, mask).item() == pytest.approx(kept.sum(), rel=1e-5, abs=1e-3)
    assert masked_mean(dirty, mask).item() == pytest.approx(
        kept.mean() if len(kept) else 0, rel=1e-5, abs=1e-3
    )
    variance = kept.var(ddof=1) if len(kept) > 1 else 0.0
    assert masked_var(dirty, mask).item() == pytest.approx(variance, rel=1e-5, abs=1e-6)
    for i, row in enumerate(masked_mean(dirty, mask, dim=1)):
        own = x[i][mask[i]].double().numpy()
        assert row.item() == pytest.approx(own.mean() if len(own) else 0.0, rel=1e-4, abs=1e-4)


def test_a_large_mean_costs_no_digits_of_the_variance() -> None:
    noise = torch.tensor([1.0, -1.0, 2.0, -2.0])
    x, mask = 1e6 + noise, torch.ones(4, dtype=torch.bool)
    assert masked_var(x, mask).item() == pytest.approx(10 / 3, rel=1e-6)
    torch.testing.assert_close(whiten(x, mask), noise / (10 / 3) ** 0.5)


@pytest.mark.parametrize("values", [[0.1], [0.1] * 7, [1e20] * 3, [0.0, 0.0], []])
def test_one_element_or_equal_ones_give_zeros(values: list[float]) -> None:
    x = torch.tensor(values)
    assert torch.equal(whiten(x, torch.ones_like(x, dtype=torch.bool)), torch.zeros_like(x))


def test_rounding_noise_is_not_blown_up() -> None:
    x = 0.1 + torch.tensor([0.0, 1e-8, -1e-8, 7e-9])
    assert whiten(x, torch.ones(4, dtype=torch.bool)).abs().max() < 1e-3


def test_moments_count_and_type() -> None:
    x = torch.tensor([[1.0, 2.0, float("nan")]], dtype=torch.bfloat16)
    count, mean, variance = moments(x, torch.tensor([[1, 1, 0]]), identity)
    assert (count.item(), mean.item(), variance.item()) == (2.0, 1.5, 0.5)
    assert whiten(x, torch.tensor([[1, 1, 0]])).dtype == torch.bfloat16
