"""The layers' arithmetic beside the matrix products, with gradients in few passes over memory.

    t  tokens      h  width of a row      a  heads      d  head dimension
Autograd's own formulas of these walk over a layer's activations about twice as often, and a processor's time
between two products is that walk. In fp32 on a processor compiled loops (`ppo_lightning.megatron.loops`) take
one walk each; other types have torch's operations. Results are those of the plain formulas up to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ppo_lightning.compiled import spread, swiglu
from ppo_lightning.megatron import loops


def _compiled(*tensors: Tensor) -> bool:
    """Whether the loops can have these."""
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def _arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    return tuple((x.detach() if x.requires_grad else x).contiguous().numpy() for x in tensors)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1)).contiguous()


def _blocks(rows: int, *shape: int) -> Tensor:
    """What the loops add up a weight's gradient in."""
    return torch.zeros(-(-rows // loops.BLOCK), *shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Own gradient in fp32 and fp64 on the
    CPU."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return (_CompiledRMSNorm if _compiled(x, weight) else _RMSNorm).apply(x, weight, eps)


class _CompiledRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        out, scale = torch.empty_like(rows), torch.empty(len(rows))
        spread(loops.norm, len(rows), *_arrays(rows, weight), np.float32(eps), *_arrays(out, scale))
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(rows), _blocks(*rows.shape)
        arrays = _arrays(rows, weight[None], scale, _rows(grad), grad_x, grad_weight)
        spread(loops.norm_backward, len(rows), *arrays, multiple=loops.BLOCK)
        return grad_x.view(grad.shape), grad_weight.sum(0), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # y = x s w: dy = s (g w) - x s^3 mean(g w x), and what the weight wants is the sum of g x s
        product = torch.mul(grad, x)
        rows = product.view(-1, x.size(-1))
        grad_weight = scale.view(-1) @ rows
        along = (rows @ weight).view_as(scale).mul_(scale**3).div_(-x.size(-1))
        grad_x = torch.mul(grad, weight, out=product).mul_(scale).addcmul_(x, along)
        return grad_x, grad_weight, None


class SwiGLU(torch.nn.Module):
    """[..., 2 f] of gate and up -> silu(gate) * up [..., f]; what Megatron's MLP takes as its activation."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, both: Tensor) -> Tensor:
        return (_CompiledSwiGLU if _compiled(both) else _SwiGLU).apply(both)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's MLP asks each of its parts for what a checkpoint holds of it: here, nothing."""
        return {}


class _CompiledSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        rows = _rows(both)
        out = torch.empty(len(rows), both.size(-1) // 2)
        spread(swiglu, len(rows), *_arrays(rows, out))
        ctx.save_for_backward(rows)
        return out.view(*both.shape[:-1], out.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        grad_both = torch.empty_like(rows)
        spread(loops.swiglu_backward, len(rows), *_arrays(rows, _rows(grad), grad_both))
        return grad_both.view(*grad.shape[:-1], rows.size(1))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        grad_both = torch.empty_like(both)
        grad_gate, grad_up = grad_both.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        return grad_both


def rotary_heads(
    joint: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [t, g r, d], keys and values [t, g, d] from their joint product [t, g, r + 2, d] (a group's
    queries, key, value): queries and keys after their norms [d], if any, and the rotary embedding of
    `rotate`."""
    weights = norms or ()
    if _compiled(joint, cos, *weights):
        return _CompiledHeads.apply(joint, eps, cos, sin, *weights)
    query, key, value = joint.split((joint.size(2) - 2, 1, 1), 2)
    query, key, value = query.flatten(1, 2), key.squeeze(2), value.squeeze(2)
    if norms is not None:
        query, key = rms_norm(query, norms[0], eps), rms_norm(key, norms[1], eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


class _CompiledHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, eps: float, cos: Tensor, sin: Tensor, *norms: Tensor
    ) -> tuple[Tensor, ...]:
        tokens, groups, kinds, width = joint.shape
        each, rows, angles = kinds - 2, _rows(joint), (_rows(cos), _rows(sin))
        weights = torch.stack(norms).detach() if norms else torch.ones(2, width)
        outs = [torch.empty(tokens, groups * n, width) for n in (each, 1, 1)]
        scales = torch.empty(tokens * groups * (each + 1))
        taken = (*_arrays(rows), each, *_arrays(weights), bool(norms), np.float32(eps))
        spread(loops.heads, tokens, *taken, *_arrays(*angles, *map(_rows, outs), scales))
        ctx.save_for_backward(rows, weights, scales, *angles)
        ctx.shape, ctx.normed = joint.shape, bool(norms)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, scales, cos, sin = ctx.saved_tensors
        tokens, _, kinds, width = ctx.shape
        grad_joint, grad_norms = torch.empty_like(rows), _blocks(tokens, 2, width)
        arrays = _arrays(scales, cos, sin, *map(_rows, grads), grad_joint, grad_norms.view(-1, width))
        taken = (*_arrays(rows), kinds - 2, *_arrays(weights), ctx.normed)
        spread(loops.heads_backward, tokens, *taken, *arrays, multiple=loops.BLOCK)
        return grad_joint.view(ctx.shape), None, None, None, *(grad_norms.sum(0) if ctx.normed else ())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [t, a, d]: halves of a head are the two coordinates. cos and sin: [t, 1, d/2]."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """In the type of cos and sin, rounded once at the end."""
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    (first, second), (to_first, to_second) = x.to(cos.dtype).chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)


def to_grid(x: Tensor, cell: Tensor, token: Tensor) -> Tensor:
    """Packed [t, ...] -> rows of one length, flat: [b l, ...]. cell: [t], where each token stands; token: [b
    l], which token a cell shows (any one where it is padding: padding must not reach a result)."""
    return _ToGrid.apply(x, cell, token)


class _ToGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(cell)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def from_grid(x: Tensor, cell: Tensor) -> Tensor:
    """The inverse of `to_grid`: [b l, ...] -> [t, ...]."""
    return _FromGrid.apply(x, cell)


class _FromGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Tensor) -> Tensor:
        ctx.save_for_backward(cell)
        ctx.cells = x.size(0)
        return x.index_select(0, cell)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spread = grad.new_zeros(ctx.cells, *grad.shape[1:])
        return spread.index_copy_(0, ctx.saved_tensors[0], grad), None


def softmax_sums(
    logits: Tensor, targets: Tensor, chosen: Tensor, normalizer: Tensor, entropies: Tensor | None
) -> None:
    """Of each row of logits [t, v]: the logit at `targets` -> chosen, log sum exp -> normalizer, and the
    softmax's entropy -> entropies, all [t]."""
    if _compiled(logits, normalizer):
        empty = torch.empty(0) if entropies is None else entropies
        spread(loops.softmax_sums, len(logits), *_arrays(logits, targets, chosen, normalizer, empty))
        return
    logp = torch.log_softmax(logits, 1)
    torch.gather(logits, 1, targets[:, None], out=chosen[:, None])
    normalizer.copy_(chosen - logp.gather(1, targets[:, None]).squeeze(1))
    if entropies is not None:
        entropies.copy_(-(logp.exp()[:, None, :] @ logp[:, :, None]).flatten())


def softmax_slopes(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    slopes: Tensor,
    entropy_slopes: tuple[Tensor, Tensor] | None,
    out: Tensor,
    work: Tensor,
) -> None:
    """The gradient of logits [t, v] -> out, for p = exp(logits - normalizer): slopes ([target] - p), and for
    the entropy H, of (its slopes, H): - slopes p (log p + H). A target may be -1: of none of these columns.
    `work` is as large and may be the logits."""
    if _compiled(logits, normalizer):
        nothing = torch.empty(0)
        given = (logits, targets, normalizer, slopes, *(entropy_slopes or (nothing, nothing)), out)
        spread(loops.softmax_slopes, len(logits), *_arrays(*given))
        return
    logp = torch.sub(logits, normalizer[:, None], out=out)
    p = torch.exp(logp, out=work)
    pulled = slopes[:, None]
    if entropy_slopes is not None:
        flat, entropies = (x[:, None] for x in entropy_slopes)
        pulled = logp.mul_(flat).add_(pulled + flat * entropies)
    torch.mul(p, pulled, out=out).neg_()
    pushed = torch.where(targets >= 0, slopes, 0)
    out.scatter_add_(1, targets.clamp(min=0)[:, None], pushed[:, None])
