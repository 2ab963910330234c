"""Tiles: dot products of two weight rows and up to ten input rows, whose sums stay in registers.

A tile is the heart of a linear layer. It is generated as LLVM instructions, once for each number of
input rows, from a `TileType`: how one type of weight is loaded, multiplied and added. A new type of
weight is a new `TileType` here, and its scales in `linear`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from voxlite.engine.kernels.intrinsics import (
    FLOAT,
    FLOATS,
    I8,
    I16,
    I32,
    VECTOR_BYTES,
    WORDS,
    call,
    constant,
    emit_prefetch,
    even_and_odd,
    for_count,
    load,
    loop,
    multiply_add,
    offset,
    shuffle,
    split,
    unpack,
)

# Bytes of a weight row that a tile multiplies at once.
STEP_BYTES: Final = VECTOR_BYTES
# Weight rows of a tile. Four, with seven input rows, made LLVM keep sums in memory: 120 to 180
# GMAC/s a core instead of 230.
TILE_WEIGHTS: Final = 2


class _Bfloat16Type(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16Type)

    def __hash__(self) -> int:
        return hash(_Bfloat16Type)


_BFLOAT16S: Final = ir.VectorType(_Bfloat16Type(), STEP_BYTES // 2)


class TileType(Protocol):
    """How a tile loads and multiplies one type of weight."""

    is_interleaved: bool  # whether a tile's weight rows are interleaved, a step each
    sums: ir.VectorType  # of one weight row and one input row
    input_bytes: int  # of one input row in a step

    def load_input(self, builder: Any, address: Any) -> Any: ...

    def load_weight(self, builder: Any, address: Any) -> Any: ...

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        """Add a step's products to a register of sums."""
        ...


class _Int8:
    """Inputs uint8, weights int8, sums int32: exact up to 66,000 products."""

    is_interleaved = True
    input_bytes = STEP_BYTES

    def __init__(self, vnni_lanes: int | None) -> None:
        self._vnni_lanes = vnni_lanes
        self.sums = ir.VectorType(I32, vnni_lanes or WORDS.count)

    def load_input(self, builder: Any, address: Any) -> Any:
        return load(builder, address, WORDS)

    load_weight = load_input

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        if self._vnni_lanes is None:
            return builder.add(sums, self._dot(builder, inputs, weight))
        # Four products of bytes to each lane in one instruction.
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self._vnni_lanes}"
        pairs = zip(*(split(builder, x, self._vnni_lanes) for x in (inputs, weight)), strict=True)
        for pair in pairs:
            sums = call(builder, name, self.sums, sums, *pair)
        return sums

    @staticmethod
    def _dot(builder: Any, inputs: Any, weight: Any) -> Any:
        """Do the same with what every processor has."""
        as_bytes = ir.VectorType(I8, STEP_BYTES)
        wide = ir.VectorType(I16, STEP_BYTES)  # which the largest product, 255 times -127, fits
        products = builder.mul(
            builder.zext(builder.bitcast(inputs, as_bytes), wide),
            builder.sext(builder.bitcast(weight, as_bytes), wide),
        )
        parts = [builder.sext(part, WORDS) for part in split(builder, products, WORDS.count)]
        return builder.add(builder.add(*parts[:2]), builder.add(*parts[2:]))


class _Bfloat16:
    """Weights and inputs bfloat16, sums float32, by the processor's own dot product."""

    is_interleaved = False
    input_bytes = STEP_BYTES
    sums = FLOATS

    def load_input(self, builder: Any, address: Any) -> Any:
        return builder.bitcast(load(builder, address, WORDS), _BFLOAT16S)

    load_weight = load_input

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        # Two products to each lane.
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, inputs, weight)


class _WidenedBfloat16:
    """The same with what every processor has: weights bfloat16, inputs and sums float32.

    A step's inputs are those of even positions, then those of odd ones, since a word of two weights
    becomes floats by a shift and a mask.
    """

    is_interleaved = False
    input_bytes = 4 * STEP_BYTES // 2
    sums = FLOATS

    def load_input(self, builder: Any, address: Any) -> Any:
        odd = offset(builder, address, STEP_BYTES)
        return load(builder, address, FLOATS), load(builder, odd, FLOATS)

    def load_weight(self, builder: Any, address: Any) -> Any:
        return even_and_odd(builder, load(builder, address, WORDS))

    def add(self, builder: Any, sums: Any, inputs: Any, weight: Any) -> Any:
        for pair in zip(inputs, weight, strict=True):
            sums = multiply_add(builder, *pair, sums)
        return sums


def _make_tile(tile_type: TileType, num_weights: int, max_inputs: int) -> Any:
    def tile(
        typing_context: Any,
        weights: Any,
        inputs: Any,
        out: Any,
        num_bytes: Any,
        prefetch_bytes: Any,
        is_first: Any,
        num_inputs: Any,
    ) -> Any:
        """Multiply some weight rows and `num_inputs` input rows, and write or add the sums.

        Args:
            weights: the first weight row's address, and the bytes from one row to the next.
            inputs: the same of input rows.
            out: the same of the sums, 4 bytes each: a row for each input row.
            num_bytes: bytes of each weight row that are multiplied.
            prefetch_bytes: how far ahead of a weight row memory is prefetched.
            is_first: True to write sums, False to add them to those that are there.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for_count(
                builder,
                args[6],
                max_inputs,
                lambda count: _generate_tile(builder, tile_type, (num_weights, count), args[:6]),
            )
            return context.get_dummy_value()

        pair = types.UniTuple(types.int64, 2)
        numbers = (types.int64, types.int64, types.boolean, types.int64)
        return types.void(pair, pair, pair, *numbers), generate

    return intrinsic(tile)


def _generate_tile(
    builder: Any, tile_type: TileType, shape: tuple[int, int], args: Sequence[Any]
) -> None:
    weights, weight_bytes = unpack(builder, args[0])
    num_bytes, prefetch_bytes, is_first = args[3:]
    num_weights, num_inputs = shape
    if tile_type.is_interleaved:
        weight_bytes = constant(STEP_BYTES)
    weight_rows = _rows(builder, weights, weight_bytes, num_weights)
    input_rows = _rows(builder, *unpack(builder, args[1]), num_inputs)

    def step(at: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Add the products of a step, `at` bytes into each weight row."""
        weight_at = builder.mul(at, constant(TILE_WEIGHTS)) if tile_type.is_interleaved else at
        input_at = builder.mul(at, constant(tile_type.input_bytes // STEP_BYTES))
        loaded = [tile_type.load_input(builder, builder.add(row, input_at)) for row in input_rows]
        added = []
        for row, row_sums in zip(weight_rows, sums, strict=True):
            address = builder.add(row, weight_at)
            emit_prefetch(builder, builder.add(address, prefetch_bytes))
            weight = tile_type.load_weight(builder, address)
            pairs = zip(row_sums, loaded, strict=True)
            added.append([tile_type.add(builder, *pair, weight) for pair in pairs])
        return added

    zero = ir.Constant(tile_type.sums, [0] * tile_type.sums.count)
    zeros = [[zero] * num_inputs] * num_weights
    sums = loop(builder, constant(0), num_bytes, zeros, step, by=STEP_BYTES)
    addresses = [
        offset(builder, row, 4 * i)
        for row in _rows(builder, *unpack(builder, args[2]), num_inputs)
        for i in range(num_weights)
    ]
    registers = [register for input_sums in zip(*sums, strict=True) for register in input_sums]
    for group in range(0, len(registers), 4):
        totals = _totals(builder, registers[group : group + 4])
        for i, address in enumerate(addresses[group : group + 4]):
            total = builder.extract_element(totals, ir.Constant(I32, i))
            place = builder.inttoptr(address, total.type.as_pointer())
            before = builder.select(is_first, total.type(0), builder.load(place))
            builder.store(_plus(builder, before, total), place)


def _rows(builder: Any, address: Any, row_bytes: Any, count: int) -> list[Any]:
    """Return the addresses of rows."""
    return [builder.add(address, builder.mul(row_bytes, constant(i))) for i in range(count)]


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
        return _plus(builder, *(shuffle(builder, x, y, numbers) for numbers in chosen))

    a, b, c, d = (list(sums) * 4)[:4]
    halves = [merged(*pair, (0, 4, 1, 5), (2, 6, 3, 7)) for pair in ((a, b), (c, d))]
    totals = merged(*halves, (0, 1, 4, 5), (2, 3, 6, 7))
    while totals.type.count > 4:
        totals = _plus(builder, *split(builder, totals, totals.type.count // 2))
    return totals


def _plus(builder: Any, x: Any, y: Any) -> Any:
    is_float = getattr(x.type, "element", x.type) == FLOAT
    return (builder.fadd if is_float else builder.add)(x, y)


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
# Whether the processor multiplies matrices of bfloat16 (AMX), which PyTorch makes use of.
HAS_AMX: Final = bool(_FEATURES.get("amx-bf16"))
_BFLOAT16: Final = _Bfloat16() if _FEATURES.get("avx512bf16") else _WidenedBfloat16()
# Bytes of an input row that `bfloat16_tile` takes at once: as many as of a weight row where it
# takes bfloat16, twice as many where it takes float32.
BFLOAT16_INPUT_BYTES: Final = _BFLOAT16.input_bytes


def make_int8_tile(num_weights: int, max_inputs: int, *, use_vnni: bool = True) -> Any:
    """Make a tile of so many interleaved weight rows, and up to so many input rows."""
    return _make_tile(_Int8(_vnni_lanes(_FEATURES) if use_vnni else None), num_weights, max_inputs)


def make_bfloat16_tile(num_weights: int, max_inputs: int) -> Any:
    """Make a tile of so many bfloat16 weight rows, that lie one behind the other."""
    return _make_tile(_BFLOAT16, num_weights, max_inputs)
