"""One decoding step of a dense Llama-like model on a processor, compiled by numba.

    b  rows at work    p  panels of them    n, g  heads of queries, of keys    d  head dimension
    t  tokens in the cache    V  vocabulary
A step multiplies a few rows by all weights (`ppo_lightning.engines.products`): between the products, rows
stay in panels [p, features, LANES].
"""

from __future__ import annotations

import math

import numpy as np

from ppo_lightning.compiled import exp, inverse_rms, loop, swiglu
from ppo_lightning.engines.products import LANES, linear

_CHUNK = 256  # tokens whose weights are added up before one of them is looked for
PART = 768  # logits of a row at a time: those of two panels stay in the second-level cache


# beside the products -----------------------------------------------------------------------------------


@loop
def _row(panels, i, first, to):
    """Features of row i from the `first` on -> to [d]"""
    for k in range(to.size):
        to[k] = panels[i // LANES, first + k, i % LANES]


@loop
def _into(x, panels, i, first):
    """x [d] -> features of row i from the `first` on"""
    for k in range(x.size):
        panels[i // LANES, first + k, i % LANES] = x[k]


@loop
def _norm(x, weight, eps, out, low, high):
    """Of panels; each row as `inverse_rms`."""
    width, scales = x.shape[1], np.empty(LANES, np.float32)
    for p in range(low, high):
        for lane in range(LANES):
            scales[lane] = 0
        for k in range(width):
            for lane in range(LANES):
                scales[lane] += x[p, k, lane] * x[p, k, lane]
        for lane in range(LANES):
            scales[lane] = np.float32(1) / np.float32(math.sqrt(scales[lane] / np.float32(width) + eps))
        for k in range(width):
            for lane in range(LANES):
                out[p, k, lane] = x[p, k, lane] * scales[lane] * weight[k]


@loop
def _turn(x, norms, kind, eps, cos, sin, to):
    """A head's norm (if it has one) and rotary embedding: x [d] -> to [d]."""
    half = x.size // 2
    if norms.shape[0]:
        scale, weight = inverse_rms(x, eps), norms[kind]
        for k in range(x.size):
            x[k] = x[k] * scale * weight[k]
    for k in range(half):
        first, second = x[k], x[k + half]
        to[k] = first * cos[k] - second * sin[k]
        to[k + half] = second * cos[k + half] + first * sin[k + half]


@loop
def _attend(query, keys, values, scores, out):
    """softmax(query keys' / sqrt(d)) values of one head over all keys [t, d], four of them at a time, a
    quarter of all apart. `scores` [t] is room to work in."""
    tokens, width = keys.shape
    scale = np.float32(1 / math.sqrt(width))
    apart = tokens // 4
    for s in range(apart):
        a = b = c = d = np.float32(0)
        k0, k1, k2, k3 = keys[s], keys[s + apart], keys[s + 2 * apart], keys[s + 3 * apart]
        for k in range(width):
            q = query[k]
            a, b, c, d = a + q * k0[k], b + q * k1[k], c + q * k2[k], d + q * k3[k]
        scores[s], scores[s + apart], scores[s + 2 * apart], scores[s + 3 * apart] = a, b, c, d
    for s in range(4 * apart, tokens):
        k0, a = keys[s], np.float32(0)
        for k in range(width):
            a += query[k] * k0[k]
        scores[s] = a
    most = np.float32(-np.inf)
    for s in range(tokens):
        most = max(most, scores[s])
    total = np.float32(0)
    for s in range(tokens):
        weight = exp((scores[s] - most) * scale)
        scores[s] = weight
        total += weight
    out[:] = 0
    for s in range(apart):
        p0, p1, p2, p3 = scores[s], scores[s + apart], scores[s + 2 * apart], scores[s + 3 * apart]
        v0, v1, v2, v3 = values[s], values[s + apart], values[s + 2 * apart], values[s + 3 * apart]
        for k in range(width):
            out[k] += p0 * v0[k] + p1 * v1[k] + p2 * v2[k] + p3 * v3[k]
    for s in range(4 * apart, tokens):
        p0, v0 = scores[s], values[s]
        for k in range(width):
            out[k] += p0 * v0[k]
    total = np.float32(1) / total
    for k in range(width):
        out[k] *= total


@loop
def _attention(joint, norms, eps, cos, sin, keys, values, starts, t, low, high, out):
    """Take in the new keys and values, and attend. joint [p, (n + 2 g) d, LANES]; keys, values [b, g, room,
    d]; out [p, n d, LANES]; the new token is the t-th of the cache, `starts` [b] the first that a row
    sees."""
    groups, width = keys.shape[1], keys.shape[3]
    heads = joint.shape[1] // width - 2 * groups
    each = heads // groups
    scores, x, query = np.empty(t + 1, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for i in range(low * LANES, min(high * LANES, starts.size)):
        position = t - starts[i]
        for group in range(groups):
            key, value = keys[i, group], values[i, group]
            _row(joint, i, (heads + group) * width, x)
            _turn(x, norms, 1, eps, cos[position], sin[position], key[t])
            _row(joint, i, (heads + groups + group) * width, value[t])
            for head in range(group * each, (group + 1) * each):
                _row(joint, i, head * width, x)
                _turn(x, norms, 0, eps, cos[position], sin[position], query)
                _attend(query, key[starts[i] : t + 1], value[starts[i] : t + 1], scores[: position + 1], x)
                _into(x, out, i, head * width)


@loop
def _biased(out, bias, low, high):
    if bias.size:
        for p in range(low, high):
            for k in range(bias.size):
                for lane in range(LANES):
                    out[p, k, lane] += bias[k]


@loop
def _logits(x, head, part, logits, low, high):
    """x head' of panels x -> logits [b, V], by way of part [p, PART, LANES]"""
    rows = min(high * LANES, logits.shape[0])
    for first in range(0, head.shape[0], PART):
        last = min(first + PART, head.shape[0])
        linear(x, head[first:last], part, low, high, False)
        for i in range(low * LANES, rows):
            _row(part, i, 0, logits[i, first:last])


@loop
def step(tokens, model, cache, work, t, low, high):
    """A step of the rows in panels low to high: reads `tokens` [b], the t-th of the cache, and writes their
    logits. The tuples are those of `DenseDecoder`."""
    embedding, head, norms, head_norms, eps, products, biases = model
    keys, values, starts, cos, sin = cache
    x, y, joint, attended, both, act, flat_both, flat_act, part, logits = work
    qkv, output, gate_up, down = products
    qkv_bias, output_bias, gate_up_bias, down_bias = biases
    for i in range(low * LANES, min(high * LANES, tokens.size)):
        _into(embedding[tokens[i]], x, i, 0)
    layers = qkv.shape[0]
    for layer in range(layers):
        _norm(x, norms[2 * layer], eps, y, low, high)
        linear(y, qkv[layer], joint, low, high, False)
        _biased(joint, qkv_bias[layer], low, high)
        turned = keys[layer], values[layer]
        _attention(joint, head_norms[layer], eps, cos, sin, *turned, starts, t, low, high, attended)
        linear(attended, output[layer], x, low, high, True)
        _biased(x, output_bias[layer], low, high)
        _norm(x, norms[2 * layer + 1], eps, y, low, high)
        linear(y, gate_up[layer], both, low, high, False)
        _biased(both, gate_up_bias[layer], low, high)
        swiglu(flat_both, flat_act, low, high)
        linear(act, down[layer], x, low, high, True)
        _biased(x, down_bias[layer], low, high)
    _norm(x, norms[2 * layers], eps, y, low, high)
    _logits(y, head, part, logits, low, high)


# sampling ---------------------------------------------------------------------------------------------


@loop
def _pick(row, most, inverse, token, end, below, target):
    """The first token at which the sum of weights, `below` before the first one, passes `target`."""
    last = token
    for k in range(token, end):
        weight = exp((row[k] - most) * inverse)
        if weight > 0:
            below, last = below + weight, k
        if below > target:
            break
    return last


@loop
def draw(logits, uniform, temperature, tokens, logprobs, low, high):
    """`ppo_lightning.engines.sampling.draw` of rows low to high, without top-k and top-p, at a
    temperature above 0."""
    vocabulary = logits.shape[1]
    sums = np.empty((vocabulary - 1) // _CHUNK + 1, np.float32)
    inverse = np.float32(1 / temperature)
    for i in range(low, high):
        row, most, total = logits[i], np.float32(-np.inf), 0.0
        for k in range(vocabulary):
            most = max(most, row[k])
        for chunk in range(sums.size):
            part, first = np.float32(0), chunk * _CHUNK
            for k in range(first, min(first + _CHUNK, vocabulary)):
                part += exp((row[k] - most) * inverse)
            sums[chunk] = part
            total += part
        target, below, chunk = uniform[i] * total, 0.0, 0
        while chunk < sums.size - 1 and below + sums[chunk] <= target:
            below += sums[chunk]
            chunk += 1
        first = chunk * _CHUNK
        token = _pick(row, most, inverse, first, min(first + _CHUNK, vocabulary), below, target)
        tokens[i] = token
        logprobs[i] = (row[token] - most) * inverse - math.log(total)
