"""LLVM intrinsics that Numba lacks: raw loads, records by address, atomic counters, prefetch.

The first half are functions that a kernel calls like any Python function. The second half are
helpers for those who generate LLVM instructions: `tiles` and `attention_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT: Final = ir.FloatType()
# A register of AVX-512, or two of smaller ones; also a line of the caches.
VECTOR_BYTES: Final = 64
CACHE_LINE_BYTES: Final = 64
LANES: Final = VECTOR_BYTES // 4
WORDS: Final = ir.VectorType(I32, LANES)
FLOATS: Final = ir.VectorType(FLOAT, LANES)
_TRIPLE: Final = llvmlite.binding.get_default_triple()


def _pointer(numba_type: types.Type) -> Callable[..., Any]:
    """Make the function that turns an address into a pointer to numbers, for `carray`."""
    pointer_type = types.CPointer(numba_type)

    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(pointer_type))

        return pointer_type(types.int64), generate

    return intrinsic(pointer)


bytes_at = _pointer(types.uint8)
halves_at = _pointer(types.uint16)
ints_at = _pointer(types.int32)
longs_at = _pointer(types.int64)
words_at = _pointer(types.uint32)
floats_at = _pointer(types.float32)


def record_reader(dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    """Make the function that turns an address into a record, whose fields a kernel reads by name.

    Args:
        dtype: a structured dtype.
    """
    record_type = numba.from_dtype(dtype)

    def record(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record_type))

        return record_type(types.int64), generate

    reader: Callable[[Any], Any] = intrinsic(record)
    return reader


@intrinsic
def fetch_add(typing_context: Any, counter: Any, number: Any) -> Any:
    """Add to the atomic counter (int64) at an address, and return what it was before.

    A thread that sees the new value sees all that this one wrote before (acquire and release).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_counter(typing_context: Any, counter: Any) -> Any:
    """Return the value of the atomic counter at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address into L2."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the processor that this thread spins."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _TRIPLE.startswith("x86_64"):
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif _TRIPLE.startswith(("aarch64", "arm64")):
            call(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))  # yield
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def stack_bytes(typing_context: Any, num_bytes: Any) -> Any:
    """Return the address of so many bytes, a literal, that last as long as the kernel's call."""
    if not isinstance(num_bytes, types.IntegerLiteral):
        return None
    count = num_bytes.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            place = builder.alloca(ir.ArrayType(I8, count))
        place.align = VECTOR_BYTES
        return builder.ptrtoint(place, I64)

    return types.int64(num_bytes), generate


@njit
def nearest_bfloat16(bits):  # type: ignore[no-untyped-def]
    """Round the bits of a float32 to the nearest bfloat16, ties to even."""
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16))


@njit
def tile_rows(num_left: int, max_rows: int) -> int:
    """Return how many rows a tile takes next. 8 rows, at most 7 a tile, become 4 + 4, not 7 + 1."""
    num_tiles = (num_left + max_rows - 1) // max_rows
    return (num_left + num_tiles - 1) // num_tiles


# What follows generates instructions.


def constant(number: int) -> Any:
    return ir.Constant(I64, number)


def unpack(builder: Any, pair: Any) -> tuple[Any, Any]:
    """Return both numbers of a kernel's tuple."""
    return builder.extract_value(pair, 0), builder.extract_value(pair, 1)


def for_count(builder: Any, count: Any, most: int, generate: Callable[[int], None]) -> None:
    """Generate code for each count from 1 to `most`, of which the one for `count` runs.

    Registers can't be indexed at run time, so code that keeps sums of several rows in them is
    generated for each number of rows.
    """
    counts = range(1, most + 1)
    cases = [builder.append_basic_block(f"for_{number}") for number in counts]
    after = builder.append_basic_block("chosen")
    choice = builder.switch(count, cases[-1])
    for number, case in zip(counts, cases, strict=True):
        choice.add_case(ir.Constant(I64, number), case)
        builder.position_at_end(case)
        generate(number)
        builder.branch(after)
    builder.position_at_end(after)


def loop(
    builder: Any, first: Any, end: Any, starts: Any, step: Callable[..., Any], *, by: int = 1
) -> list[list[Any]]:
    """Generate a loop that carries rows of registers through step(i, rows), at least once."""
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("step", "stepped"))
    builder.branch(body)
    builder.position_at_end(body)
    at = builder.phi(I64)
    at.add_incoming(first, before)
    carried = [[builder.phi(start.type) for start in row] for row in starts]
    results: list[list[Any]] = step(at, carried)
    following = offset(builder, at, by)
    at.add_incoming(following, body)
    for phis, row, row_results in zip(carried, starts, results, strict=True):
        for phi, start, result in zip(phis, row, row_results, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(result, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, after)
    builder.position_at_end(after)
    return results


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z of vectors of floats."""
    return call(builder, "llvm.fmuladd.v16f32", FLOATS, x, y, z)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Generate a prefetch of the cache line at an address into L2."""
    hints = [ir.Constant(I32, hint) for hint in (0, 2, 1)]  # to read, locality, data
    line = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), line, *hints)


def call(builder: Any, name: str, returns: ir.Type, *args: Any) -> Any:
    """Generate a call of one of LLVM's own functions."""
    kind = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def load(builder: Any, address: Any, kind: ir.VectorType) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(I64, num_bytes))


def even_and_odd(builder: Any, words: Any) -> tuple[Any, Any]:
    """Turn words of two bfloat16 each into floats: those at even positions, and at odd ones."""
    shifts, mask = (ir.Constant(WORDS, [n] * WORDS.count) for n in (16, 0xFFFF0000))
    even, odd = builder.shl(words, shifts), builder.and_(words, mask)
    return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)


def shuffle(builder: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    """Return the lanes with these numbers, of x and then of y."""
    numbers = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(x, y, numbers)


def split(builder: Any, vector: Any, lanes: int) -> Sequence[Any]:
    """Cut a vector into parts of so many lanes."""
    if vector.type.count == lanes:
        return [vector]
    undefined = ir.Constant(vector.type, ir.Undefined)
    return [
        shuffle(builder, vector, undefined, range(first, first + lanes))
        for first in range(0, vector.type.count, lanes)
    ]
