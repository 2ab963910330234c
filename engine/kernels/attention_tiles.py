"""The heart of attention, as LLVM instructions: a chunk of keys and a few queries.

In: addresses. Out: what is written there. Legend: D head size, q up to `MAX_TILE_QUERIES` queries.
A chunk is `CHUNK` neighbouring frames, 64. One step of attention takes three calls:

- `transpose_keys` turns 16 of the chunk's keys into columns, so that scores of 16 keys are sums of
  whole registers;
- `weigh_keys` makes the chunk's weights under the softmax, from queries and those columns;
- `add_values` adds up the chunk's values by those weights.

bfloat16 comes in words of two numbers, which become floats by a shift and a mask: those at even
positions, and those at odd ones. Each query has a `STATE` that is carried from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from voxlite.engine.kernels.intrinsics import (
    FLOAT,
    FLOATS,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    WORDS,
    constant,
    even_and_odd,
    for_count,
    load,
    loop,
    multiply_add,
    offset,
    record_reader,
    shuffle,
    unpack,
)

# Keys of a chunk: four registers of scores.
CHUNK: Final = 64
_PARTS: Final = CHUNK // LANES
# Dimensions that `add_values` takes at once: four registers of sums.
VALUE_DIMS: Final = 64
# So many queries' sums, four registers each, fit the 32 registers of AVX-512 beside what they are
# made of.
MAX_TILE_QUERIES: Final = 6
# The running maximum before any score: below each, yet finite, so that it can be subtracted.
NO_SCORE: Final = -1e30
STATE: Final = np.dtype(
    [
        ("weight_sums", np.float32, (LANES,)),
        ("largest", np.float32),  # score
        ("rescale", np.float32),  # multiplies the sums of earlier chunks
        ("first", np.int32),  # the frames that the query reads: [first, end) and its own
        ("end", np.int32),
        ("own", np.int32),
        ("padding", np.int32, (11,)),  # to whole cache lines
    ]
)
_LARGEST_AT, _SCALE_AT, _FIRST_AT, _END_AT, _OWN_AT = (
    int(STATE.fields[name][1])  # type: ignore[index]
    for name in ("largest", "rescale", "first", "end", "own")
)
_STATE_BYTES: Final = STATE.itemsize
state_at = record_reader(STATE)


@intrinsic
def transpose_keys(typing_context: Any, keys: Any, words_at: Any, columns: Any) -> Any:
    """Transpose 16 words of each of 16 keys into columns: rows of `CHUNK` words, of which 16.

    Args:
        keys: where the addresses of the 16 keys are, int64.
        words_at: where in each key the words are, in bytes.
        columns: (16, CHUNK) words, of which the first 16 of each row are written.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _generate_transpose(builder, *args)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _generate_transpose(builder: Any, keys: Any, at: Any, columns: Any) -> None:
    rows = []
    for i in range(LANES):
        key = builder.load(builder.inttoptr(offset(builder, keys, 8 * i), I64.as_pointer()))
        address = builder.add(key, at)
        rows.append(load(builder, address, WORDS))
    # Swap the quarters off the diagonal: of 8 by 8 words, then of 4 by 4 in each, and so on.
    for size in (8, 4, 2, 1):
        kept = [(lane, LANES + lane - size)[bool(lane & size)] for lane in range(LANES)]
        swapped = [(lane + size, LANES + lane)[bool(lane & size)] for lane in range(LANES)]
        for i in range(LANES):
            if not i & size:
                pair = rows[i], rows[i + size]
                rows[i] = shuffle(builder, *pair, kept)
                rows[i + size] = shuffle(builder, *pair, swapped)
    for i, row in enumerate(rows):
        _store(builder, row, offset(builder, columns, 4 * CHUNK * i))


@intrinsic
def weigh_keys(
    typing_context: Any,
    queries: Any,
    head_size: Any,
    columns: Any,
    first_frame: Any,
    states: Any,
    weights: Any,
    num_queries: Any,
) -> Any:
    """Write queries' weights for a chunk's keys, and carry on their states.

    A key's weight is e to the power of its score less the largest score so far. A key that isn't
    read weighs 0, whatever it is.

    Args:
        queries: (q, D) float32, scaled so that their products with keys are logarithms to base 2.
        head_size: D.
        columns: (D / 2, CHUNK) words, the chunk's keys.
        first_frame: the chunk's first frame, as the states count them.
        states: (q,) STATE.
        weights: (q, CHUNK) float32, to be written.
        num_queries: q, at least 1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *others, count = args
        for_count(
            builder,
            count,
            MAX_TILE_QUERIES,
            lambda count: _generate_weights(builder, count, others),
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _generate_weights(builder: Any, count: int, args: Sequence[Any]) -> None:
    queries, head_size, columns, first_frame, states, weights = args
    query_bytes = builder.mul(head_size, constant(4))
    query_rows = [builder.add(queries, builder.mul(query_bytes, constant(i))) for i in range(count)]

    def step(at: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Add the products of two dimensions, `at` words into each key."""
        column = builder.add(columns, builder.mul(at, constant(4 * CHUNK)))
        query_at = builder.mul(at, constant(8))
        added = [list(row) for row in sums]
        keys = [
            even_and_odd(
                builder, load(builder, offset(builder, column, VECTOR_BYTES * part), WORDS)
            )
            for part in range(_PARTS)
        ]
        for half in range(2):
            for row, query in zip(added, query_rows, strict=True):
                number = _splat_at(builder, builder.add(query, query_at), 4 * half, FLOAT)
                for part in range(_PARTS):
                    row[part] = multiply_add(builder, number, keys[part][half], row[part])
        return added

    zeros = [[_floats(0)] * _PARTS] * count
    half_size = builder.lshr(head_size, constant(1))
    sums = loop(builder, constant(0), half_size, zeros, step)
    first = _splat(builder, builder.trunc(first_frame, I32))
    frames = [
        builder.add(first, _words(range(LANES * part, LANES * (part + 1))))
        for part in range(_PARTS)
    ]
    for i, scores in enumerate(sums):
        state = offset(builder, states, _STATE_BYTES * i)
        _generate_softmax(builder, scores, frames, state, offset(builder, weights, 4 * CHUNK * i))


def _generate_softmax(
    builder: Any, scores: Sequence[Any], frames: Sequence[Any], state: Any, weights: Any
) -> None:
    """Write one query's weights."""
    start, end, own = (_splat_at(builder, state, at, I32) for at in (_FIRST_AT, _END_AT, _OWN_AT))
    masks = [
        builder.or_(
            builder.and_(
                builder.icmp_signed(">=", frame, start), builder.icmp_signed("<", frame, end)
            ),
            builder.icmp_signed("==", frame, own),
        )
        for frame in frames
    ]
    scores = [
        builder.select(mask, score, _floats(NO_SCORE))
        for mask, score in zip(masks, scores, strict=True)
    ]
    largest_before = _splat_at(builder, state, _LARGEST_AT, FLOAT)
    largest = _larger(builder, _larger(builder, *scores[:2]), _larger(builder, *scores[2:]))
    for distance in (8, 4, 2, 1):
        others = shuffle(builder, largest, largest, [i ^ distance for i in range(LANES)])
        largest = _larger(builder, others, largest)
    largest = _larger(builder, largest, largest_before)
    scale = _power_of_2(builder, builder.fsub(largest_before, largest))
    sums = builder.fmul(load(builder, state, FLOATS), scale)
    for part, (mask, score) in enumerate(zip(masks, scores, strict=True)):
        power = _power_of_2(builder, builder.fsub(score, largest))
        weight = builder.select(mask, power, _floats(0))
        _store(builder, weight, offset(builder, weights, VECTOR_BYTES * part))
        sums = builder.fadd(sums, weight)
    _store(builder, sums, state)
    for vector, at in ((largest, _LARGEST_AT), (scale, _SCALE_AT)):
        number = builder.extract_element(vector, ir.Constant(I32, 0))
        builder.store(number, builder.inttoptr(offset(builder, state, at), FLOAT.as_pointer()))


@intrinsic
def add_values(
    typing_context: Any,
    weights: Any,
    values: Any,
    used: Any,
    states: Any,
    out: Any,
    num_queries: Any,
) -> Any:
    """Rescale the running sums, and add a chunk's weighted values, in `VALUE_DIMS` dimensions.

    Of each 32 dimensions the sums of the even ones come first, then those of the odd ones.

    Args:
        weights: (q, CHUNK) float32.
        values: where the addresses of the chunk's values are, (CHUNK,) int64, and where in each
            value the dimensions are, in bytes.
        used: the first key of the chunk that counts, and the end of those that count.
        states: (q,) STATE.
        out: (q, VALUE_DIMS) float32, the sums, and the bytes from one query's to the next.
        num_queries: q, at least 1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *others, count = args
        for_count(
            builder, count, MAX_TILE_QUERIES, lambda count: _generate_values(builder, count, others)
        )
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    return types.void(types.int64, pair, pair, types.int64, pair, types.int64), generate


def _generate_values(builder: Any, count: int, args: Sequence[Any]) -> None:
    weights, _, _, states, _ = args
    (values, values_at), (first, end), (out, out_bytes) = (
        unpack(builder, args[i]) for i in (1, 2, 4)
    )
    places = [
        [
            offset(
                builder,
                builder.add(out, builder.mul(out_bytes, constant(i))),
                VECTOR_BYTES * part,
            )
            for part in range(_PARTS)
        ]
        for i in range(count)
    ]
    before = []
    for i, row in enumerate(places):
        scale = _splat_at(builder, states, _STATE_BYTES * i + _SCALE_AT, FLOAT)
        before.append([builder.fmul(load(builder, place, FLOATS), scale) for place in row])

    def step(key: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        address_at = builder.add(values, builder.mul(key, constant(8)))
        address = builder.load(builder.inttoptr(address_at, I64.as_pointer()))
        address = builder.add(address, values_at)
        numbers: list[Any] = []
        for i in range(2):
            words = load(builder, offset(builder, address, VECTOR_BYTES * i), WORDS)
            numbers.extend(even_and_odd(builder, words))
        weight_at = builder.add(weights, builder.mul(key, constant(4)))
        added = []
        for i, row in enumerate(sums):
            weight = _splat_at(builder, weight_at, 4 * CHUNK * i, FLOAT)
            added.append(
                [multiply_add(builder, weight, *pair) for pair in zip(numbers, row, strict=True)]
            )
        return added

    sums = loop(builder, first, end, before, step)
    for row, results in zip(places, sums, strict=True):
        for place, result in zip(row, results, strict=True):
            _store(builder, result, place)


def _power_of_2(builder: Any, x: Any) -> Any:
    """Return 2^x for x up to 0, clamped at -126. NaN stays NaN."""
    lowest = _floats(-126)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    # Added to this number, x is rounded to a whole one, which stands in the lowest bits.
    rounder = _floats(1.5 * 2**23)
    rounded = builder.fadd(x, rounder)
    fraction = builder.fsub(x, builder.fsub(rounded, rounder))
    result = _floats(POWER_COEFFICIENTS[-1])
    for coefficient in reversed(POWER_COEFFICIENTS[:-1]):
        result = multiply_add(builder, result, fraction, _floats(coefficient))
    # A whole number becomes a power of 2 as a float's exponent.
    exponent = builder.add(builder.bitcast(rounded, WORDS), _words([127] * LANES))
    power = builder.bitcast(builder.shl(exponent, _words([23] * LANES)), FLOATS)
    return builder.fmul(result, power)


# Minimax coefficients (relative error) of 2^x on [-1/2, 1/2]; 1 at 0.
POWER_COEFFICIENTS: Final = (
    1.0,
    0.693146978,
    0.240222421,
    0.0555073374,
    0.00967151281,
    0.00132647272,
)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _splat_at(builder: Any, address: Any, at: int, kind: ir.Type) -> Any:
    """Load a number into all lanes."""
    pointer = builder.inttoptr(offset(builder, address, at), kind.as_pointer())
    return _splat(builder, builder.load(pointer))


def _splat(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    vector = builder.insert_element(undefined, number, ir.Constant(I32, 0))
    return shuffle(builder, vector, undefined, [0] * LANES)


def _store(builder: Any, vector: Any, address: Any) -> None:
    stored = builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()))
    stored.align = 1


def _floats(number: float) -> Any:
    return ir.Constant(FLOATS, [number] * LANES)


def _words(numbers: Sequence[int]) -> Any:
    return ir.Constant(WORDS, list(numbers))
