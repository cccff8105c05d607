"""Who trains on what: optimizer batches, data ranks, micro-batches, and the cut over context-parallel ranks.

Integers only, and the same result on every rank that computes it from the same lengths.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step. `ranks[r]` are data rank r's micro-batches, each a list of sample indices of the
    rollout; every rank has the same number of them, empty ones where samples are short."""

    ranks: list[list[list[int]]]

    @property
    def samples(self) -> list[int]:
        """Indices of the whole optimizer batch, ascending."""
        return sorted(i for batches in self.ranks for batch in batches for i in batch)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    steps: list[StepPlan]
    oversized: list[int]  # samples longer than the token budget; each has a micro-batch to itself
    efficiency: (
        float  # tokens / (micro-batches x budget); without a budget the fullest micro-batch stands for it
    )

    def samples_of(self, rank: int) -> list[int]:
        """Sample indices of a data rank, in the order in which it works on them: the rows of its
        experience."""
        return [i for step in self.steps for batch in step.ranks[rank] for i in batch]

    def rows_of(self, rank: int) -> list[list[list[int]]]:
        """Per step and micro-batch of a data rank: row numbers in its experience."""
        row = iter(range(len(self.samples_of(rank))))
        return [[[next(row) for _ in batch] for batch in step.ranks[rank]] for step in self.steps]


def plan_rollout(
    lengths: Sequence[int],
    *,
    num_steps: int,
    data_ranks: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    balance: bool = False,
    multiple_of: int = 1,
) -> RolloutPlan:
    """Cut a rollout into optimizer steps, data ranks and micro-batches.

    lengths: tokens (prompt and response) of every sample, in the rollout's order. Steps are equal
    consecutive parts. Give `micro_batch_size` (samples) or `max_tokens` (a micro-batch's budget); a sample
    beyond the budget gets a micro-batch of its own and one warning. `balance`: ranks get nearly equal
    numbers of tokens, else nearly equal numbers of samples, in order. The number of micro-batches is a
    multiple of `multiple_of` (virtual pipeline) and the same on every rank. Raises ValueError where the
    rollout does not divide into the steps."""
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(
            "give either micro_batch_size or max_tokens to cut micro-batches, not both or neither"
        )
    if len(lengths) % num_steps:
        raise ValueError(
            f"{len(lengths)} samples do not divide into {num_steps} optimizer steps; change "
            "rollout_batch_size, n_samples_per_prompt or num_steps_per_rollout"
        )
    size = len(lengths) // num_steps
    steps = []
    for first in range(0, len(lengths), size) if size else range(num_steps):
        samples = list(range(first, first + size))
        share = balanced_parts if balance else contiguous_parts
        parts = [[samples[i] for i in part] for part in share([lengths[s] for s in samples], data_ranks)]
        steps.append(StepPlan(_micro_batches(parts, lengths, micro_batch_size, max_tokens, multiple_of)))
    oversized = [i for i, n in enumerate(lengths) if max_tokens is not None and n > max_tokens]
    if oversized:  # a fixed text, so that Python's default filter shows it once a run
        warnings.warn(
            f"some samples are longer than a micro-batch's budget of {max_tokens} tokens; each gets a "
            "micro-batch of its own. Raise --max-tokens-per-gpu if memory allows, or shorten the responses.",
            stacklevel=2,
        )
    return RolloutPlan(steps, oversized, _efficiency(steps, lengths, max_tokens))


def _efficiency(steps: list[StepPlan], lengths: Sequence[int], max_tokens: int | None) -> float:
    batches = [b for step in steps for rank in step.ranks for b in rank]
    loads = [sum(lengths[i] for i in b) for b in batches]
    budget = max(loads, default=0) if max_tokens is None else max_tokens
    return sum(loads) / (len(loads) * budget) if loads and budget else 1.0


# ---- over data ranks -------------------------------------------------------------------------------------


def contiguous_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices in order, cut into `parts` runs whose sizes differ by at most one, longer runs first."""
    size, longer = divmod(len(lengths), parts)
    starts = [p * size + min(p, longer) for p in range(parts + 1)]
    return [list(range(a, b)) for a, b in pairwise(starts)]


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices in `parts` sets of nearly equal total length: the Karmarkar-Karp differencing method (1982)
    for several sets. Each set ascends. Ties are broken by index, so that every rank finds the same sets."""
    if parts == 1 or not lengths:
        return [list(range(len(lengths))), *([] for _ in range(parts - 1))]
    # A state is a tuple of (total, indices), largest total first; the heap gives the state of largest spread.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, length in enumerate(lengths):
        heap.append((-length, i, [(length, [i]), *((0, []) for _ in range(parts - 1))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second))]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    return [sorted(indices) for _, indices in heap[0][2]]


# ---- micro-batches ---------------------------------------------------------------------------------------


def _micro_batches(
    parts: list[list[int]],
    lengths: Sequence[int],
    micro_batch_size: int | None,
    max_tokens: int | None,
    multiple_of: int,
) -> list[list[list[int]]]:
    """Each rank's samples in micro-batches, as many on every rank."""
    if max_tokens is None:
        assert micro_batch_size is not None
        cut = [[p[i : i + micro_batch_size] for i in range(0, len(p), micro_batch_size)] for p in parts]
    else:
        cut = [first_fit_decreasing(p, lengths, max_tokens) for p in parts]
    count = max(max(len(c) for c in cut), 1)
    count += -count % multiple_of
    if max_tokens is not None:
        cut = [_spread(c, lengths, count, max_tokens) for c in cut]
    return [c + [[] for _ in range(count - len(c))] for c in cut]


def first_fit_decreasing(samples: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Samples in micro-batches of at most `max_tokens`: longest first, each into the first that has room."""
    batches: list[list[int]] = []
    room: list[int] = []
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            place = len(batches)
            batches.append([])
            room.append(max(max_tokens, lengths[i]))
        batches[place].append(i)
        room[place] -= lengths[i]
    return [sorted(b) for b in batches]


def _spread(batches: list[list[int]], lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]]:
    """The same samples over `count` micro-batches of nearly equal length where the budget allows it, else
    over more by halving the fullest: an even pipeline has no stragglers."""
    samples = sorted(i for b in batches for i in b)
    even = [[samples[k] for k in part] for part in balanced_parts([lengths[i] for i in samples], count)]
    if all(sum(lengths[i] for i in b) <= max_tokens or len(b) == 1 for b in even):
        return sorted((b for b in even if b), key=lambda b: b[0])
    batches = list(batches)
    while len(batches) < count and any(len(b) > 1 for b in batches):
        fullest = max((b for b in batches if len(b) > 1), key=lambda b: (sum(lengths[i] for i in b), -b[0]))
        batches.remove(fullest)
        halves = balanced_parts([lengths[i] for i in fullest], 2)
        batches += [[fullest[k] for k in half] for half in halves]
    return sorted(batches, key=lambda b: b[0])


# ---- over context-parallel ranks -------------------------------------------------------------------------


def zigzag_indices(lengths: Sequence[int], cp: int, rank: int) -> list[int]:
    """Positions, in the packed concatenation of sequences of padded `lengths`, that context-parallel rank
    `rank` of `cp` holds: of every sequence the chunks `rank` and `2 cp - 1 - rank` of 2 cp, so that causal
    attention costs all ranks the same. Raises ValueError where 2 cp does not divide a length (cp = 1: every
    position, any length)."""
    if cp == 1:
        return list(range(sum(lengths)))
    indices: list[int] = []
    start = 0
    for length in lengths:
        if length % (2 * cp):
            raise ValueError(
                f"padded length {length} is not a multiple of 2 x cp = {2 * cp}; pad the sequence"
            )
        chunk = length // (2 * cp)
        for part in (rank, 2 * cp - 1 - rank):
            indices.extend(range(start + part * chunk, start + (part + 1) * chunk))
        start += length
    return indices
