"""The layers' arithmetic beside the matrix products in fp32 on a processor, compiled by numba: each tensor is
read or written once, and a row stays in the first-level cache from one use to the next.

    t  tokens    h  width of a row    f  MLP width
    g  groups of r queries that share a key and a value    d  head dimension    v  vocabulary columns
Arrays are fp32 and without gaps. A weight's gradient is added up in blocks of BLOCK rows, and so does not
depend on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np

from ppo_lightning.compiled import exp, inverse_rms, loop

BLOCK = 64


@loop
def norm(x, weight, eps, out, scales, low, high):
    """x [t, h] -> out [t, h]; scales [t]"""
    for i in range(low, high):
        scale = scales[i] = inverse_rms(x[i], eps)
        for k in range(x.shape[1]):
            out[i, k] = x[i, k] * scale * weight[k]


@loop
def norm_backward(x, weight, scales, grad, out, grad_weight, low, high):
    """grad [t, h] -> out [t, h]; adds to grad_weight [blocks, h]. `low` is a multiple of BLOCK."""
    for i in range(low, high):
        _norm_slope(x, i, weight, scales[i], grad, i, out, grad_weight, i // BLOCK)


@loop
def _norm_slope(x, i, weight, scale, grad, at, out, grad_weight, block):
    """Of y = x s w: out = s (g w) - x s^3 mean(g w x), and the weight wants the sum of g x s. Whole arrays
    and numbers of rows: taking a row costs as much as reading a short one."""
    width, total = x.shape[1], np.float32(0)
    for k in range(width):
        product = grad[at, k] * x[i, k]
        total += product * weight[0, k]
        grad_weight[block, k] += product * scale
    along = scale * scale * scale * total / np.float32(width)
    for k in range(width):
        out[i, k] = grad[at, k] * weight[0, k] * scale - x[i, k] * along


@loop
def swiglu_backward(both, grad, out, low, high):
    """Of silu(a) = a p with p the sigmoid of a: silu'(a) = p + a p (1 - p). out: as `both`."""
    width, one = grad.shape[1], np.float32(1)
    for i in range(low, high):
        gate, up, slope = both[i, :width], both[i, width:], grad[i]
        to_gate, to_up = out[i, :width], out[i, width:]
        for k in range(width):
            p = one / (one + exp(-gate[k]))
            silu = gate[k] * p
            to_gate[k] = slope[k] * up[k] * (p + silu * (one - p))
            to_up[k] = slope[k] * silu


@loop
def turn(joint, kinds, first, weight, normed, eps, cos, sin, out, scales, low, high):
    """Heads from `first` on of each group, joint [t g kinds, d] -> out [t heads, d] as the model's attention
    sees them: after their norm (weight [1, d]), if any, and rotary embedding (cos, sin [t, d/2]). scales [t
    heads]"""
    groups = joint.shape[0] // (cos.shape[0] * kinds)
    each = out.shape[0] // (cos.shape[0] * groups)
    for i in range(low, high):
        for group in range(i * groups, (i + 1) * groups):
            for head in range(each):
                x, row = group * kinds + first + head, group * each + head
                scale = inverse_rms(joint[x], eps) if normed else np.float32(1)
                scales[row] = scale
                _turn(joint, x, scale, weight, cos, sin, i, out, row)


@loop
def _turn(x, row, scale, weight, cos, sin, i, out, at):
    half = cos.shape[1]
    for k in range(half):
        first, second = x[row, k] * scale * weight[0, k], x[row, k + half] * scale * weight[0, k + half]
        out[at, k] = first * cos[i, k] - second * sin[i, k]
        out[at, k + half] = second * cos[i, k] + first * sin[i, k]


@loop
def turn_backward(joint, kinds, first, weight, normed, scales, cos, sin, grad, out, grad_weight, low, high):
    """grad [t heads, d] -> those heads of out, as joint; adds to grad_weight [blocks, d]. `low` is a multiple
    of BLOCK."""
    groups = joint.shape[0] // (cos.shape[0] * kinds)
    each = grad.shape[0] // (cos.shape[0] * groups)
    turned = np.empty((1, grad.shape[1]), np.float32)
    for i in range(low, high):
        for group in range(i * groups, (i + 1) * groups):
            for head in range(each):
                x, row = group * kinds + first + head, group * each + head
                _turn_back(grad, row, cos, sin, i, turned)
                _head_slope(joint, x, weight, normed, scales[row], turned, out, grad_weight, i // BLOCK)


@loop
def _head_slope(x, i, weight, normed, scale, grad, out, grad_weight, block):
    if normed:
        _norm_slope(x, i, weight, scale, grad, 0, out, grad_weight, block)
    else:
        for k in range(x.shape[1]):
            out[i, k] = grad[0, k]


@loop
def _turn_back(grad, row, cos, sin, i, out):
    half = cos.shape[1]
    for k in range(half):
        first, second = grad[row, k], grad[row, k + half]
        out[0, k] = first * cos[i, k] + second * sin[i, k]
        out[0, k + half] = second * cos[i, k] - first * sin[i, k]


@loop
def softmax_sums(x, targets, chosen, normalizer, entropies, low, high):
    """As `kernels.softmax_sums`; entropies [t] or [0]."""
    for i in range(low, high):
        most, total, weighted = np.float32(-np.inf), np.float32(0), np.float32(0)
        for k in range(x.shape[1]):
            most = max(most, x[i, k])
        if entropies.size:
            for k in range(x.shape[1]):
                below = x[i, k] - most
                weight = exp(below)
                total += weight
                weighted += weight * below
            entropies[i] = math.log(total) - weighted / total
        else:
            for k in range(x.shape[1]):
                total += exp(x[i, k] - most)
        chosen[i], normalizer[i] = x[i, targets[i]], most + math.log(total)


@loop
def softmax_slopes(x, targets, normalizer, slopes, entropy_slopes, entropies, out, low, high):
    """As `kernels.softmax_slopes`; entropy_slopes, entropies [t] or [0]."""
    for i in range(low, high):
        slope, log_sum = slopes[i], normalizer[i]
        if entropies.size:
            flat = entropy_slopes[i]
            constant = slope + flat * entropies[i]
            for k in range(x.shape[1]):
                logp = x[i, k] - log_sum
                out[i, k] = -exp(logp) * (flat * logp + constant)
        else:
            for k in range(x.shape[1]):
                out[i, k] = -exp(x[i, k] - log_sum) * slope
        if targets[i] >= 0:
            out[i, targets[i]] += slope
