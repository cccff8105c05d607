"""What stands on the last hidden state: log-probabilities and entropy of tokens, or a value.

    m  selected tokens of this rank      h  hidden size      v  vocabulary columns of this tensor rank
The policy head works in chunks of tokens. Where all tokens fit into one chunk, it keeps their logits for the
backward pass; else the backward pass computes a chunk's logits again. All of it is fp32 (or wider), whatever
the weights are.
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
from torch import Tensor, nn

from ppo_lightning.megatron.kernels import softmax_slopes, softmax_sums

CHUNK_ELEMENTS = 2**26  # logits in flight by default: 256 MiB, and once or twice as much for work on them
CACHED_ELEMENTS = 2**21  # of a piece of a chunk on a processor: what stays in its cache
CACHED_ROWS = 256  # at least: fewer tokens make slow products


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
        # of the distribution over this rank's columns alone; without columns its weight is nothing
        normalizer = hidden.new_full((hidden.size(0),), torch.finfo(dtype).min, dtype=dtype)
        chosen, spread = torch.zeros_like(normalizer), torch.zeros_like(normalizer)
        keep = hidden.size(0) <= chunk_size and any(ctx.needs_input_grad)
        piece = _piece(hidden, chunk_size, columns)
        logits = normalizer.new_empty(hidden.size(0) if keep else min(piece, hidden.size(0)), columns)
        for rows in _chunks(hidden.size(0) if columns else 0, piece):
            x = logits[rows] if keep else logits[: _length(rows)]
            torch.mm(_scaled(hidden[rows], dtype, temperature), vocabulary.T, out=x)
            target = local_targets[rows].clamp(0, columns - 1)
            softmax_sums(x, target, chosen[rows], normalizer[rows], spread[rows] if entropy else None)

        logprobs, normalizer, entropies = _combine(normalizer, chosen, spread, here, group)
        targets = local_targets.masked_fill(~here, -1)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropies, logits if keep else None)
        ctx.columns, ctx.temperature, ctx.piece, ctx.entropy = columns, temperature, piece, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropies, kept = ctx.saved_tensors
        dtype, columns = normalizer.dtype, ctx.columns
        vocabulary = weight[:columns].to(dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        wanted = grad_logprobs != 0
        if ctx.entropy:
            wanted = wanted | (grad_entropies != 0)
        active = wanted.nonzero().squeeze(1)  # masked and clipped tokens cost nothing and cannot spread a NaN
        every = active.numel() == hidden.size(0)
        logits, slopes = (normalizer.new_empty(min(ctx.piece, active.numel()), columns) for _ in range(2))
        for chunk in _chunks(active.numel() if columns else 0, ctx.piece):
            rows: Any = chunk if every else active[chunk]
            x, out = logits[: _length(chunk)], slopes[: _length(chunk)]
            scaled = _scaled(hidden[rows], dtype, ctx.temperature)
            given = torch.mm(scaled, vocabulary.T, out=x) if kept is None else kept[rows]
            spread = (grad_entropies[rows], entropies[rows]) if ctx.entropy else None
            softmax_slopes(given, targets[rows], normalizer[rows], grad_logprobs[rows], spread, out, x)
            if grad_hidden is not None:
                grad_hidden[rows] = torch.mm(out, vocabulary).div_(ctx.temperature)
            if grad_weight is not None:
                grad_weight[:columns].addmm_(out.T, scaled)
        return grad_hidden, grad_weight, *(None,) * 6


def _piece(hidden: Tensor, chunk_size: int, columns: int) -> int:
    """Tokens whose logits are worked on at a time."""
    if hidden.device.type != "cpu":
        return chunk_size
    return min(chunk_size, max(CACHED_ROWS, CACHED_ELEMENTS // max(columns, 1)))


def _chunks(size: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, size)) for start in range(0, size, chunk_size)]


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _scaled(hidden: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """The temperature applied where it costs least: to h columns instead of v."""
    return hidden.to(dtype) / temperature


def _combine(
    local: Tensor, chosen: Tensor, spread: Tensor, here: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, log normalizer, entropy) from every rank's own normalizer, target logit and entropy.

    With s the share of a rank's columns in the whole, H = sum of s (H_rank - log s) over the ranks.
    """
    if group is None or group.size() == 1:
        return torch.where(here, chosen - local, -torch.inf), local, spread
    highest = local.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = (local - highest).exp()
    dist.all_reduce(total, group=group)
    normalizer = highest + total.log()
    share = (local - normalizer).exp()
    sums = torch.stack(
        (torch.where(here, chosen - normalizer, 0), share * spread - torch.special.xlogy(share, share))
    )
    dist.all_reduce(sums, group=group)
    return sums[0], normalizer, sums[1]


def fresh_value_head(hidden_size: int, seed: int) -> Tensor:
    """Initial weight [1, h] of a value head, N(0, 0.02): the same on every rank, in every layout."""
    return torch.empty(1, hidden_size).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))


class ValueHead(nn.Linear):
    """hidden [t, 1, h] -> values [t], in the place of the output layer; replicated over tensor ranks.

    It computes in fp32. Its parameters have the model's type, as Megatron's optimizers cannot save a model of
    two types; under bf16 the optimizer holds them in fp32, like all others.
    Under sequence parallelism every tensor rank computes its own slice of the tokens, and the values are
    gathered: weight *and bias* then see a part of the gradient each, and are marked so that Megatron sums
    it.
    """

    def __init__(self, config: TransformerConfig, *, seed: int, group: dist.ProcessGroup) -> None:
        super().__init__(config.hidden_size, 1, bias=True, dtype=config.params_dtype)
        self.group = group
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        with torch.no_grad():
            self.weight.copy_(fresh_value_head(config.hidden_size, seed))
            self.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        values = nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
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
