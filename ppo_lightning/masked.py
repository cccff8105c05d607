"""Sums, means, variances and whitening over the elements under a mask.

What lies under mask 0 may be anything, NaN and inf included: it is replaced, never multiplied. `reduce`
adds a tensor up over the ranks that hold the other parts of the data (a sum all-reduce, the same shape on
every rank); alone, it is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

Reduce: TypeAlias = "Callable[[Tensor], Tensor]"

VARIANCE_FLOOR = 1e-8  # added to the variance before the square root, as Megatron-based trainers do


def identity(x: Tensor) -> Tensor:
    return x


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where `mask`, over `dim` or over everything; 0 where nothing is left."""
    kept = torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask`; 0 where nothing is left."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def moments(x: Tensor, mask: Tensor, reduce: Reduce = identity) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and Bessel-corrected variance (float64 scalars) of `x` where `mask`, over all ranks.

    Two passes, so that a large mean costs no digits of the variance. Calls `reduce` exactly twice on every
    rank, also where the mask is empty. No element: mean and variance 0; one element: variance 0."""
    local = torch.stack([mask.bool().sum().double(), masked_sum(x.double(), mask)])
    count, total = reduce(local).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce(masked_sum((x.double() - mean) ** 2, mask).reshape(1)).squeeze(0)
    return count, mean, squares / (count - 1).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """Bessel-corrected variance of `x` where `mask`, a scalar of x's type; see `moments`."""
    return moments(x, mask, reduce)[2].to(x.dtype)


def whiten(x: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """`x` with mean 0 and variance 1 over the masked elements of all ranks, and 0 elsewhere; same shape and
    type.

    (x - mean) * rsqrt(variance + 1e-8). A single element and constant elements give zeros.
    """
    _, mean, variance = moments(x, mask, reduce)
    scaled = (x.double() - mean) * torch.rsqrt(variance + VARIANCE_FLOOR)
    return torch.where(mask.bool(), scaled, torch.zeros_like(scaled)).to(x.dtype)
