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
        _norm_slope(x, i, weight, 0, scales[i], grad, i, out, grad_weight, i // BLOCK)


@loop
def _norm_slope(x, i, weights, kind, scale, grad, at, out, grad_weights, block):
    """Of y = x s w: out = s (g w) - x s^3 mean(g w x), and the weight wants the sum of g x s. Whole arrays
    and numbers of rows: taking a row costs as much as reading a short one."""
    width, total = x.shape[1], np.float32(0)
    for k in range(width):
        product = grad[at, k] * x[i, k]
        total += product * weights[kind, k]
        grad_weights[block, k] += product * scale
    along = scale * scale * scale * total / np.float32(width)
    for k in range(width):
        out[i, k] = grad[at, k] * weights[kind, k] * scale - x[i, k] * along


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
def heads(joint, each, weights, normed, eps, cos, sin, query, key, value, scales, low, high):
    """joint [t g (r + 2), d] -> query [t g r, d], key, value [t g, d], as `kernels.rotary_heads`: `each` is
    r; weights [2, d] of the norms, if `normed`; cos, sin [t, d/2]; scales [t g (r + 1)]"""
    groups = value.shape[0] // cos.shape[0]
    for group in range(low * groups, high * groups):
        i, first = group // groups, group * (each + 2)
        for head in range(each + 1):
            out, at, kind = (query, group * each + head, 0) if head < each else (key, group, 1)
            scale = inverse_rms(joint[first + head], eps) if normed else np.float32(1)
            scales[group * (each + 1) + head] = scale
            _turn(joint, first + head, scale, weights, kind, cos, sin, i, out, at)
        for k in range(value.shape[1]):
            value[group, k] = joint[first + each + 1, k]


@loop
def _turn(x, row, scale, weights, kind, cos, sin, i, out, at):
    half = cos.shape[1]
    for k in range(half):
        first = x[row, k] * scale * weights[kind, k]
        second = x[row, k + half] * scale * weights[kind, k + half]
        out[at, k] = first * cos[i, k] - second * sin[i, k]
        out[at, k + half] = second * cos[i, k] + first * sin[i, k]


@loop
def heads_backward(
    joint, each, weights, normed, scales, cos, sin, query, key, value, out, grad_weights, low, high
):
    """Gradients of query, key and value -> out, as joint; adds to grad_weights [blocks 2, d]. `low` is a
    multiple of BLOCK."""
    groups = value.shape[0] // cos.shape[0]
    turned = np.empty((1, joint.shape[1]), np.float32)
    for group in range(low * groups, high * groups):
        i, first = group // groups, group * (each + 2)
        for head in range(each + 1):
            grad, at, kind = (query, group * each + head, 0) if head < each else (key, group, 1)
            row, scale = first + head, scales[group * (each + 1) + head]
            if normed:
                _turn_back(grad, at, cos, sin, i, turned, 0)
                block = i // BLOCK * 2 + kind
                _norm_slope(joint, row, weights, kind, scale, turned, 0, out, grad_weights, block)
            else:
                _turn_back(grad, at, cos, sin, i, out, row)
        for k in range(value.shape[1]):
            out[first + each + 1, k] = value[group, k]


@loop
def _turn_back(grad, at, cos, sin, i, out, row):
    half = cos.shape[1]
    for k in range(half):
        out[row, k] = grad[at, k] * cos[i, k] + grad[at, k + half] * sin[i, k]
        out[row, k + half] = grad[at, k + half] * cos[i, k] - grad[at, k] * sin[i, k]


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
