"""The heart of attention, in LLVM's own language: a chunk of keys and a few queries.

In: addresses. Out: what is written there. Legend: D head size, q up to `MAX_TILE_QUERIES` queries.
A chunk is `CHUNK` neighbouring frames, 64. One step of attention takes three calls:

- `transpose_keys` turns 16 of the chunk's keys into columns, so that scores of 16 keys are sums of
  whole registers;
- `weigh_keys` makes the chunk's weights under the softmax, from queries and those columns;
- `add_values` adds up the chunk's values by those weights.

bfloat16 comes in words of two numbers, which become floats by a shift and a mask: those at even
positions, and those at odd ones.

Each query has a state of `STATE_BYTES` that is carried from chunk to chunk: 16 sums of its weights
(float32), the largest score (float32), by what the sums before a chunk have to be multiplied after
it (float32), and the frames that it reads (int32): from the first, up to the second, and the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from voxlite.engine.kernels.vectors import (
    FLOATS,
    WORDS,
    even_and_odd,
    for_count,
    load,
    loop,
    multiply_add,
    offset,
)

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_FLOAT = ir.FloatType()
_LANES: Final = 16
_REGISTER: Final = 64  # bytes

# Keys of a chunk: four registers of scores.
CHUNK: Final = 64
_PARTS: Final = CHUNK // _LANES
# Dimensions that `add_values` takes at once: four registers of sums.
VALUE_DIMS: Final = 64
# So many queries' sums, four registers each, fit the 32 registers of AVX-512 beside what they are
# made of.
MAX_TILE_QUERIES: Final = 6
STATE_BYTES: Final = 128
MAX_AT: Final = 64
SCALE_AT: Final = 68
FRAMES_AT: Final = 72
# The largest score before there is one. Less than any score, and a number: it can be subtracted.
NO_SCORE: Final = -1e30


@intrinsic
def transpose_keys(typing_context: Any, keys: Any, words_at: Any, columns: Any) -> Any:
    """Write 16 words of each of 16 keys as columns: rows of `CHUNK` words, of which 16.

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
    for i in range(_LANES):
        key = builder.load(builder.inttoptr(offset(builder, keys, 8 * i), _I64.as_pointer()))
        address = builder.add(key, at)
        rows.append(load(builder, address, WORDS))
    # Swap the blocks off the diagonal: of 8 by 8 words, then of 4 by 4 in each block, and so on.
    for size in (8, 4, 2, 1):
        kept = [(lane, _LANES + lane - size)[bool(lane & size)] for lane in range(_LANES)]
        swapped = [(lane + size, _LANES + lane)[bool(lane & size)] for lane in range(_LANES)]
        for i in range(_LANES):
            if not i & size:
                pair = rows[i], rows[i + size]
                rows[i] = _shuffle(builder, *pair, kept)
                rows[i + size] = _shuffle(builder, *pair, swapped)
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
        queries: (q, D) float32, multiplied by what turns their products into logarithms to base 2.
        head_size: D.
        columns: (D / 2, CHUNK) words, the chunk's keys.
        first_frame: the chunk's first frame, as the states count them.
        states: (q, STATE_BYTES).
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
    query_bytes = builder.mul(head_size, ir.Constant(_I64, 4))
    query_rows = [
        builder.add(queries, builder.mul(query_bytes, ir.Constant(_I64, i))) for i in range(count)
    ]

    def step(at: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Add the products of two dimensions, `at` words into each key."""
        column = builder.add(columns, builder.mul(at, ir.Constant(_I64, 4 * CHUNK)))
        query_at = builder.mul(at, ir.Constant(_I64, 8))
        added = [list(row) for row in sums]
        keys = [
            even_and_odd(builder, load(builder, offset(builder, column, _REGISTER * part), WORDS))
            for part in range(_PARTS)
        ]
        for half in range(2):
            for row, query in zip(added, query_rows, strict=True):
                number = _splat_at(builder, builder.add(query, query_at), 4 * half, _FLOAT)
                for part in range(_PARTS):
                    row[part] = multiply_add(builder, number, keys[part][half], row[part])
        return added

    zeros = [[_floats(0)] * _PARTS] * count
    half_size = builder.lshr(head_size, ir.Constant(_I64, 1))
    sums = loop(builder, ir.Constant(_I64, 0), half_size, zeros, step)
    first = _splat(builder, builder.trunc(first_frame, _I32))
    frames = [
        builder.add(first, _words(range(_LANES * part, _LANES * (part + 1))))
        for part in range(_PARTS)
    ]
    for i, scores in enumerate(sums):
        state = offset(builder, states, STATE_BYTES * i)
        _generate_softmax(builder, scores, frames, state, offset(builder, weights, 4 * CHUNK * i))


def _generate_softmax(
    builder: Any, scores: Sequence[Any], frames: Sequence[Any], state: Any, weights: Any
) -> None:
    """Write one query's weights."""
    start, end, own = (_splat_at(builder, state, FRAMES_AT + 4 * i, _I32) for i in range(3))
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
    largest_before = _splat_at(builder, state, MAX_AT, _FLOAT)
    largest = _larger(builder, _larger(builder, *scores[:2]), _larger(builder, *scores[2:]))
    for distance in (8, 4, 2, 1):
        others = _shuffle(builder, largest, largest, [i ^ distance for i in range(_LANES)])
        largest = _larger(builder, others, largest)
    largest = _larger(builder, largest, largest_before)
    scale = _power_of_2(builder, builder.fsub(largest_before, largest))
    sums = builder.fmul(load(builder, state, FLOATS), scale)
    for part, (mask, score) in enumerate(zip(masks, scores, strict=True)):
        power = _power_of_2(builder, builder.fsub(score, largest))
        weight = builder.select(mask, power, _floats(0))
        _store(builder, weight, offset(builder, weights, _REGISTER * part))
        sums = builder.fadd(sums, weight)
    _store(builder, sums, state)
    for vector, at in ((largest, MAX_AT), (scale, SCALE_AT)):
        number = builder.extract_element(vector, ir.Constant(_I32, 0))
        builder.store(number, builder.inttoptr(offset(builder, state, at), _FLOAT.as_pointer()))


@intrinsic
def add_values(
    typing_context: Any,
    weights: Any,
    values: Any,
    values_at: Any,
    first: Any,
    end: Any,
    states: Any,
    out: Any,
    out_bytes: Any,
    num_queries: Any,
) -> Any:
    """Scale sums of values by what the states say, and add a chunk's, in `VALUE_DIMS` dimensions.

    Of each 32 dimensions the sums of the even ones come first, then those of the odd ones.

    Args:
        weights: (q, CHUNK) float32.
        values: where the addresses of the chunk's values are, (CHUNK,) int64.
        values_at: where in each value the dimensions are, in bytes.
        first: the first key of the chunk that counts.
        end: the end of those that count.
        states: (q, STATE_BYTES).
        out: (q, VALUE_DIMS) float32, the sums.
        out_bytes: from one query's sums to the next one's.
        num_queries: q, at least 1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *others, count = args
        for_count(
            builder, count, MAX_TILE_QUERIES, lambda count: _generate_values(builder, count, others)
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _generate_values(builder: Any, count: int, args: Sequence[Any]) -> None:
    weights, values, values_at, first, end, states, out, out_bytes = args
    places = [
        [
            offset(
                builder,
                builder.add(out, builder.mul(out_bytes, ir.Constant(_I64, i))),
                _REGISTER * part,
            )
            for part in range(_PARTS)
        ]
        for i in range(count)
    ]
    before = []
    for i, row in enumerate(places):
        scale = _splat_at(builder, states, STATE_BYTES * i + SCALE_AT, _FLOAT)
        before.append([builder.fmul(load(builder, place, FLOATS), scale) for place in row])

    def step(key: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        address_at = builder.add(values, builder.mul(key, ir.Constant(_I64, 8)))
        address = builder.load(builder.inttoptr(address_at, _I64.as_pointer()))
        address = builder.add(address, values_at)
        numbers: list[Any] = []
        for i in range(2):
            words = load(builder, offset(builder, address, _REGISTER * i), WORDS)
            numbers.extend(even_and_odd(builder, words))
        weight_at = builder.add(weights, builder.mul(key, ir.Constant(_I64, 4)))
        added = []
        for i, row in enumerate(sums):
            weight = _splat_at(builder, weight_at, 4 * CHUNK * i, _FLOAT)
            added.append(
                [multiply_add(builder, weight, *pair) for pair in zip(numbers, row, strict=True)]
            )
        return added

    sums = loop(builder, first, end, before, step)
    for row, results in zip(places, sums, strict=True):
        for place, result in zip(row, results, strict=True):
            _store(builder, result, place)


@intrinsic
def stack_bytes(typing_context: Any, num_bytes: Any) -> Any:
    """Return the address of so many bytes, a literal, that last as long as the kernel's call."""
    if not isinstance(num_bytes, types.IntegerLiteral):
        return None
    count = num_bytes.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            place = builder.alloca(ir.ArrayType(_I8, count))
        place.align = _REGISTER
        return builder.ptrtoint(place, _I64)

    return types.int64(num_bytes), generate


def _power_of_2(builder: Any, x: Any) -> Any:
    """Return 2 to the power of x, of numbers up to 0; from -126 down always the same.

    What is no number stays so.
    """
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
    exponent = builder.add(builder.bitcast(rounded, WORDS), _words([127] * _LANES))
    power = builder.bitcast(builder.shl(exponent, _words([23] * _LANES)), FLOATS)
    return builder.fmul(result, power)


# Of the polynomial that is nearest to 2^x between -1/2 and 1/2, relatively; 1 at 0.
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


def _shuffle(builder: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(x, y, _words(lanes))


def _splat_at(builder: Any, address: Any, at: int, kind: ir.Type) -> Any:
    """Load a number into all lanes."""
    pointer = builder.inttoptr(offset(builder, address, at), kind.as_pointer())
    return _splat(builder, builder.load(pointer))


def _splat(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(number.type, _LANES), ir.Undefined)
    vector = builder.insert_element(undefined, number, ir.Constant(_I32, 0))
    return _shuffle(builder, vector, undefined, [0] * _LANES)


def _store(builder: Any, vector: Any, address: Any) -> None:
    stored = builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()))
    stored.align = 1


def _floats(number: float) -> Any:
    return ir.Constant(FLOATS, [number] * _LANES)


def _words(numbers: Sequence[int]) -> Any:
    return ir.Constant(WORDS, list(numbers))
