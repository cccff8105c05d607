"""Responses written a piece at a time, so that long ones need not hold up a rollout (partial rollouts, as in
Kimi k1.5, 2501.12599)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ppo_lightning.engines.base import Engine, SamplingParams
from ppo_lightning.samples import Sample, Status


def write_piece(
    engine: Engine,
    samples: Sequence[Sample],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    piece: int,
    mask_older: bool,
    text: Callable[[Sequence[int]], str],
) -> None:
    """Let `engine` go on with each pending response by at most `piece` tokens, in place. A response that is
    neither finished nor at `params.max_new_tokens` stays pending. `mask_older` takes what older weights wrote
    out of the training; `text` decodes a response's tokens. Log-probs and weight versions are joined.

    The engine sees prompt and response so far as the prompt: one call for each length that may be written,
    which are two at the most."""
    pending = [(s, seed) for s, seed in zip(samples, seeds, strict=True) if s.status is Status.PENDING]
    rooms = {min(piece, params.max_new_tokens - s.response_length) for s, _ in pending}
    for room in sorted(rooms):
        chosen = [
            (s, seed) for s, seed in pending if min(piece, params.max_new_tokens - s.response_length) == room
        ]
        parts = [
            Sample(prompt=s.prompt, tokens=list(s.tokens), group_index=s.group_index, index=s.index)
            for s, _ in chosen
        ]
        engine.generate(parts, replace(params, max_new_tokens=room), [seed for _, seed in chosen])
        for (sample, _), part in zip(chosen, parts, strict=True):
            _join(sample, part, room, params, mask_older, text)


def _join(
    sample: Sample,
    part: Sample,
    room: int,
    params: SamplingParams,
    mask_older: bool,
    text: Callable[[Sequence[int]], str],
) -> None:
    before, logprobs = sample.response_length, sample.rollout_log_probs or []
    if part.failed:
        sample.status = Status.FAILED
        return
    if before and mask_older and sample.weight_versions[-1:] != part.weight_versions[:1]:
        sample.loss_mask = [0] * before
    if sample.loss_mask is not None:
        sample.loss_mask = sample.loss_mask + [1] * part.response_length
    sample.tokens = part.tokens
    sample.response_length = before + part.response_length
    sample.rollout_log_probs = logprobs + (part.rollout_log_probs or [])
    sample.weight_versions = list(dict.fromkeys([*sample.weight_versions, *part.weight_versions]))
    cut = part.status is Status.TRUNCATED and part.response_length == room
    waits = cut and sample.response_length < params.max_new_tokens
    sample.status = Status.PENDING if waits else part.status
    # joined texts of pieces differ from the text of joined pieces: a character may lie across their border
    ended = part.status is Status.COMPLETED
    written = sample.tokens[-sample.response_length :]
    sample.response = text(written[:-1] if ended else written) if before else part.response
