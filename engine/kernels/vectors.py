"""What Numba can't say: memory by its address, a shared counter, and dot products in registers.

Each function here looks like Python to a kernel and is a few lines of LLVM's language when it is
compiled. A tile is the heart of a linear layer: dot products of a few weight rows and a few input
rows, whose sums stay in registers while the rows are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_VOID = ir.VoidType()
# Bytes of a weight row that a tile takes at once: a register of AVX-512, two of smaller ones.
STEP_BYTES: Final = 64
WORDS: Final = ir.VectorType(_I32, STEP_BYTES // 4)
FLOATS: Final = ir.VectorType(_FLOAT, STEP_BYTES // 4)


def _pointer(numba_type: types.Type, kind: ir.Type) -> Callable[..., Any]:
    """Make what turns an address into a pointer to numbers of a kind, for `carray`."""

    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], kind.as_pointer())

        return types.CPointer(numba_type)(types.int64), generate

    return intrinsic(pointer)


bytes_at = _pointer(types.uint8, _I8)
halves_at = _pointer(types.uint16, _I16)
ints_at = _pointer(types.int32, _I32)
longs_at = _pointer(types.int64, _I64)
words_at = _pointer(types.uint32, _I32)
floats_at = _pointer(types.float32, _FLOAT)


@intrinsic
def next_number(typing_context: Any, block: Any) -> Any:
    """Draw from the counter that a kernel's block begins with: 0, 1, 2 ... over all threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def counter_at(typing_context: Any, block: Any, index: Any) -> Any:
    """Return a further counter: the place in a block of the integer with this index."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    counter = types.CPointer(types.int64)
    return counter(counter, types.int64), generate


@intrinsic
def drawn_so_far(typing_context: Any, counter: Any) -> Any:
    """Return how many numbers were drawn from a counter, by all threads until now."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(types.CPointer(types.int64)), generate


class _Products(Protocol):
    """How a tile of one kind of number multiplies and adds."""

    is_interleaved: bool  # whether a tile's weight rows take turns, a step each
    sums: ir.VectorType  # of one weight row and one input row
    input_bytes: int  # of one input row in a step

    def load_input(self, builder: Any, address: Any) -> Any: ...

    def load_weight(self, builder: Any, address: Any) -> Any: ...

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        """Add the products of a step to a register of sums."""
        ...

    def total(self, builder: Any, sums: Any) -> Any:
        """Add up a register."""
        ...


class _Bytes:
    """Inputs uint8, weights int8, sums int32: exact up to 66,000 products."""

    is_interleaved = True
    input_bytes = STEP_BYTES

    def __init__(self, dot_lanes: int | None) -> None:
        self._dot_lanes = dot_lanes
        self.sums = ir.VectorType(_I32, dot_lanes or WORDS.count)

    def load_input(self, builder: Any, address: Any) -> Any:
        return load(builder, address, WORDS)

    load_weight = load_input

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        if self._dot_lanes is None:
            return builder.add(sums, self._dot(builder, inputs, weight))
        # Four products of bytes to each lane in one instruction.
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self._dot_lanes}"
        pairs = zip(*(_parts(builder, x, self._dot_lanes) for x in (inputs, weight)), strict=True)
        for pair in pairs:
            sums = call(builder, name, self.sums, sums, *pair)
        return sums

    def total(self, builder: Any, sums: Any) -> Any:
        return call(builder, f"llvm.vector.reduce.add.v{self.sums.count}i32", _I32, sums)

    @staticmethod
    def _dot(builder: Any, inputs: Any, weight: Any) -> Any:
        """Do the same with what every processor has."""
        as_bytes = ir.VectorType(_I8, STEP_BYTES)
        wide = ir.VectorType(_I16, STEP_BYTES)  # which the largest product, 255 times -127, fits
        products = builder.mul(
            builder.zext(builder.bitcast(inputs, as_bytes), wide),
            builder.sext(builder.bitcast(weight, as_bytes), wide),
        )
        parts = [builder.sext(part, WORDS) for part in _parts(builder, products, WORDS.count)]
        return builder.add(builder.add(*parts[:2]), builder.add(*parts[2:]))


class _Halves:
    """Weights bfloat16, inputs and sums float32.

    A step's inputs stand apart: those of even positions, then those of odd ones, since a word of
    two weights becomes floats by a shift and a mask.
    """

    is_interleaved = False
    input_bytes = 4 * STEP_BYTES // 2
    sums = FLOATS

    def load_input(self, builder: Any, address: Any) -> Any:
        odd = builder.add(address, ir.Constant(_I64, STEP_BYTES))
        return load(builder, address, FLOATS), load(builder, odd, FLOATS)

    def load_weight(self, builder: Any, address: Any) -> Any:
        return even_and_odd(builder, load(builder, address, WORDS))

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        for pair in zip(inputs, weight, strict=True):
            sums = call(builder, "llvm.fmuladd.v16f32", FLOATS, *pair, sums)
        return sums

    def total(self, builder: Any, sums: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{FLOATS.count}f32"
        kind = ir.FunctionType(_FLOAT, [_FLOAT, FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        zero = ir.Constant(_FLOAT, -0.0)
        return builder.call(function, (zero, sums), fastmath=("reassoc",))


def _tile(products: _Products) -> Callable[..., Any]:
    def tile(
        typing_context: Any,
        weights: Any,
        weight_bytes: Any,
        inputs: Any,
        input_bytes: Any,
        ahead: Any,
        out: Any,
        out_bytes: Any,
        num_weights: Any,
        num_inputs: Any,
    ) -> Any:
        if not isinstance(num_weights, types.IntegerLiteral):
            return None
        shape = num_weights.literal_value, num_inputs.literal_value

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _generate_tile(builder, products, shape, *args[:7])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, num_weights, num_inputs), generate

    return tile


def _generate_tile(
    builder: Any,
    products: _Products,
    shape: tuple[int, int],
    weights: Any,
    weight_bytes: Any,
    inputs: Any,
    input_bytes: Any,
    ahead: Any,
    out: Any,
    out_bytes: Any,
) -> None:
    """Write the sums of `num_weights` neighbouring weight rows and `num_inputs` input rows."""
    num_weights, num_inputs = shape

    def rows(address: Any, num_bytes: Any, count: int) -> list[Any]:
        steps = [builder.mul(num_bytes, ir.Constant(_I64, i)) for i in range(count)]
        return [builder.add(address, step) for step in steps]

    apart = ir.Constant(_I64, STEP_BYTES) if products.is_interleaved else weight_bytes
    weight_rows = rows(weights, apart, num_weights)
    input_rows = rows(inputs, input_bytes, num_inputs)
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("step", "stepped"))
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    at.add_incoming(ir.Constant(_I64, 0), before)
    sums = [[builder.phi(products.sums) for _ in input_rows] for _ in weight_rows]
    taking_turns = num_weights if products.is_interleaved else 1
    weight_at = builder.mul(at, ir.Constant(_I64, taking_turns))
    input_at = builder.mul(at, ir.Constant(_I64, products.input_bytes // STEP_BYTES))
    loaded = [products.load_input(builder, builder.add(row, input_at)) for row in input_rows]
    added = []
    for row, row_sums in zip(weight_rows, sums, strict=True):
        address = builder.add(row, weight_at)
        prefetch(builder, builder.add(address, ahead))
        weight = products.load_weight(builder, address)
        added.append(
            [products.add(builder, *pair, weight) for pair in zip(row_sums, loaded, strict=True)]
        )
    following = builder.add(at, ir.Constant(_I64, STEP_BYTES))
    at.add_incoming(following, loop)
    zeros = ir.Constant(products.sums, [0] * products.sums.count)
    for phi, result in zip(sum(sums, []), sum(added, []), strict=True):
        phi.add_incoming(zeros, before)
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, weight_bytes), loop, after)
    builder.position_at_end(after)
    for row, row_sums in zip(rows(out, ir.Constant(_I64, 4), num_weights), added, strict=True):
        for address, result in zip(rows(row, out_bytes, num_inputs), row_sums, strict=True):
            total = products.total(builder, result)
            builder.store(total, builder.inttoptr(address, total.type.as_pointer()))


def prefetch(builder: Any, address: Any) -> None:
    """Ask for a line of memory to be read, into the second cache."""
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # to read, locality, data
    call(builder, "llvm.prefetch.p0", _VOID, builder.inttoptr(address, _I8.as_pointer()), *hints)


def call(builder: Any, name: str, returns: ir.Type, *args: Any) -> Any:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def load(builder: Any, address: Any, kind: ir.VectorType) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(_I64, num_bytes))


def even_and_odd(builder: Any, words: Any) -> tuple[Any, Any]:
    """Turn words of two bfloat16 each into floats: those at even positions, and at odd ones."""
    shifts, mask = (ir.Constant(WORDS, [n] * WORDS.count) for n in (16, 0xFFFF0000))
    even, odd = builder.shl(words, shifts), builder.and_(words, mask)
    return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)


def _parts(builder: Any, vector: Any, lanes: int) -> Sequence[Any]:
    """Cut a vector into parts of so many lanes."""
    if vector.type.count == lanes:
        return [vector]
    undefined = ir.Constant(vector.type, ir.Undefined)
    lane_numbers = ir.VectorType(_I32, lanes)
    return [
        builder.shuffle_vector(
            vector, undefined, ir.Constant(lane_numbers, list(range(first, first + lanes)))
        )
        for first in range(0, vector.type.count, lanes)
    ]


def _vnni_lanes() -> int | None:
    """Return how many sums the processor's dot product of bytes has, or None if it has none."""
    if numba.config.CPU_NAME is not None:
        return None  # Numba was told to compile for another processor than this one
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512vnni"):
        return 16
    return 8 if features.get("avxvnni") else None


int8_tile = intrinsic(_tile(_Bytes(_vnni_lanes())))
int8_tile_without_vnni = intrinsic(_tile(_Bytes(None)))
bfloat16_tile = intrinsic(_tile(_Halves()))
