"""Between samples, the [B, T] tensors of an experience and the flat [n] fields of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ppo_lightning.samples import Experience, Microbatch, Sample, TokenFields

if TYPE_CHECKING:
    from torch import Tensor

PER_TOKEN_SLOTS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "old_values", "advantages", "returns")


def gather(
    samples: Sequence[Sample],
    rewards: Tensor,
    weights: Tensor,
    *,
    with_rollout_logprobs: bool | None = None,
) -> Experience:
    """One data rank's samples as tensors. rewards: [B], shaped; weights: [B], of each trainable token of a
    sample.

    `with_rollout_logprobs` decides whether that slot is filled; None: where a sample has them. Data ranks
    must agree, so decide from the whole rollout. Raises ValueError, naming the sample, where its fields
    contradict each other."""
    samples = list(samples)
    for sample in samples:
        _check(sample)
    lengths = torch.tensor([s.response_length for s in samples], dtype=torch.int64)
    mask = _rows([s.trainable for s in samples], lengths, torch.bool)
    if with_rollout_logprobs is None:
        with_rollout_logprobs = any(s.rollout_log_probs is not None for s in samples)
    return Experience(
        samples=samples,
        rewards=rewards.float(),
        lengths=lengths,
        mask=mask,
        weights=torch.where(mask, weights.float()[:, None], 0.0),
        rollout_logprobs=_rollout_logprobs(samples, lengths) if with_rollout_logprobs else None,
    )


def microbatches(
    experience: Experience, rows_per_batch: Sequence[Sequence[int]], *, without: str | None = None
) -> list[Microbatch]:
    """Micro-batches of the given rows, with the slots that the experience holds now; a slot that is None
    stays None, as does that named `without`. No rows give a dummy with fields of length 0."""
    if without is not None:
        experience = replace(experience, **{without: None})
    return [_microbatch(experience, list(rows)) for rows in rows_per_batch]


def scatter(
    experience: Experience,
    batches: Sequence[Microbatch],
    flats: Sequence[Tensor],
    onto: Tensor | None = None,
) -> Tensor:
    """[B, T] from one flat [n] tensor per micro-batch; elsewhere what `onto` has, or zeros."""
    first = flats[0] if flats else experience.weights
    out = torch.zeros(experience.mask.shape, dtype=first.dtype, device=experience.mask.device)
    if onto is not None:
        out.copy_(onto)
    for batch, flat in zip(batches, flats, strict=True):
        if flat.numel() != batch.num_response_tokens:
            raise ValueError(f"{flat.numel()} numbers for {batch.num_response_tokens} response tokens")
        for row, part in zip(batch.rows, flat.to(out.device).split(batch.response_lengths)):
            out[row, : part.numel()] = part
    return out


def _microbatch(experience: Experience, rows: list[int]) -> Microbatch:
    samples = [experience.samples[row] for row in rows]
    lengths = [s.response_length for s in samples]

    def flat(x: Tensor) -> Tensor:
        return torch.cat([x[:0].flatten(), *(x[row, :length] for row, length in zip(rows, lengths))])

    filled = {slot: getattr(experience, slot) for slot in PER_TOKEN_SLOTS}
    sequence = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths, dtype=torch.int64))
    fields = TokenFields(
        mask=flat(experience.mask),
        weight=flat(experience.weights),
        **{slot: flat(x) for slot, x in filled.items() if x is not None},
        sequence=sequence.to(experience.mask.device),
        num_sequences=len(rows),
    )
    return Microbatch(rows, [torch.tensor(s.tokens, dtype=torch.int64) for s in samples], lengths, fields)


def _rows(rows: Sequence[Sequence[float]], lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Ragged rows, left-aligned in [B, T] and zero behind."""
    longest = int(lengths.max()) if len(rows) else 0
    out = torch.zeros(len(rows), longest, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def _rollout_logprobs(samples: Sequence[Sample], lengths: Tensor) -> Tensor:
    for s in samples:
        if s.rollout_log_probs is None and any(s.trainable):
            raise ValueError(
                f"sample {s.index} has no rollout_log_probs while others of the rollout have; the "
                "generate function must fill them for all samples or for none"
            )
    return _rows([s.rollout_log_probs or [] for s in samples], lengths, torch.float32)


def _check(s: Sample) -> None:
    if not 0 <= s.response_length <= len(s.tokens):
        raise ValueError(f"sample {s.index}: response_length {s.response_length} of {len(s.tokens)} tokens")
    for name in ("loss_mask", "rollout_log_probs"):
        per_token = getattr(s, name)
        if per_token is not None and len(per_token) != s.response_length:
            raise ValueError(
                f"sample {s.index}: {len(per_token)} entries in {name} for {s.response_length} response "
                "tokens; whoever wrote the response must write one entry per token"
            )
