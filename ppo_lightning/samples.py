"""What travels through one PPO iteration: prompts, samples, experience, micro-batches.

Shapes used here and everywhere:
    B  samples of one data rank        T  longest response among them, in tokens
    b  samples of one micro-batch      n  response tokens of one micro-batch, concatenated
A *response token* is a token after the prompt. It is *trainable* when its `loss_mask` is 1: tool output or
environment text inside a response is not. Column t of a [B, T] tensor is the t-th response token of that row;
what lies past a response's end, or under mask 0, carries no meaning and may be anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

S = TypeVar("S")


class MissingSlotError(RuntimeError):
    """A slot that a callback should have filled is empty."""


def require(value: S | None, slot: str, filled_by: str) -> S:
    """`value`, or an error that names the slot and who fills it."""
    if value is None:
        raise MissingSlotError(
            f"{slot} is empty: it is filled by {filled_by}; add that callback to the Trainer"
        )
    return value


class Status(StrEnum):
    """How generation of a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"  # a stop token, a stop string or the end-of-sequence token
    TRUNCATED = "truncated"  # the response reached its maximal length
    ABORTED = "aborted"  # stopped from outside; what was generated until then is kept
    FAILED = "failed"  # nothing usable; the sample is not trained on


@dataclass(slots=True)
class Prompt:
    """One row of the prompt data."""

    index: int  # row in the data set, counted over all its files
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One response to one prompt. Engines fill it from `tokens` on, rewards fill `reward`."""

    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # prompt, then response
    response: str = ""
    response_length: int = 0  # in tokens
    loss_mask: list[int] | None = None  # [response_length]; None: every response token is trainable
    rollout_log_probs: list[float] | None = None  # [response_length], at the sampling temperature
    reward: float | None = None  # rewards are added up: several reward callbacks may each contribute
    status: Status = Status.PENDING
    weight_versions: list[int] = field(default_factory=list)  # weights that wrote the response, oldest first
    group_index: int = 0  # the prompt's place in the rollout; the n samples of a prompt share it
    index: int = 0  # the sample's place in the rollout: group_index * n_samples_per_prompt + its number

    def add_reward(self, value: float) -> None:
        """Add one reward term; the first makes the sum, later ones join it."""
        self.reward = float(value) if self.reward is None else self.reward + float(value)

    @property
    def trainable(self) -> list[int]:
        """The loss mask in full, [response_length]; zeros for a failed sample."""
        if self.status is Status.FAILED:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask

    def mask_if_truncated(self) -> None:
        """A sample cut at the maximal length says little about its answer: train on none of it."""
        if self.status is Status.TRUNCATED:
            self.loss_mask = [0] * self.response_length

    @property
    def failed(self) -> bool:
        return self.status is Status.FAILED

    @property
    def prompt_tokens(self) -> list[int]:
        return self.tokens[: len(self.tokens) - self.response_length]


@dataclass(slots=True)
class TokenFields:
    """Per-token inputs of a loss, aligned with each other. [n] each; None where nobody needs it."""

    mask: Tensor  # bool, trainable
    weight: (
        Tensor  # the token's share in the optimizer batch's mean: sums to 1 over the batch, 0 where masked
    )
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    sequence: Tensor | None = None  # int64, place of the token's sequence in the whole micro-batch
    num_sequences: int = 0  # sequences of the whole micro-batch: the same on ranks that hold parts of it

    def take(self, index: Tensor) -> TokenFields:
        """The same fields at `index`."""
        return self._each(lambda x: x[index])

    def to(self, device: torch.device | str) -> TokenFields:
        """The same fields on `device`."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenFields:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "num_sequences"}
        changed: dict[str, Any] = {name: change(x) for name, x in tensors.items() if x is not None}
        return replace(self, **changed)


@dataclass(slots=True)
class Experience:
    """One data rank's share of a scored rollout, and what the models say of it. All tensors fp32 on the CPU
    or the rank's device; every [B, T] tensor is read through `mask`."""

    samples: list[Sample]  # B, in the order of the plan
    rewards: Tensor  # [B]
    lengths: Tensor  # [B] int64, response tokens
    mask: Tensor  # [B, T] bool, trainable
    weights: Tensor  # [B, T] see TokenFields.weight
    rollout_logprobs: Tensor | None = None  # [B, T]
    old_values: Tensor | None = None  # [B, T]
    old_logprobs: Tensor | None = None  # [B, T]
    ref_logprobs: Tensor | None = None  # [B, T]
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]


@dataclass(slots=True)
class Microbatch:
    """Whole sequences for one forward pass; how they are cut over context-parallel ranks is the strategy's
    affair."""

    rows: list[int]  # b rows of the experience; empty: a dummy that keeps collectives in step
    tokens: list[Tensor]  # b tensors int64 [prompt + response]
    response_lengths: list[int]  # b
    fields: TokenFields  # [n], responses of `rows` one after another

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_lengths)


@dataclass(slots=True)
class TokenOutputs:
    """What a model says of response tokens. [n] fp32, aligned with TokenFields."""

    logprobs: Tensor | None = None  # log softmax(logits / temperature) of the token that stands there
    entropy: Tensor | None = None  # of the distribution that chose the token, nats; when asked for
    values: Tensor | None = None  # of the state before the token
