"""Own gradients against the plain formulas in float64, and so the compiled loops in fp32."""

from __future__ import annotations

from collections.abc import Callable

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


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_rotation() -> None:
    x, angles = random(5, 3, 8), random(5, 1, 4, seed=2).detach()
    cos, sin = angles.cos(), angles.sin()
    for part in (x, x[:, :2]):
        agree(kernels.rotate(part, cos, sin), rotated(part, cos, sin), [x])


def test_there_and_back_on_a_grid() -> None:
    """Lengths 2 and 3 on rows of 3; the padding's own gradient goes nowhere."""
    x = random(5, 2)
    cell, token = torch.tensor([0, 1, 3, 4, 5]), torch.tensor([0, 1, 0, 2, 3, 4])
    grid = kernels.to_grid(x, cell, token)
    assert grid[3].tolist() == x[2].tolist()
    agree(kernels.from_grid(grid * 2.0, cell), x * 2.0, [x])


# compiled loops ---------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (kernels.rms_norm(x, weight, 1e-3),)


def plain_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (F.rms_norm(x, weight.shape, weight, 1e-3),)


def swiglu(both: Tensor) -> tuple[Tensor]:
    return (kernels.SwiGLU()(both),)


def plain_swiglu(both: Tensor) -> tuple[Tensor]:
    gate, up = both.chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up,)


def heads(joint: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
    return kernels.rotary_heads(joint, norms or None, 1e-3, *turns(joint))  # type: ignore[arg-type]


def plain_heads(joint: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
    """Of each group its queries, its key and its value, one after another."""
    query, key, value = joint[:, :, :-2].flatten(1, 2), joint[:, :, -2], joint[:, :, -1]
    if norms:
        query, key = plain_norm(query, norms[0])[0], plain_norm(key, norms[1])[0]
    return rotated(query, *turns(joint)), rotated(key, *turns(joint)), value


def turns(joint: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [t, 1, d/2]"""
    angles = random(joint.size(0), 1, joint.size(-1) // 2, seed=2).detach().to(joint.dtype)
    return angles.cos(), angles.sin()


Kernel = Callable[..., tuple[Tensor, ...]]


def results(kernel: Kernel, inputs: list[Tensor]) -> list[Tensor]:
    """What it gives and all gradients, for slopes with gaps between a row's numbers."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outs = kernel(*inputs)
    slopes = [random(*x.shape[::-1], seed=7).detach().to(x.dtype) for x in outs]
    slopes = [x.permute(*reversed(range(x.ndim))) for x in slopes]
    return [*outs, *torch.autograd.grad(outs, inputs, slopes)]


def gaps(x: Tensor) -> Tensor:
    """The same numbers, with others in between along every dimension."""
    wide = torch.full([2 * n for n in x.shape], torch.nan, dtype=x.dtype)
    part = wide[tuple(slice(0, None, 2) for _ in x.shape)]
    return part.copy_(x)


CASES: list[tuple[Kernel, Kernel, list[tuple[int, ...]]]] = [
    *((norm, plain_norm, [shape, shape[-1:]]) for shape in [(1, 1), (131, 1, 33), (3, 4, 12), (0, 5)]),
    *((swiglu, plain_swiglu, [shape]) for shape in [(1, 2), (131, 1, 38), (0, 4)]),
    (heads, plain_heads, [(131, 2, 4, 10), (10,), (10,)]),
    (heads, plain_heads, [(1, 1, 3, 2), (2,), (2,)]),
    (heads, plain_heads, [(0, 1, 3, 2), (2,), (2,)]),
    (heads, plain_heads, [(67, 3, 5, 34)]),
]


def case_inputs(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [random(*shape, seed=i).detach().float() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, gaps])
@pytest.mark.parametrize(("kernel", "plain", "shapes"), CASES)
def test_loops_are_the_plain_formulas(
    kernel: Kernel, plain: Kernel, shapes: list[tuple[int, ...]], layout: Callable[[Tensor], Tensor]
) -> None:
    inputs = case_inputs(shapes)
    wanted = results(plain, [x.double() for x in inputs])
    for got, want in zip(results(kernel, [layout(x) for x in inputs]), wanted):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "plain", "shapes"), CASES)
def test_loops_give_the_same_with_any_number_of_threads(
    kernel: Kernel, plain: Kernel, shapes: list[tuple[int, ...]]
) -> None:
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(kernel, case_inputs(shapes)))
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*found):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kernel", "plain", "shapes"), [case for case in CASES if case[2][0][0] == 131])
def test_loops_hide_nothing_that_is_not_finite(
    kernel: Kernel, plain: Kernel, shapes: list[tuple[int, ...]], bad: float
) -> None:
    """Wherever the plain formulas give NaN or infinity, and nowhere else."""
    inputs = case_inputs(shapes)
    inputs[0].select(-1, 3).view(-1)[5] = bad
    for got, want in zip(results(kernel, inputs), results(plain, inputs)):
        assert torch.equal(got.isfinite(), want.isfinite())


def test_loops_of_swiglu_far_out() -> None:
    both = torch.tensor([[-500.0, -88, -20, 20, 88, 500, 1, 1, 1, 1, 1, 1]])
    for got, want in zip(results(swiglu, [both]), results(plain_swiglu, [both.double()])):
        torch.testing.assert_close(got.double(), want, atol=1e-30, rtol=1e-5)


def test_loops_of_a_norm_of_zeros() -> None:
    got, grad, _ = results(norm, [torch.zeros(3, 12), torch.ones(12)])
    assert (got == 0).all()
    assert grad.isfinite().all()
