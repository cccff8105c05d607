"""Batched decoding with a transformers model: one prefill, then a token a step for the rows still at work.

Against `model.generate` it writes keys and values in place instead of copying the cache every step, reads a
prompt shared by several rows once, shares key heads among query heads without repeating them, drops
finished rows, and takes the steps of known architectures without their modules
(`ppo_lightning.engines.dense`).
    b  rows still at work    P  longest prompt    t  tokens in the cache    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ppo_lightning.engines.base import SamplingParams
from ppo_lightning.engines.dense import Cache as DenseCache
from ppo_lightning.engines.dense import DenseDecoder
from ppo_lightning.engines.sampling import draw

ATTENTION = "ppo_lightning_grouped"
ROOM = 64  # tokens of free room in a new cache
DROPPED = 0.25  # share of finished rows that makes it worth to copy the cache of the others

Stop = Callable[[list[list[int]]], list[bool]]


@dataclass(slots=True)
class Decoded:
    """The response to one prompt. `ended`: its last token or its text ends it; else it was cut."""

    tokens: list[int]
    logprobs: list[float]
    ended: bool


class GrowingLayer(DynamicLayer):
    """Keys and values with room to grow; DynamicLayer copies all of them at every token."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._keys = self._values = key_states[..., :0, :]
            self._length = 0
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._keys.shape[-2]:
            self._keys = _grown(self._keys, start, self._length)
            self._values = _grown(self._values, start, self._length)
        self._keys[..., start : self._length, :] = key_states
        self._values[..., start : self._length, :] = value_states
        return self._view()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._keys, self._values = self._keys.index_select(0, indices), self._values.index_select(0, indices)
        self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[..., : self._length, :], self._values[..., : self._length, :]
        return self.keys, self.values


def _grown(old: Tensor, filled: int, needed: int) -> Tensor:
    rows, heads, room, width = old.shape
    new = old.new_empty(rows, heads, max(needed + ROOM, room * 3 // 2), width)
    new[..., :filled, :] = old[..., :filled, :]
    return new


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a decoder. For one new token, the query heads of a key head stand as its queries: same
    products, no copies of the keys. [b, heads, q, d] -> [b, q, heads, d]."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if length == 1:
        stacked = query.view(rows, groups, heads // groups, width)
        out = F.scaled_dot_product_attention(stacked, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, -1), None
    causal = attention_mask is None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=heads != groups,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@torch.inference_mode()  # around each step: who takes the responses is outside
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    params: SamplingParams,
    uniform: Tensor,
    end_ids: Sequence[int],
    stop: Stop | None = None,
    aborted: Callable[[], bool] = lambda: False,
    dense: DenseDecoder | None = None,
) -> Iterator[tuple[int, Decoded]]:
    """The place of each prompt and its response, as soon as that ends: at most `limits[i]` tokens, up to and
    including one of `end_ids` or the token that makes `stop` true of the response so far. `uniform`
    [rows, max(limits)] are the draws. `model` must use ATTENTION; `dense` is the same model's quicker
    decoder, where there is one. When `aborted` turns true, what is there is given as cut."""
    device, longest = model.device, max(limits)
    state = _prefilled(model, prompts, dense, longest)
    ends, draws = torch.tensor(list(end_ids), dtype=torch.long, device=device), uniform.to(device).t()
    rows, limit = torch.arange(len(prompts), device=device), torch.tensor(list(limits), device=device)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    logprobs = torch.zeros(len(prompts), longest, device=device)
    done = torch.zeros_like(limit, dtype=torch.bool)
    for step in range(longest):
        token, logprob = draw(state.logits, draws[step], params)
        tokens[rows, step], logprobs[rows, step] = token, logprob
        over = (token[:, None] == ends).any(-1)
        if stop is not None:
            over |= torch.tensor(stop(tokens[rows, : step + 1].tolist()), device=device)
        ending = (over | (limit == step + 1)) & ~done
        if ending.any():
            yield from _responses(tokens, logprobs, rows[ending], step + 1, over[ending])
            done |= ending
            kept = (~done).nonzero()[:, 0]
            if len(kept) == 0:
                return
            if len(kept) <= (1 - DROPPED) * len(rows):
                rows, limit, draws, done = rows[kept], limit[kept], draws[:, kept], done[kept]
                token = token[kept]
                state.keep(kept)
        if aborted():
            yield from _responses(tokens, logprobs, rows[~done], step + 1, torch.zeros_like(done))
            return
        state.advance(token)


def _responses(
    tokens: Tensor, logprobs: Tensor, rows: Tensor, length: int, ended: Tensor
) -> Iterator[tuple[int, Decoded]]:
    """What stands in `rows` of `tokens` and `logprobs`, `length` tokens each."""
    written = zip(tokens[rows, :length].tolist(), logprobs[rows, :length].tolist(), ended.tolist())
    for row, response in zip(rows.tolist(), written):
        yield row, Decoded(*response)


class _State(Protocol):
    """What has been read of every row."""

    logits: Tensor  # [b, V] fp32, of the token to draw

    def keep(self, rows: Tensor) -> None:
        """Only these rows of the cache; the logits are the next step's affair."""

    def advance(self, token: Tensor) -> None:
        """Take in one token a row [b]."""


def _prefilled(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], dense: DenseDecoder | None, steps: int
) -> _State:
    """All prompts read; equal ones pass through the model once."""
    unique: dict[tuple[int, ...], int] = {}
    place = torch.tensor([unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts])
    longest = max(map(len, unique))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in unique], device=model.device)
    padding = torch.tensor([longest - len(p) for p in unique], device=model.device)
    filled = torch.arange(longest, device=model.device) >= padding[:, None]
    positions = (torch.arange(longest, device=model.device) - padding[:, None]).clamp(min=0)
    padded = bool(padding.any())
    cache = Cache(layers=[GrowingLayer() for _ in range(model.config.num_hidden_layers)])
    logits = _forward(model, ids, cache, positions, _prefill_mask(filled) if padded else None)
    state = _Modules(model, cache, logits, positions[:, -1:], filled if padded else None)
    if dense is not None:
        return _Dense.of(dense, state, place, steps)
    if len(unique) < len(prompts):
        state.keep(place.to(model.device))
        state.logits = logits[place.to(model.device)]
    return state


@dataclass(slots=True)
class _Modules:
    """The next step by the model itself. `filled` [b, t] marks the cache's tokens, None where no prompt is
    padded."""

    model: PreTrainedModel
    cache: Cache
    logits: Tensor
    positions: Tensor  # [b, 1] of the last token
    filled: Tensor | None

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.positions = self.positions[rows]
        self.filled = None if self.filled is None else self.filled[rows]

    def advance(self, token: Tensor) -> None:
        self.positions = self.positions + 1
        mask = None
        if self.filled is not None:
            self.filled = F.pad(self.filled, (0, 1), value=True)
            mask = self.filled[:, None, None]
        self.logits = _forward(self.model, token[:, None], self.cache, self.positions, mask)


@dataclass(slots=True)
class _Dense:
    """The next step without the modules; room for every token is there from the start."""

    decoder: DenseDecoder
    cache: DenseCache
    angles: tuple[Tensor, Tensor]
    logits: Tensor

    @classmethod
    def of(cls, decoder: DenseDecoder, read: _Modules, place: Tensor, steps: int) -> _Dense:
        """`place` [b]: which of the prompts read a row has."""
        layers: Any = read.cache.layers
        length = layers[0].keys.shape[-2]
        starts = length - 1 - read.positions[place, 0]
        keys, values = [x.keys[place] for x in layers], [x.values[place] for x in layers]
        cache = decoder.cache(keys, values, starts, steps)
        return cls(decoder, cache, decoder.angles(length + steps), read.logits[place])

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)

    def advance(self, token: Tensor) -> None:
        self.logits = self.decoder.step(token, self.cache, self.angles)


def _prefill_mask(filled: Tensor) -> Tensor:
    """[b, 1, P, P] bool. Padding sees itself: a row that sees nothing would be NaN."""
    length = filled.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=filled.device).tril()
    return (causal & filled[:, None, :] | torch.eye(length, dtype=torch.bool, device=filled.device))[:, None]


def _forward(
    model: PreTrainedModel, ids: Tensor, cache: Cache, positions: Tensor, mask: Tensor | None
) -> Tensor:
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1].float()
