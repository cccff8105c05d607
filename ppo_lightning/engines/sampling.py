"""Draws that depend on a seed and a step alone: not on the batch, the rank or the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ppo_lightning.compiled import spread
from ppo_lightning.engines import loops
from ppo_lightning.engines.base import SamplingParams

_GOLDEN, _MIX1, _MIX2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[len(seeds), count] fp32 in [0, 1): row i is the splitmix64 stream of `seeds[i]`."""
    state = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)[:, None]
    x = state + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)  # wraps modulo 2**64, as it must
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))  # 24 bits: exact


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under softmax(logits / temperature) over the *whole*
    vocabulary.

    `logits` [b, V] fp32, `uniform` [b] in [0, 1); returns [b] int64 and [b] fp32. The token is the inverse of
    the cumulative distribution at `uniform`, in vocabulary order, after top-k, then top-p on what top-k left
    (the order of transformers and vLLM). Temperature 0: the likeliest token, log-probability at temperature
    1. Logits that are not finite give a log-probability that is not finite."""
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    whole = params.top_p >= 1 and not 0 < params.top_k < logits.shape[-1]
    if whole and logits.device.type == "cpu" and logits.dtype == torch.float32:
        return _drawn(logits, uniform, params.temperature)
    scaled = logits if params.temperature == 1 else logits / params.temperature
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    if not whole:
        cumulative = _nucleus(weights, params).cumsum(-1)
    # never rounds up to the end: `uniform` is at most 1 - 2**-24, and what that takes off is over half an ulp
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    logprobs = scaled.gather(-1, tokens) - top - total.log()
    return tokens[:, 0], logprobs[:, 0]


def _drawn(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same in one compiled loop."""
    tokens = torch.empty(len(logits), dtype=torch.long)
    logprobs = torch.empty(len(logits))
    arrays = (logits.numpy(), uniform.contiguous().numpy(), temperature, tokens.numpy(), logprobs.numpy())
    spread(loops.draw, len(logits), *arrays)
    return tokens, logprobs


def _nucleus(weights: Tensor, params: SamplingParams) -> Tensor:
    """`weights` [b, V] with zeros outside of top-k and top-p; ties at the edge go to the smaller token id."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    if params.top_k > 0:
        ranked[:, params.top_k :] = 0
    if params.top_p < 1:
        before = ranked.cumsum(-1) - ranked
        ranked[before >= params.top_p * ranked.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(weights).scatter_(-1, order, ranked)
