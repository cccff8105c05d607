"""What stands on the last hidden state: log-probabilities and entropy of tokens, or a value.

    m  selected tokens of this rank      h  hidden size      v  vocabulary columns of this tensor rank
The policy head works in chunks of tokens and keeps no logits: the forward pass keeps two numbers a token, the
backward pass computes a chunk's logits again. All of it is fp32 (or wider), whatever the weights are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

CHUNK_ELEMENTS = 2**26  # logits in flight when no chunk size is given: 256 MiB


def log_probs_and_entropy(
    hidden: Tensor,  # [m, h]
    weight: Tensor,  # [v, h]
    targets: Tensor,  # [m] int64, over the whole vocabulary
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy in nats: [m] each.

    `weight` holds this rank's v columns of a vocabulary that is padded to v times the size of `group`;
    columns from `vocab_size` on are no tokens and get no probability. The gradient of `hidden` is that of
    this rank's columns: the caller sums it over `group`. `chunk_size` tokens have logits at a time. m may
    be 0.
    """
    rank = 0 if group is None else group.rank()
    first = rank * weight.size(0)
    columns = max(0, min(vocab_size - first, weight.size(0)))
    if chunk_size is None:
        chunk_size = max(16, CHUNK_ELEMENTS // max(columns, 1))
    logprobs, entropies = VocabParallelLogProbs.apply(
        hidden, weight, targets - first, columns, group, temperature, chunk_size, entropy
    )
    return logprobs, entropies if entropy else None


class VocabParallelLogProbs(torch.autograd.Function):
    """See `log_probs_and_entropy`. With x the logits, p the softmax, y the target, H the entropy:
    d logp / dx = [y] - p, and d H / dx = -p (log p + H)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local_targets: Tensor,
        columns: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk_size: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        vocabulary = weight[:columns].to(dtype)
        here = (local_targets >= 0) & (local_targets < columns)
        # a rank without columns keeps the lowest finite maximum: its share of the sums becomes exactly 0
        peak = hidden.new_full((hidden.size(0),), torch.finfo(dtype).min, dtype=dtype)
        total, weighted, chosen = (torch.zeros_like(peak) for _ in range(3))
        buffer, spare = _buffers(peak, min(chunk_size, hidden.size(0)), columns, entropy)
        for rows in _chunks(hidden.size(0) if columns else 0, chunk_size):
            logits = torch.mm(
                _scaled(hidden[rows], dtype, temperature), vocabulary.T, out=buffer[: _length(rows)]
            )
            torch.amax(logits, 1, out=peak[rows])
            logits.sub_(peak[rows, None])
            safe = local_targets[rows].clamp(0, columns - 1)
            chosen[rows] = logits.gather(1, safe[:, None]).squeeze(1)
            exponentials = torch.exp(logits, out=spare[: _length(rows)])
            total[rows] = exponentials.sum(1)
            if entropy:
                weighted[rows] = exponentials.mul_(logits).sum(1)

        logprobs, normalizer, entropies = _combine(peak, total, weighted, chosen, here, group)
        ctx.save_for_backward(hidden, weight, local_targets.masked_fill(~here, -1), normalizer, entropies)
        ctx.columns, ctx.temperature, ctx.chunk_size, ctx.entropy = columns, temperature, chunk_size, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropies = ctx.saved_tensors
        dtype, columns = normalizer.dtype, ctx.columns
        vocabulary = weight[:columns].to(dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        wanted = grad_logprobs != 0
        if ctx.entropy:
            wanted = wanted | (grad_entropies != 0)
        active = wanted.nonzero().squeeze(1)  # masked and clipped tokens cost nothing and cannot spread a NaN
        buffer, spare = _buffers(normalizer, min(ctx.chunk_size, active.numel()), columns, ctx.entropy)
        for chunk in _chunks(active.numel() if columns else 0, ctx.chunk_size):
            rows = active[chunk]
            scaled = _scaled(hidden[rows], dtype, ctx.temperature)
            logits = torch.mm(scaled, vocabulary.T, out=buffer[: rows.numel()])
            logits.sub_(normalizer[rows, None])  # now log p
            slope = grad_logprobs[rows, None]
            slopes = torch.exp(logits, out=spare[: rows.numel()])
            if ctx.entropy:
                slopes.mul_(logits.add_(entropies[rows, None]).mul_(-grad_entropies[rows, None]).sub_(slope))
            else:
                slopes.mul_(-slope)
            here = (targets[rows] >= 0).nonzero().squeeze(1)
            slopes[here, targets[rows][here]] += slope[here, 0]
            if grad_hidden is not None:
                grad_hidden[rows] = torch.mm(slopes, vocabulary).div_(ctx.temperature)
            if grad_weight is not None:
                grad_weight[:columns].addmm_(slopes.T, scaled)
        return grad_hidden, grad_weight, *(None,) * 6


def _buffers(like: Tensor, rows: int, columns: int, two: bool) -> tuple[Tensor, Tensor]:
    """Room for one chunk's logits and their exponentials: the same where the logits are not needed again."""
    buffer = like.new_empty(rows, columns)
    return buffer, torch.empty_like(buffer) if two else buffer


def _chunks(size: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, size)) for start in range(0, size, chunk_size)]


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _scaled(hidden: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """The temperature applied where it costs least: to h columns instead of v."""
    return hidden.to(dtype) / temperature


def _combine(
    peak: Tensor,
    total: Tensor,
    weighted: Tensor,
    chosen: Tensor,
    here: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, log normalizer, entropy) from all ranks' sums, each relative to its own maximum."""
    highest = peak.clone()
    if group is not None and group.size() > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = peak - highest  # <= 0
    factor = shift.exp()
    sums = torch.stack(
        (factor * total, factor * (weighted + shift * total), torch.where(here, chosen + shift, 0))
    )
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, weighted, chosen = sums.unbind(0)
    log_total = total.log()
    return chosen - log_total, highest + log_total, log_total - weighted / total


def fresh_value_head(hidden_size: int, seed: int) -> Tensor:
    """Initial weight [1, h] of a value head, N(0, 0.02): the same on every rank, in every layout."""
    return torch.empty(1, hidden_size).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))


class ValueHead(torch.nn.Linear):
    """hidden [t, 1, h] -> values [t], in the place of the output layer; fp32, replicated over tensor ranks.

    Under sequence parallelism every tensor rank computes its own slice of the tokens, and the values are
    gathered: weight *and bias* then see a part of the gradient each, and are marked so that Megatron sums
    it.
    """

    def __init__(self, config: TransformerConfig, *, seed: int, group: dist.ProcessGroup) -> None:
        super().__init__(config.hidden_size, 1, bias=True, dtype=torch.float32)
        self.group = group
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        with torch.no_grad():
            self.weight.copy_(fresh_value_head(config.hidden_size, seed))
            self.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        values = super().forward(hidden.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.group
            )
        return values.flatten()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
