"""What Numba can't say: memory by its address, a shared counter, and dot products in registers.

Each function here looks like Python to a kernel and is a few lines of LLVM's language when it is
compiled. A tile is the heart of a linear layer: dot products of a few weight rows and a few input
rows, whose sums stay in registers while the rows are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import llvmlite.binding
import numba
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_VOID = ir.VoidType()
# Bytes of a weight row that a tile takes at once: a register of AVX-512, two of smaller ones.
STEP_BYTES: Final = 64
# Weight rows of a tile.
TILE_WEIGHTS: Final = 2
WORDS: Final = ir.VectorType(_I32, STEP_BYTES // 4)
FLOATS: Final = ir.VectorType(_FLOAT, STEP_BYTES // 4)


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_HALVES: Final = ir.VectorType(_Bfloat16(), STEP_BYTES // 2)


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
def count_done(typing_context: Any, counter: Any, number: Any) -> Any:
    """Add a number to a counter; who sees it there sees what this thread wrote before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", args[0], args[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64), generate


@intrinsic
def counter_at(typing_context: Any, block: Any, index: Any) -> Any:
    """Return a further counter: the place in a block of the integer with this index."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    counter = types.CPointer(types.int64)
    return counter(counter, types.int64), generate


@intrinsic
def address_of(typing_context: Any, counter: Any) -> Any:
    """Return the address of a place in a block."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _I64)

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def drawn_so_far(typing_context: Any, counter: Any) -> Any:
    """Return how many numbers were drawn from a counter, by all threads until now."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def ask_for(typing_context: Any, address: Any) -> Any:
    """Ask for a line of memory to be read, into the second cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


class _Products(Protocol):
    """How a tile of one kind of number multiplies and adds."""

    taking_turns: int  # how many weight rows take turns in memory, a step each
    sums: ir.VectorType  # of one weight row and one input row
    input_bytes: int  # of one input row in a step

    def load_input(self, builder: Any, address: Any) -> Any: ...

    def load_weight(self, builder: Any, address: Any) -> Any: ...

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        """Add the products of a step to a register of sums."""
        ...


class _Bytes:
    """Inputs uint8, weights int8, sums int32: exact up to 66,000 products."""

    taking_turns = TILE_WEIGHTS
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
    """Weights and inputs bfloat16, sums float32, by the processor's own dot product."""

    taking_turns = 1
    input_bytes = STEP_BYTES
    sums = FLOATS

    def load_input(self, builder: Any, address: Any) -> Any:
        return builder.bitcast(load(builder, address, WORDS), _HALVES)

    load_weight = load_input

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        # Two products to each lane.
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, inputs, weight)


class _SpreadHalves:
    """The same with what every processor has: weights bfloat16, inputs and sums float32.

    A step's inputs stand apart: those of even positions, then those of odd ones, since a word of
    two weights becomes floats by a shift and a mask.
    """

    taking_turns = 1
    input_bytes = 4 * STEP_BYTES // 2
    sums = FLOATS

    def load_input(self, builder: Any, address: Any) -> Any:
        odd = builder.add(address, ir.Constant(_I64, STEP_BYTES))
        return load(builder, address, FLOATS), load(builder, odd, FLOATS)

    def load_weight(self, builder: Any, address: Any) -> Any:
        return even_and_odd(builder, load(builder, address, WORDS))

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        for pair in zip(inputs, weight, strict=True):
            sums = multiply_add(builder, *pair, sums)
        return sums


def _tile(products: _Products, num_weights: int, max_inputs: int) -> Any:
    def tile(
        typing_context: Any,
        weights: Any,
        weight_bytes: Any,
        inputs: Any,
        input_bytes: Any,
        num_bytes: Any,
        ahead: Any,
        out: Any,
        out_bytes: Any,
        is_first: Any,
        num_inputs: Any,
    ) -> Any:
        """Multiply some weight rows and `num_inputs` input rows, and write the sums or add them.

        Args:
            weight_bytes: of a weight row, from one to the next.
            num_bytes: of a weight row, what is multiplied.
            ahead: how far ahead of a weight row memory is asked for, in bytes.
            is_first: 1 to write sums, 0 to add them to those that stand there.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for_count(
                builder,
                args[9],
                max_inputs,
                lambda count: _generate_tile(builder, products, (num_weights, count), args[:9]),
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return intrinsic(tile)


def _generate_tile(
    builder: Any, products: _Products, shape: tuple[int, int], args: Sequence[Any]
) -> None:
    weights, weight_bytes, inputs, input_bytes, num_bytes, ahead, out, out_bytes, first = args
    num_weights, num_inputs = shape

    def rows(address: Any, num_bytes: Any, count: int) -> list[Any]:
        steps = [builder.mul(num_bytes, ir.Constant(_I64, i)) for i in range(count)]
        return [builder.add(address, step) for step in steps]

    apart = ir.Constant(_I64, STEP_BYTES) if products.taking_turns > 1 else weight_bytes
    weight_rows = rows(weights, apart, num_weights)
    input_rows = rows(inputs, input_bytes, num_inputs)

    def step(at: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Add the products of a step, `at` bytes into each weight row."""
        weight_at = builder.mul(at, ir.Constant(_I64, products.taking_turns))
        input_at = builder.mul(at, ir.Constant(_I64, products.input_bytes // STEP_BYTES))
        loaded = [products.load_input(builder, builder.add(row, input_at)) for row in input_rows]
        added = []
        for row, row_sums in zip(weight_rows, sums, strict=True):
            address = builder.add(row, weight_at)
            prefetch(builder, builder.add(address, ahead))
            weight = products.load_weight(builder, address)
            pairs = zip(row_sums, loaded, strict=True)
            added.append([products.add(builder, *pair, weight) for pair in pairs])
        return added

    zeros = [[ir.Constant(products.sums, [0] * products.sums.count)] * num_inputs] * num_weights
    sums = loop(builder, ir.Constant(_I64, 0), num_bytes, zeros, step, by=STEP_BYTES)
    addresses = [
        offset(builder, row, 4 * i)
        for row in rows(out, out_bytes, num_inputs)
        for i in range(num_weights)
    ]
    registers = [register for input_sums in zip(*sums, strict=True) for register in input_sums]
    is_first = builder.icmp_signed("!=", first, ir.Constant(_I64, 0))
    for group in range(0, len(registers), 4):
        totals = _totals(builder, registers[group : group + 4])
        for i, address in enumerate(addresses[group : group + 4]):
            total = builder.extract_element(totals, ir.Constant(_I32, i))
            place = builder.inttoptr(address, total.type.as_pointer())
            before = builder.select(is_first, total.type(0), builder.load(place))
            builder.store(_plus(builder, before, total), place)


def _totals(builder: Any, sums: Sequence[Any]) -> Any:
    """Add up each of up to four registers, always in the same order.

    Four become one of a quarter of each by three additions, where each alone would take six.

    Returns:
        Their totals in a vector of four, with the first ones again where there are no more.
    """

    def merged(x: Any, y: Any, *orders: Sequence[int]) -> Any:
        """Add up two choices from each four lanes of x, 0 to 3, and of y, 4 to 7."""
        lanes = x.type.count
        chosen = [
            [at + i % 4 + i // 4 * lanes for at in range(0, lanes, 4) for i in order]
            for order in orders
        ]
        return _plus(builder, *(_shuffled(builder, x, y, numbers) for numbers in chosen))

    a, b, c, d = (list(sums) * 4)[:4]
    halves = [merged(*pair, (0, 4, 1, 5), (2, 6, 3, 7)) for pair in ((a, b), (c, d))]
    totals = merged(*halves, (0, 1, 4, 5), (2, 3, 6, 7))
    while totals.type.count > 4:
        totals = _plus(builder, *_parts(builder, totals, totals.type.count // 2))
    return totals


def _plus(builder: Any, x: Any, y: Any) -> Any:
    is_float = getattr(x.type, "element", x.type) == _FLOAT
    return (builder.fadd if is_float else builder.add)(x, y)


def _shuffled(builder: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    numbers = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(x, y, numbers)


@njit
def nearest_bfloat16(bits):  # type: ignore[no-untyped-def]
    """Round the bits of a float32 to the nearest bfloat16, and of two as near to the even one."""
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16))


@njit
def tile_rows(num_left: int, most: int) -> int:
    """Return how many rows a tile takes next. Of 8, at most 7, they are 4 and 4, not 7 and 1."""
    num_tiles = (num_left + most - 1) // most
    return (num_left + num_tiles - 1) // num_tiles


def for_count(builder: Any, count: Any, most: int, generate: Callable[[int], None]) -> None:
    """Generate code for each count from 1 to `most`, of which the one for `count` runs.

    Registers have no numbers at run time: what keeps sums of several rows in them is generated for
    each number of rows.
    """
    counts = range(1, most + 1)
    blocks = [builder.append_basic_block(f"for_{number}") for number in counts]
    after = builder.append_basic_block("chosen")
    choice = builder.switch(count, blocks[-1])
    for number, block in zip(counts, blocks, strict=True):
        choice.add_case(ir.Constant(_I64, number), block)
        builder.position_at_end(block)
        generate(number)
        builder.branch(after)
    builder.position_at_end(after)


def loop(
    builder: Any, first: Any, end: Any, starts: Any, step: Callable[..., Any], *, by: int = 1
) -> list[list[Any]]:
    """Carry rows of registers through step(i, rows) for i from first to end, at least once."""
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("step", "stepped"))
    builder.branch(body)
    builder.position_at_end(body)
    at = builder.phi(_I64)
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
    return [
        _shuffled(builder, vector, undefined, range(first, first + lanes))
        for first in range(0, vector.type.count, lanes)
    ]


def _features() -> Mapping[str, bool]:
    """Return what the processor can do; nothing special where Numba compiles for another one."""
    if numba.config.CPU_NAME is not None:
        return {}
    features: Mapping[str, bool] = llvmlite.binding.get_host_cpu_features()
    return features


def _vnni_lanes(features: Mapping[str, bool]) -> int | None:
    """Return how many sums the processor's dot product of bytes has, or None if it has none."""
    if features.get("avx512vnni"):
        return 16
    return 8 if features.get("avxvnni") else None


_FEATURES: Final = _features()
# Whether the processor multiplies matrices of bfloat16, which PyTorch makes use of.
HAS_MATRIX_PRODUCT: Final = bool(_FEATURES.get("amx-bf16"))
_HALVES_PRODUCTS: Final = _Halves() if _FEATURES.get("avx512bf16") else _SpreadHalves()
# Bytes of an input row that `bfloat16_tile` takes at once: as many as of a weight row where it
# takes bfloat16, twice as many where it takes float32.
BFLOAT16_INPUT_BYTES: Final = _HALVES_PRODUCTS.input_bytes


def make_int8_tile(num_weights: int, max_inputs: int, *, use_vnni: bool = True) -> Any:
    """Make a tile of so many weight rows, that take turns with others or not, and input rows."""
    return _tile(_Bytes(_vnni_lanes(_FEATURES) if use_vnni else None), num_weights, max_inputs)


def make_bfloat16_tile(num_weights: int, max_inputs: int) -> Any:
    """Do the same for bfloat16 weights, whose rows lie one behind the other."""
    return _tile(_HALVES_PRODUCTS, num_weights, max_inputs)
