"""Generalised advantage estimation and discounted sums over ragged, masked responses, without a loop over
tokens.

    B samples, T longest response in tokens
    R rows of a block, W its longest row in trainable tokens, K tokens of a chunk

Scanned is the lambda-return G_t = r_t + gamma [(1 - lambda) V_{t+1} + lambda G_{t+1}], not the advantage:
nothing telescopes, so fp32 holds at any length, and at gamma = lambda = 1 it is the plain sum of rewards. A
scan S_t = x_t + c S_{t+1} multiplies chunks with a triangle of powers of c, then scans the chunks' heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 32
BLOCK = 2**19  # elements of a block on the CPU: its few buffers stay in a core's cache

# Of some rows: `close` brings the trainable tokens of [B, T] to the left, zeros behind: [R, W]; `reopen`
# writes such rows back into [B, T].
Views: TypeAlias = "tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], None]]"
Layout: TypeAlias = "Callable[[Tensor, Tensor, Tensor, int], Views]"


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (= advantages + values), both [B, T], 0 where masked. Schulman 2015.

    rewards: [B], given at each response's last trainable token, or [B, T], read where `mask` is 1.
    values: [B, T], of the state before each token; the value after the last trainable token is 0.
    mask: [B, T] bool. Masked tokens are no transitions: the carry crosses them undecayed.
    lambd: a number, or [B]. A response without trainable tokens gets zeros.
    The result is fp32, or float64 where `values` are.
    """
    if rewards.ndim == 1:
        return _lambda_returns(mask, values, gamma, lambd, terminal=rewards)
    return _lambda_returns(mask, values, gamma, lambd, rewards=rewards)


def sum_to_go(rewards: Tensor, mask: Tensor, gamma: float, penalty: Tensor | None = None) -> Tensor:
    """Rewards from each token on, discounted by `gamma` per trainable token: fp32 [B, T], 0 where masked.

    rewards: [B], given at the last trainable token. penalty: [B, T], added to the rewards of its tokens.
    """
    if penalty is None and gamma == 1.0:
        return torch.where(mask.bool(), rewards[:, None].float(), 0.0)
    values = torch.zeros(mask.shape, device=mask.device)
    return _lambda_returns(mask, values, gamma, 1.0, terminal=rewards, rewards=penalty)[1]


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """1 - 1 / (alpha * length), at least 0: lambda [B] of responses of `lengths` [B] (VAPO, 2025)."""
    return (1.0 - 1.0 / (alpha * lengths.clamp(min=1).double())).clamp(min=0.0)


@torch.no_grad()
def _lambda_returns(
    mask: Tensor,
    values: Tensor,
    gamma: float,
    lambd: float | Tensor,
    *,
    terminal: Tensor | None = None,
    rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """G - V and G, both [B, T], a block of rows at a time."""
    mask = mask.bool()
    exact = values.dtype == torch.float64
    returns = torch.zeros(mask.shape, dtype=torch.float64 if exact else torch.float32, device=mask.device)
    advantages = torch.zeros_like(returns)
    lengths = mask.view(torch.int8).sum(1, dtype=torch.int32).long()
    for rows, width, layout in _blocks(mask, lengths):
        close, reopen = layout(mask, rows, lengths[rows], width)
        # TF32 on a GPU, where a user allows it, has 10 bits: multiply in float64 there.
        v = close(values).to(torch.float64 if exact or mask.is_cuda else torch.float32)
        x = v.new_zeros(len(rows), width + -width % CHUNK)
        keep = lambd[rows, None].double() if isinstance(lambd, torch.Tensor) else lambd
        bootstrap = torch.as_tensor(gamma * (1 - keep), dtype=x.dtype, device=x.device)
        torch.mul(v[:, 1:], bootstrap, out=x[:, : width - 1])
        if rewards is not None:
            x[:, :width] += close(rewards)
        if terminal is not None:
            last = (lengths[rows] - 1).clamp(min=0)
            x[torch.arange(len(rows), device=x.device), last] += torch.where(
                lengths[rows] > 0, terminal[rows].to(x.dtype), 0.0
            )
        g = _scan(x, gamma * keep)[:, :width]
        reopen(g, returns)
        reopen(g - v, advantages)
    return advantages, returns


def _blocks(mask: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, int, Layout]]:
    """Numbers of rows of like length, the greatest of their lengths, and how their tokens lie. Empty rows are
    left out, or ride along."""
    rises = mask.view(torch.int8).diff(dim=1)
    has_gaps = rises.amax(1) > 0 if rises.numel() else torch.zeros_like(lengths, dtype=torch.bool)
    for gaps, layout in ((False, _prefix), (True, _scattered)):
        chosen = (has_gaps == gaps).nonzero().squeeze(1)
        sizes, order = lengths[chosen].sort(descending=True, stable=True)
        chosen, widths = chosen[order], sizes.tolist()
        first = 0
        while first < len(widths) and widths[first] > 0:
            height = len(widths) if mask.is_cuda else max(BLOCK // widths[first], 1)
            yield chosen[first : first + height], widths[first], layout
            first += height


def _prefix(mask: Tensor, rows: Tensor, lengths: Tensor, width: int) -> Views:
    """For rows whose trainable tokens are their first ones."""
    shortest = int(lengths.min())
    tail = torch.arange(shortest, width, device=mask.device) < lengths[:, None]

    def close(x: Tensor) -> Tensor:
        out = x[:, :width].index_select(0, rows)
        out[:, shortest:] = torch.where(tail, out[:, shortest:], 0.0)
        return out

    def reopen(x: Tensor, out: Tensor) -> None:
        out[:, :width].index_copy_(0, rows, x.to(out.dtype))

    return close, reopen


def _scattered(mask: Tensor, rows: Tensor, lengths: Tensor, width: int) -> Views:
    """For rows with masked tokens before trainable ones."""
    height, longest = len(rows), mask.shape[1]
    source = _indices(mask.index_select(0, rows))
    target = _indices(torch.arange(width, device=mask.device) < lengths[:, None])

    def close(x: Tensor) -> Tensor:
        packed = x.index_select(0, rows).view(-1).index_select(0, source)
        return packed.new_zeros(height * width).scatter_(0, target, packed).view(height, width)

    def reopen(x: Tensor, out: Tensor) -> None:
        packed = x.reshape(-1).index_select(0, target).to(out.dtype)
        spread = packed.new_zeros(height * longest).scatter_(0, source, packed)
        out.index_copy_(0, rows, spread.view(height, longest))

    return close, reopen


def _indices(mask: Tensor) -> Tensor:
    """Flat positions of ones. NumPy finds them six times as fast as torch on a CPU."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.view(-1).nonzero().squeeze(1)


def _scan(x: Tensor, decay: float | Tensor) -> Tensor:
    """S_t = x_t + decay * S_{t+1} along rows: [R, m K] -> [R, m K]. decay: a number or [R, 1]."""
    rows, length = x.shape
    chunks = length // CHUNK
    if isinstance(decay, torch.Tensor):
        triangle, tail = _powers(decay, x.dtype)
        local = torch.bmm(x.view(rows, chunks, CHUNK), triangle)
    else:
        triangle, tail = _powers_of_number(decay, x.dtype, x.device)
        local = torch.mm(x.view(-1, CHUNK), triangle[0]).view(rows, chunks, CHUNK)
    if chunks > 1:
        heads = pad(local[:, 1:, 0], (0, 1 + -chunks % CHUNK))
        carry = _scan(heads, decay**CHUNK)[:, :chunks, None]
        local.addcmul_(carry, tail)
    return local.view(rows, length)


def _powers(decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """decay [R, 1] to the powers s - t where s >= t, else 0: [R, K, K]; and to the powers K - t: [R, 1,
    K]."""
    t = torch.arange(CHUNK + 1, device=decay.device)
    powers = (decay.double() ** t).to(dtype)
    distance = (t[:-1, None] - t[:-1]).clamp(min=0)
    return powers[:, distance].tril(), powers[:, None, 1:].flip(2)


@lru_cache(maxsize=32)
def _powers_of_number(decay: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return _powers(torch.tensor([[decay]], dtype=torch.float64, device=device), dtype)
