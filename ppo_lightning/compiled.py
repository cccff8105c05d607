"""Loops over floats that numba compiles for this processor, and what they share.

Compiled code is kept beside the file of its function (or in numba's cache directory, where that cannot be
written) and made anew when that file changes, or one of those whose loops it imports.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic


def _compiler(*fastmath: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles a function for float arrays, without the interpreter's lock."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            result = njit(function, cache=True, **options)
        except RuntimeError:  # no place where it can be kept: every process compiles it
            return njit(function, **options)
        _depend_on_imports(result)
        return result

    return compiled


def _depend_on_imports(compiled: Any) -> None:
    """numba knows a kept function by its own file alone, although it holds all the loops that it calls."""
    loops = (x for x in compiled.py_func.__globals__.values() if isinstance(x, Dispatcher))
    files = [x._cache._cache_file for x in (compiled, *loops) if hasattr(x._cache, "_cache_file")]
    files[0]._source_stamp = tuple(sorted({repr(file._source_stamp) for file in files}))


# sums may be taken in any order, as in every matrix product; NaN and infinity mean what they always do
loop = _compiler("contract", "reassoc", "nsz")
_exact = _compiler("contract")


def spread(function: Callable[..., Any], rows: int, *arguments: Any, multiple: int = 1) -> None:
    """function(*arguments, low, high) for all rows, shared among as many threads as torch would use; each
    takes a multiple of `multiple` rows."""
    threads = torch.get_num_threads()
    share = -(-rows // multiple // threads) * multiple
    if threads == 1 or share >= rows:
        function(*arguments, 0, rows)
        return
    lows = range(0, rows, share)
    list(_pool(threads).map(lambda low: function(*arguments, low, min(low + share, rows)), lows))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="compiled")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a forked rank


@intrinsic
def _power_of_two(typing: Any, exponent: Any) -> Any:
    """2 ** exponent of a whole float32 between -126 and 127."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], word), word(127))
        return builder.bitcast(builder.shl(biased, word(23)), ir.FloatType())

    return types.float32(exponent), emit


@_exact
def exp(x):  # type: ignore[no-untyped-def]
    """e ** x in float32, to 2 units in the last place (Cephes' polynomial); 0 below -87. A loop over it is
    vectorised, which a call of the C library's would prevent."""
    nothing = x < np.float32(-87.0)
    x = np.float32(-87.0) if nothing else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    whole = x * np.float32(1.44269504088896341) + np.float32(12582912.0)  # adding 1.5 * 2**23 rounds
    whole = whole - np.float32(12582912.0)
    x = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4) * x + np.float32(1.3981999507e-3)
    y = y * x + np.float32(8.3334519073e-3)
    y = y * x + np.float32(4.1665795894e-2)
    y = y * x + np.float32(1.6666665459e-1)
    y = y * x + np.float32(5.0000001201e-1)
    y = (y * x * x + x + np.float32(1.0)) * _power_of_two(whole)
    return np.float32(0) if nothing else y


@loop
def inverse_rms(x, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x^2) + eps)"""
    total = np.float32(0)
    for k in range(x.size):
        total += x[k] * x[k]
    return np.float32(1) / np.float32(math.sqrt(total / np.float32(x.size) + eps))


@loop
def swiglu(both, out, low, high):  # type: ignore[no-untyped-def]
    """silu(gate) * up: both [t, 2 f] -> out [t, f]"""
    width, one = out.shape[1], np.float32(1)
    for i in range(low, high):
        gate, up, to = both[i, :width], both[i, width:], out[i]
        for k in range(width):
            to[k] = gate[k] / (one + exp(-gate[k])) * up[k]
