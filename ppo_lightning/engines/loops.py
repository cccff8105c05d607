"""One decoding step of a dense Llama-like model on a processor, compiled by numba.

    b  rows at work    h  hidden size    n, g  heads of queries, of keys    d  head dimension    f  MLP width
    l  layers    t  tokens in the cache    V  vocabulary
A step multiplies a few rows by all weights, so what counts is how fast weights come from memory: each is read
once, in the order in which it lies, and asked for before it is needed. A row's numbers do not depend on the
other rows.
"""

from __future__ import annotations

import math

import numpy as np

from ppo_lightning.compiled import exp, inverse_rms, loop, prefetch, swiglu

ROWS, COLUMNS = 4, 3  # of a tile: 12 sums, 3 weights and an input fill the 16 vector registers of AVX2
_BLOCK = 2048  # inputs of a tile at a time: three rows of weights stay in the first-level cache
_LINE = 16  # floats that come from memory together
_CHUNK = 256  # tokens whose weights are added up before one of them is looked for


# products ---------------------------------------------------------------------------------------------


@loop
def _tile(x, w, out, i, n, first, last, add):
    """out[i : i + 4, n : n + 3] of x w', over the inputs from `first` to `last`."""
    x0, x1, x2, x3 = x[i, first:last], x[i + 1, first:last], x[i + 2, first:last], x[i + 3, first:last]
    w0, w1, w2 = w[n, first:last], w[n + 1, first:last], w[n + 2, first:last]
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = np.float32(0)
    for k in range(last - first):
        u, v, z = w0[k], w1[k], w2[k]
        a, b, c, d = x0[k], x1[k], x2[k], x3[k]
        a0, a1, a2 = a0 + a * u, a1 + a * v, a2 + a * z
        b0, b1, b2 = b0 + b * u, b1 + b * v, b2 + b * z
        c0, c1, c2 = c0 + c * u, c1 + c * v, c2 + c * z
        d0, d1, d2 = d0 + d * u, d1 + d * v, d2 + d * z
    if add:
        a0, a1, a2 = a0 + out[i, n], a1 + out[i, n + 1], a2 + out[i, n + 2]
        b0, b1, b2 = b0 + out[i + 1, n], b1 + out[i + 1, n + 1], b2 + out[i + 1, n + 2]
        c0, c1, c2 = c0 + out[i + 2, n], c1 + out[i + 2, n + 1], c2 + out[i + 2, n + 2]
        d0, d1, d2 = d0 + out[i + 3, n], d1 + out[i + 3, n + 1], d2 + out[i + 3, n + 2]
    out[i, n], out[i, n + 1], out[i, n + 2] = a0, a1, a2
    out[i + 1, n], out[i + 1, n + 1], out[i + 1, n + 2] = b0, b1, b2
    out[i + 2, n], out[i + 2, n + 1], out[i + 2, n + 2] = c0, c1, c2
    out[i + 3, n], out[i + 3, n + 1], out[i + 3, n + 2] = d0, d1, d2


@loop
def _column(x, w, out, i, n, first, last, add):
    """out[i : i + 4, n], as `_tile`."""
    x0, x1, x2, x3 = x[i, first:last], x[i + 1, first:last], x[i + 2, first:last], x[i + 3, first:last]
    w0 = w[n, first:last]
    a = b = c = d = np.float32(0)
    for k in range(last - first):
        u = w0[k]
        a, b, c, d = a + x0[k] * u, b + x1[k] * u, c + x2[k] * u, d + x3[k] * u
    if add:
        a, b, c, d = a + out[i, n], b + out[i + 1, n], c + out[i + 2, n], d + out[i + 3, n]
    out[i, n], out[i + 1, n], out[i + 2, n], out[i + 3, n] = a, b, c, d


@loop
def linear(x, w, out, low, high, add):
    """out[low : high] = (out +) x w' for x [b, k], w [n, k]; low and high are multiples of ROWS."""
    columns, inputs = w.shape
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        onto = add or first > 0
        share = ((last - first) * ROWS // max(high - low, 1) // _LINE + 1) * _LINE
        whole = columns - columns % COLUMNS
        for n in range(0, whole, COLUMNS):
            ahead = first
            for i in range(low, high, ROWS):
                if n + 2 * COLUMNS <= columns:
                    for k in range(ahead, min(ahead + share, last), _LINE):
                        for c in range(COLUMNS):
                            prefetch(w, n + COLUMNS + c, k)
                    ahead += share
                _tile(x, w, out, i, n, first, last, onto)
        for n in range(whole, columns):
            for i in range(low, high, ROWS):
                _column(x, w, out, i, n, first, last, onto)


# the rest of a layer ----------------------------------------------------------------------------------


@loop
def _copy(x, to):
    """As `to[:] = x`, whose message for unlike lengths takes numba four seconds to compile."""
    for k in range(x.size):
        to[k] = x[k]


@loop
def _norm(x, weight, eps, out, low, high):
    for i in range(low, high):
        source, to = x[i], out[i]
        scale = inverse_rms(source, eps)
        for k in range(source.size):
            to[k] = source[k] * scale * weight[k]


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
def _attend(query, keys, values, start, end, scores, out):
    """softmax(query keys' / sqrt(d)) values of one head over the tokens from `start` to `end`."""
    width = query.size
    scale = np.float32(1 / math.sqrt(width))
    whole = start + (end - start) // 4 * 4
    for s in range(start, whole, 4):
        a = b = c = d = np.float32(0)
        k0, k1, k2, k3 = keys[s], keys[s + 1], keys[s + 2], keys[s + 3]
        for k in range(width):
            q = query[k]
            a, b, c, d = a + q * k0[k], b + q * k1[k], c + q * k2[k], d + q * k3[k]
        scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = a, b, c, d
    for s in range(whole, end):
        k0, a = keys[s], np.float32(0)
        for k in range(width):
            a += query[k] * k0[k]
        scores[s] = a
    most = np.float32(-np.inf)
    for s in range(start, end):
        most = max(most, scores[s])
    total = np.float32(0)
    for s in range(start, end):
        scores[s] = exp((scores[s] - most) * scale)
        total += scores[s]
    out[:] = 0
    for s in range(start, whole, 4):
        p0, p1, p2, p3 = scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
        v0, v1, v2, v3 = values[s], values[s + 1], values[s + 2], values[s + 3]
        for k in range(width):
            out[k] += p0 * v0[k] + p1 * v1[k] + p2 * v2[k] + p3 * v3[k]
    for s in range(whole, end):
        p0, v0 = scores[s], values[s]
        for k in range(width):
            out[k] += p0 * v0[k]
    total = np.float32(1) / total
    for k in range(width):
        out[k] *= total


@loop
def _attention(joint, norms, eps, cos, sin, keys, values, starts, t, low, high, out):
    """Take in the new keys and values, and attend. joint [b, n + 2 g, d]; keys, values [b, g, room, d]; out
    [b, n, d]; the new token is the t-th of the cache, `starts` [b] the first that a row sees."""
    groups = keys.shape[1]
    heads = joint.shape[1] - 2 * groups
    each = heads // groups
    scores = np.empty(t + 1, np.float32)
    for i in range(low, min(high, starts.size)):
        position = t - starts[i]
        for head in range(heads + groups):
            x = joint[i, head]
            to, kind = (x, 0) if head < heads else (keys[i, head - heads, t], 1)
            _turn(x, norms, kind, eps, cos[position], sin[position], to)
        for group in range(groups):
            _copy(joint[i, heads + groups + group], values[i, group, t])
            for head in range(group * each, (group + 1) * each):
                key, value = keys[i, group], values[i, group]
                _attend(joint[i, head], key, value, starts[i], t + 1, scores, out[i, head])


@loop
def _biased(out, bias, low, high):
    if bias.size:
        for i in range(low, high):
            for k in range(bias.size):
                out[i, k] += bias[k]


@loop
def step(tokens, model, cache, work, t, low, high):
    """Rows low to high (multiples of ROWS) of a step: reads `tokens` [b], the t-th of the cache, and writes
    their logits. The tuples are those of `DenseDecoder`."""
    embedding, head, norms, head_norms, eps, products, biases = model
    keys, values, starts, cos, sin = cache
    x, y, joint, attended, flat, flat_attended, both, act, logits = work
    qkv, output, gate_up, down = products
    qkv_bias, output_bias, gate_up_bias, down_bias = biases
    for i in range(low, min(high, tokens.size)):
        _copy(embedding[tokens[i]], x[i])
    layers = qkv.shape[0]
    for layer in range(layers):
        _norm(x, norms[2 * layer], eps, y, low, high)
        linear(y, qkv[layer], flat, low, high, False)
        _biased(flat, qkv_bias[layer], low, high)
        turned = keys[layer], values[layer]
        _attention(joint, head_norms[layer], eps, cos, sin, *turned, starts, t, low, high, attended)
        linear(flat_attended, output[layer], x, low, high, True)
        _biased(x, output_bias[layer], low, high)
        _norm(x, norms[2 * layer + 1], eps, y, low, high)
        linear(y, gate_up[layer], both, low, high, False)
        _biased(both, gate_up_bias[layer], low, high)
        swiglu(both, act, low, high)
        linear(act, down[layer], x, low, high, True)
        _biased(x, down_bias[layer], low, high)
    _norm(x, norms[2 * layers], eps, y, low, high)
    linear(y, head, logits, low, high, False)


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
