"""The contract of a rollout engine. One object per rank; it may own a model, a process or a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from ppo_lightning.samples import Sample


# writes responses in place, as `Engine.generate` does
Write: TypeAlias = "Callable[[list[Sample], SamplingParams, Sequence[int]], None]"

# told of a sample that is filled; see `Engine.generate`
Finished: TypeAlias = "Callable[[Sample], None]"


class EngineError(RuntimeError):
    """The engine cannot go on; the message says what it saw last."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw responses. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 keep the whole
    vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class Engine(Protocol):
    def generate(
        self,
        samples: Sequence[Sample],
        params: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> None:
        """Write a response to each sample, in place. On entry `tokens` holds the prompt; on return `tokens`,
        `response`, `response_length`, `rollout_log_probs`, `status` and `weight_versions` are filled. The
        matched stop token stays in `tokens` and is left out of `response`. `seeds[i]` alone decides the
        draws of sample i where the engine can promise it (the embedded one does). A prompt that leaves no
        room for a token raises ValueError.

        `finished` is called once for each sample, as soon as all of it is filled, also where it is aborted or
        failed: from this thread or one of the engine's own, one call at a time, before `generate` returns.
        It must be quick; what it raises ends the call."""

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights under Hugging Face names, full tensors, each exactly once. The iterator is
        collective: it must be drained on every rank even where this engine has no use for a tensor."""

    def abort(self) -> None:
        """End a running `generate`, from another thread: it returns what was written until then."""

    def sleep(self) -> None:
        """Free the accelerator while training; idempotent."""

    def wake(self) -> None:
        """Undo `sleep`; weights must be sent again before the next `generate`. Idempotent."""

    def health(self) -> bool: ...

    def close(self) -> None:
        """End whatever the engine owns; idempotent, safe after a failure."""


def sample_seed(seed: int, rollout: int, prompt: int, sample: int) -> int:
    """A 63-bit seed of one draw; the same whatever the number of ranks (splitmix64 over the four numbers)."""
    state = 0
    for part in (seed, rollout, prompt, sample):
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
