"""Products of a few rows with large weights on a processor, for loops that numba compiles.

    p  panels    k  inputs    n  columns
A panel is LANES rows side by side, [k, LANES]: one vector holds an input of all of them, and is multiplied by
a weight just as it comes from memory. Nothing is added up across a vector, weights need no order of their
own, and a row's results do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppo_lightning.compiled import loop

LANES = 8  # floats of a vector of AVX2; other processors split or join them
COLUMNS = 6  # of a tile: by two panels 12 sums, which with inputs and weight fill AVX2's 16 registers
_BLOCK = 1024  # inputs at a time: two panels of them stay in the second-level cache


_NUMBER, _WORD = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def _tile(columns: int, panels: int) -> Any:
    """A tile of the product in LLVM's instructions: of a loop, numba would not keep 12 sums in vectors."""

    @intrinsic
    def tile(
        typing: Any, x: Any, w: Any, out: Any, p: Any, n: Any, apart: Any, first: Any, last: Any, add: Any
    ) -> Any:
        """out[p + i, n + j apart] = (out +) x w' over the inputs from `first` to `last` (one at least), for
        all i below `panels` and j below `columns`. x [p, k, LANES], w [n, k], out [p, n, LANES] fp32."""
        given = [(array.dtype, array.layout, array.ndim) for array in (x, w, out)]
        if given != [(types.float32, "C", n) for n in (3, 2, 3)]:
            return None

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            p, n, apart, first, last, add = args[3:]
            x, w, out = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, args[:3])
            )
            rows = [builder.add(p, _NUMBER(i)) for i in range(panels)]
            ns = [builder.add(n, builder.mul(apart, _NUMBER(j))) for j in range(columns)]
            inputs = [_place(builder, x, row, LANES) for row in rows]
            weights = [_place(builder, w, column, 1) for column in ns]
            sums = [_lanes(builder, _place(builder, out, row, LANES), n) for n in ns for row in rows]
            totals = _multiplied(builder, inputs, weights, first, last, _begun(builder, sums, add))
            for there, value in zip(sums, totals):
                builder.store(value, there, align=4)
            return context.get_dummy_value()

        return types.void(x, w, out, *(types.int64,) * 5, types.boolean), emit

    return tile


def _place(builder: Any, array: Any, row: Any, step: int) -> Any:
    """Where array[row] begins: its rows are as long as the next dimension, times `step`."""
    length = builder.mul(cgutils.unpack_tuple(builder, array.shape)[1], _NUMBER(step))
    return builder.gep(array.data, [builder.mul(row, length)])


def _lanes(builder: Any, panel: Any, index: Any) -> Any:
    """Where the vector panel[index] is."""
    there = builder.gep(panel, [builder.mul(index, _NUMBER(LANES))])
    return builder.bitcast(there, _VECTOR.as_pointer())


def _begun(builder: Any, sums: list[Any], add: Any) -> list[Any]:
    """The sums so far if `add`, else zeros."""
    with builder.if_else(add) as (onto, anew):
        with onto:
            loaded = [builder.load(there, align=4) for there in sums]
            onto_block = builder.block
        with anew:
            anew_block = builder.block
    begun = [builder.phi(_VECTOR) for _ in sums]
    for value, old in zip(begun, loaded):
        value.add_incoming(old, onto_block)
        value.add_incoming(_VECTOR([0.0] * LANES), anew_block)
    return begun


def _multiplied(
    builder: Any, inputs: list[Any], weights: list[Any], first: Any, last: Any, begun: list[Any]
) -> list[Any]:
    """The sums after all inputs: one turn of a loop for each, whose sums stay in registers."""
    before, body = builder.block, builder.append_basic_block("inputs")
    builder.branch(body)
    builder.position_at_end(body)
    k, totals = builder.phi(_NUMBER), [builder.phi(_VECTOR) for _ in begun]
    values = [builder.load(_lanes(builder, panel, k), align=4) for panel in inputs]
    name, kind = f"llvm.fmuladd.v{LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, name)
    added: list[Any] = []
    for column in weights:
        weight = _everywhere(builder, builder.load(builder.gep(column, [k])))
        added += [
            builder.call(fused, [weight, value, totals[len(added) + i]]) for i, value in enumerate(values)
        ]
    following = builder.add(k, _NUMBER(1))
    for phi, old, new in zip([k, *totals], [first, *begun], [following, *added]):
        phi.add_incoming(old, before)
        phi.add_incoming(new, body)
    done = builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", following, last), body, done)
    builder.position_at_end(done)
    return added


def _everywhere(builder: Any, value: Any) -> Any:
    """A vector that holds `value` in each place."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    alone = builder.insert_element(nothing, value, _WORD(0))
    return builder.shuffle_vector(alone, nothing, ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES))


_pair, _single, _column = _tile(COLUMNS, 2), _tile(COLUMNS, 1), _tile(1, 1)


@loop
def linear(x, w, out, low, high, add):  # type: ignore[no-untyped-def]
    """out[low : high] = (out +) x w' for x [p, k, LANES], w [n, k], out [p, n, LANES]. The columns of a tile
    lie as far apart as they can: memory hands out several streams side by side faster than a single one."""
    columns, inputs = w.shape
    if x.shape[1] != inputs or out.shape[1] < columns or not x.shape[2] == out.shape[2] == LANES:
        raise ValueError("panels and weights do not fit together")
    apart = columns // COLUMNS
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        onto = add or first > 0
        for n in range(apart):
            for p in range(low, high - 1, 2):
                _pair(x, w, out, p, n, apart, first, last, onto)
            if (high - low) % 2:
                _single(x, w, out, high - 1, n, apart, first, last, onto)
        for n in range(apart * COLUMNS, columns):
            for p in range(low, high):
                _column(x, w, out, p, n, 0, first, last, onto)
