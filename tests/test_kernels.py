"""Own gradients against the plain formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ppo_lightning.megatron import kernels


def agree(ours: Tensor, plain: Tensor, inputs: list[Tensor]) -> None:
    """Value and all gradients."""
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)
    slopes = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(5))
    for got, want in zip(
        torch.autograd.grad((ours * slopes).sum(), inputs),
        torch.autograd.grad((plain * slopes).sum(), inputs),
    ):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("shape", [(7, 12), (5, 1, 12), (4, 3, 12), (0, 12)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(12, seed=1)
    agree(kernels.rms_norm(x, weight, 1e-3), F.rms_norm(x, (12,), weight, 1e-3), [x, weight])


def test_rms_norm_of_a_slice_and_of_zeros() -> None:
    x, weight = random(6, 4, 24), random(12, seed=1)
    part = x[:, 1:3, 6:18]
    agree(kernels.rms_norm(part, weight, 1e-6), F.rms_norm(part, (12,), weight, 1e-6), [x, weight])
    nothing = torch.zeros(3, 12, requires_grad=True)
    kernels.rms_norm(nothing, torch.ones(12), 1e-6).sum().backward()
    assert nothing.grad.isfinite().all()


def test_swiglu() -> None:
    both = random(5, 1, 16)
    gate, up = both.chunk(2, -1)
    agree(kernels.SwiGLU()(both), F.silu(gate) * up, [both])


def test_rotation() -> None:
    x, angles = random(5, 3, 8), random(5, 1, 4, seed=2).detach()
    cos, sin = angles.cos(), angles.sin()
    for part in (x, x[:, :2]):
        first, second = part.chunk(2, -1)
        plain = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        agree(kernels.rotate(part, cos, sin), plain, [x])


def test_there_and_back_on_a_grid() -> None:
    """Lengths 2 and 3 on rows of 3; the padding's own gradient goes nowhere."""
    x = random(5, 2)
    cell, token = torch.tensor([0, 1, 3, 4, 5]), torch.tensor([0, 1, 0, 2, 3, 4])
    grid = kernels.to_grid(x, cell, token)
    assert grid[3].tolist() == x[2].tolist()
    agree(kernels.from_grid(grid * 2.0, cell), x * 2.0, [x])
