"""Linear layers of int8 or bfloat16 weights, at the speed of memory where rows are few.

In: weights (out, in), and rows (N, in). Out: rows (N, out). Two weight rows are read side by side
and multiplied with a few input rows, whose sums stay in registers: so a decoder step, which has few
rows, reads each weight once. With more rows, as the encoder has when it runs ahead, weights are
multiplied again with the next few while they are in the second cache.

`prepare_row` and `multiply` are the two phases of a product, for kernels that have more phases;
`int8_linear` and `bfloat16_linear` do both alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, float32, int32, njit, uint8
from numba.extending import register_jitable
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.vectors import (
    BFLOAT16_INPUT_BYTES,
    HAS_MATRIX_PRODUCT,
    STEP_BYTES,
    TILE_WEIGHTS,
    address_of,
    ask_for,
    bytes_at,
    count_done,
    counter_at,
    drawn_so_far,
    floats_at,
    halves_at,
    ints_at,
    longs_at,
    make_bfloat16_tile,
    make_int8_tile,
    nearest_bfloat16,
    next_number,
    tile_rows,
    words_at,
)

# The most input rows of a tile: their sums, and they, fit the registers of AVX-512.
_INT8_INPUTS: Final = 10
# Without the processor's own dot product a weight takes two registers.
_HAS_DOT: Final = BFLOAT16_INPUT_BYTES == STEP_BYTES
_BFLOAT16_INPUTS: Final = 10 if _HAS_DOT else 5
# Up to so many rows `bfloat16_linear` is as fast as PyTorch's product, or faster.
MAX_BFLOAT16_ROWS: Final = 10 if not _HAS_DOT else 42 if HAS_MATRIX_PRODUCT else 1024
# So many bytes of a tile's input rows stay in the first cache. Where weights come from memory
# meanwhile, reading inputs again from the second one takes up to twice as long. So longer rows are
# multiplied a block after the other, of these sizes.
_INT8_BLOCKS_BYTES: Final = 24 << 10  # of all rows together
_BFLOAT16_BLOCK_BYTES: Final = 2 << 10  # of each row, always: the order of sums depends on it
# Weight rows that a thread draws at a time, at most: of the widest layer's 9,216 bytes 64 rows are
# 576 KiB, little enough for the second cache.
_DRAWN: Final = 64
# How far ahead of where it reads a thread asks for memory, with one row and with more. With half or
# twice as much a pass of the decoder is up to a quarter slower.
_AHEAD_BYTES: Final = 4 << 10
_AHEAD_OF_ROWS_BYTES: Final = 8 << 10
# Of the weights that it will read first a thread asks for so many bytes while it waits.
_FIRST_BYTES: Final = 128 << 10
# The byte that stands for 0 in an input.
_ZERO: Final = 128
# The largest magnitude that a row counts as having at least, 1e-30: a step of it is above 0.
_TINY_BITS: Final = int(np.float32(1e-30).view(np.int32))
# An input row of bfloat16 weights takes as many bytes as so many weight rows.
_BFLOAT16_INPUT_ROWS: Final = BFLOAT16_INPUT_BYTES // STEP_BYTES
# A matrix's numbers: these, and of up to three parts their own.
_IS_INT8, MATRIX_IN_DIM, _ROW_BYTES, MATRIX_OUT_DIM, _NUM_PARTS, _FIRST_PART = range(6)
_WEIGHTS, _SCALES, _SUMS, _BIAS, _PART_OUT_DIM, _PART_NUMBERS = range(6)
MATRIX_NUMBERS: Final = _FIRST_PART + 3 * _PART_NUMBERS
# The linear kernel's block: its counter, these, and the matrix's numbers.
_NUM_RANGES, _NUM_ROWS, _X, _INPUTS, _STEPS, _OUT, _NUMBERS = range(1, 8)
# Tiles of up to so many input rows.
int8_tile = make_int8_tile(TILE_WEIGHTS, _INT8_INPUTS)
bfloat16_dot = make_bfloat16_tile(1, 1)
bfloat16_tile = make_bfloat16_tile(TILE_WEIGHTS, _BFLOAT16_INPUTS)
# Numbers of a step of bfloat16 weights at even positions, and at odd ones.
_HALF_STEP: Final = STEP_BYTES // 4


class Int8Tiles(NamedTuple):
    """Int8 weights in the order in which `int8_linear` reads them, which is straight through.

    A processor reads one stretch of memory ahead of its own accord, several not as well. So the
    rows of a tile take turns:

        output     0        1        0          1          0           ...
        inputs     0..63    0..63    64..127    64..127    128..191    ...
    """

    values: Tensor  # (tiles, steps, 2, 64) int8, with zeros where a tile or step is not whole
    scales: Tensor  # (out,) float32, what a step of each output's weights is worth
    sums: Tensor  # (out,) int32, the sum of each output's weights

    @classmethod
    def of(cls, values: Tensor, scales: Tensor) -> Int8Tiles:
        """Lay out weights (out, in) int8 with a scale for each output, (out,) float32."""
        num_tiles, num_steps, *_ = cls.shape(*values.shape)
        padding = (0, -values.shape[1] % STEP_BYTES, 0, -len(values) % TILE_WEIGHTS)
        steps = F.pad(values, padding).view(num_tiles, TILE_WEIGHTS, num_steps, STEP_BYTES)
        sums = values.sum(dim=1, dtype=torch.int32)
        return cls(steps.transpose(1, 2).contiguous(), scales, sums)

    @staticmethod
    def shape(out_dim: int, in_dim: int) -> tuple[int, int, int, int]:
        """Return the shape of `values`."""
        return -(-out_dim // TILE_WEIGHTS), -(-in_dim // STEP_BYTES), TILE_WEIGHTS, STEP_BYTES


def int8_linear(x: Tensor, weight: Int8Tiles, bias: Tensor | None) -> Tensor:
    """Multiply rows by int8 weights.

    Each row becomes bytes first, as steps of its own largest magnitude; the products are summed as
    integers. So a row's result doesn't depend on the rows beside it.

    Args:
        x: (N, in) float32.
        bias: (out,) float32.

    Returns:
        (N, out) float32.
    """
    return _multiply_alone(x, weight, bias)[:, : len(weight.scales)]


def fits_bfloat16_linear(weight: Tensor) -> bool:
    """Whether a weight, (out, in), lies on a CPU as bfloat16 in whole tiles and steps."""
    out_dim, in_dim = weight.shape
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and out_dim % TILE_WEIGHTS == 0
        and 2 * in_dim % STEP_BYTES == 0
        and weight.is_contiguous()
    )


def bfloat16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply a few rows by bfloat16 weights, with sums in float32.

    Where the processor has a dot product of bfloat16 numbers, rows are rounded to bfloat16 for it.

    Args:
        x: (N, in) float32.
        weight: (out, in) bfloat16 that `fits_bfloat16_linear`.

    Returns:
        (N, out) float32.
    """
    return _multiply_alone(x, weight, None)


class Matrix(NamedTuple):
    """Weights of one input, whose outputs stand side by side, by their addresses."""

    is_int8: bool
    in_dim: int
    row_bytes: int  # of a weight row
    out_dim: int  # in whole tiles
    parts: tuple[tuple[int, ...], ...]  # weights, scales, sums, bias (0 for none), outputs

    @classmethod
    def of(cls, parts: Sequence[tuple[Int8Tiles | Tensor, Tensor | None]], in_dim: int) -> Matrix:
        """Take weights and their biases. The caller keeps them alive.

        Args:
            parts: int8 weights, of one part; or up to three parts that `fits_bfloat16_linear`. A
                bias is (out,) float32.
        """
        numbers = []
        for weight, bias in parts:
            bias_at = 0 if bias is None else bias.data_ptr()
            if isinstance(weight, Int8Tiles):
                values, scales, sums = (tensor.data_ptr() for tensor in weight)
                numbers.append((values, scales, sums, bias_at, len(weight.scales)))
            else:
                numbers.append((weight.data_ptr(), 0, 0, bias_at, len(weight)))
        is_int8 = isinstance(parts[0][0], Int8Tiles)
        row_bytes = -(-in_dim // STEP_BYTES) * STEP_BYTES if is_int8 else 2 * in_dim
        out_dim = sum(-(-part[_PART_OUT_DIM] // TILE_WEIGHTS) * TILE_WEIGHTS for part in numbers)
        return cls(is_int8, in_dim, row_bytes, out_dim, tuple(numbers))

    @property
    def input_bytes(self) -> int:
        """Bytes of an input row, made ready for the tiles."""
        return self.row_bytes if self.is_int8 else _BFLOAT16_INPUT_ROWS * self.row_bytes

    @property
    def numbers(self) -> list[int]:
        """What `prepare_row` and `multiply` read: `MATRIX_NUMBERS` integers."""
        parts = [number for part in self.parts for number in part]
        numbers = [self.is_int8, self.in_dim, self.row_bytes, self.out_dim, len(self.parts), *parts]
        return numbers + [0] * (MATRIX_NUMBERS - len(numbers))


def _multiply_alone(x: Tensor, weight: Int8Tiles | Tensor, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    num_rows, in_dim = x.shape
    matrix = Matrix.of([(weight, bias)], in_dim)
    inputs = torch.empty((num_rows, matrix.input_bytes), dtype=torch.uint8)
    steps = torch.empty(num_rows)
    out = torch.empty((num_rows, matrix.out_dim))
    num_threads = torch.get_num_threads()
    _linear(
        num_threads,
        num_rows,
        x.data_ptr(),
        inputs.data_ptr(),
        steps.data_ptr(),
        out.data_ptr(),
        *matrix.numbers,
        num_counters=2 * phase_counters(num_threads),
    )
    return out


@register_jitable
def phase_counters(num_threads: int) -> int:
    """Return how many counters a phase has: of what is done, and of what each thread has drawn.

    Weight rows lie in a range for each thread. A thread that reads on where it was is up to a
    seventh faster than one that begins elsewhere every time, as with a single counter.
    """
    return 1 + num_threads


@njit
def prepare_row(row, x, numbers, inputs, steps):  # type: ignore[no-untyped-def]
    """Make of a row what tiles take.

    Args:
        row: its number.
        x: where it is, float32.
        numbers: where the numbers of the matrix are that it will be multiplied with.
        inputs: where rows made ready are.
        steps: where it is noted what a step of each row is worth, (N,) float32, of int8 weights.
    """
    matrix = carray(longs_at(numbers), MATRIX_NUMBERS)
    in_dim, row_bytes = matrix[MATRIX_IN_DIM], matrix[_ROW_BYTES]
    if matrix[_IS_INT8]:
        _round_row(x, in_dim, row_bytes, inputs + row * row_bytes, steps + 4 * row)
    else:
        _halve_row(x, in_dim, inputs + row * _BFLOAT16_INPUT_ROWS * row_bytes)


@njit
def _round_row(row, in_dim, whole_in_dim, rounded_at, step_at):  # type: ignore[no-untyped-def]
    """Make bytes of a row, and note what one of their steps is worth."""
    x, bits = carray(floats_at(row), in_dim), carray(ints_at(row), in_dim)
    rounded = carray(bytes_at(rounded_at), whole_in_dim)
    # Magnitudes are in the order of their bits, and what is no number comes last: its row is none,
    # then.
    largest_bits = int32(_TINY_BITS)
    for i in range(in_dim):
        largest_bits = max(largest_bits, bits[i] & int32(0x7FFFFFFF))
    carray(ints_at(step_at), 1)[0] = largest_bits
    step = carray(floats_at(step_at), 1)
    largest = step[0]
    step[0] = largest / float32(127)
    per_step = float32(127) / largest
    for i in range(in_dim):
        rounded[i] = uint8(int32(x[i] * per_step + float32(_ZERO + 0.5)))
    for i in range(in_dim, whole_in_dim):
        rounded[i] = uint8(_ZERO)


@njit
def _halve_row(row, in_dim, to):  # type: ignore[no-untyped-def]
    """Make what a tile takes of a row: bfloat16, or float32 in the order of its steps."""
    x = carray(words_at(row), in_dim)
    if _HAS_DOT:
        halves = carray(halves_at(to), in_dim)
        for i in range(in_dim):
            halves[i] = nearest_bfloat16(x[i])
    else:
        spread = carray(words_at(to), in_dim)
        for first in range(0, in_dim, 2 * _HALF_STEP):
            for i in range(_HALF_STEP):
                spread[first + i] = x[first + 2 * i]
                spread[first + _HALF_STEP + i] = x[first + 2 * i + 1]


@njit
def _start(index, num_ranges, out_dim):  # type: ignore[no-untyped-def]
    """Return where a range of weight rows starts: at a whole tile."""
    return out_dim // TILE_WEIGHTS * index // num_ranges * TILE_WEIGHTS


@njit
def _next_rows(block, counters, num_ranges, own, num_done, out_dim):  # type: ignore[no-untyped-def]
    """Draw weight rows from a thread's own range, and when it is done from those of others.

    Args:
        counters: where in the block the first range's counter is.
        own: the thread's number.
        num_done: how many ranges the thread has found empty.

    Returns:
        The first row and the end, the same where no row is left, and the new `num_done`.
    """
    drawn = min(_DRAWN, max(out_dim // 16 // TILE_WEIGHTS, 1) * TILE_WEIGHTS)
    while num_done < num_ranges:
        index = (own + num_done) % num_ranges
        first = _start(index, num_ranges, out_dim)
        first += next_number(counter_at(block, counters + index)) * drawn
        end = _start(index + 1, num_ranges, out_dim)
        if first < end:
            return first, min(first + drawn, end), num_done
        num_done += 1
    return out_dim, out_dim, num_done


@njit
def wait_for(counter, count, ahead, ahead_end):  # type: ignore[no-untyped-def]
    """Wait until a counter has come so far, and ask for memory meanwhile.

    Returns:
        How far memory was asked for, from `ahead` up to `ahead_end`.
    """
    while drawn_so_far(counter) < count:
        if ahead < ahead_end:
            ask_for(ahead)
            ahead += STEP_BYTES
    return ahead


@njit
def first_bytes(numbers, own, num_ranges):  # type: ignore[no-untyped-def]
    """Return from where to where the weights lie that a thread will read first.

    Args:
        numbers: where the matrix's numbers are.
        own: the thread's number.
    """
    matrix = carray(longs_at(numbers), MATRIX_NUMBERS)
    row = _start(own % num_ranges, num_ranges, matrix[MATRIX_OUT_DIM])
    part = _FIRST_PART
    while row > 0 and row >= matrix[part + _PART_OUT_DIM]:
        row -= matrix[part + _PART_OUT_DIM]
        part += _PART_NUMBERS
    num_bytes = (matrix[part + _PART_OUT_DIM] - row) * matrix[_ROW_BYTES]
    first = matrix[part + _WEIGHTS] + row * matrix[_ROW_BYTES]
    return first, first + min(num_bytes, _FIRST_BYTES)


@njit
def multiply(  # type: ignore[no-untyped-def]
    block, counters, num_ranges, own, num_rows, numbers, inputs, steps, out, sums
):
    """Multiply rows with weight rows, until all weight rows are drawn.

    Args:
        counters: where in the block the phase's counters are.
        num_ranges: how many ranges the weight rows are drawn from.
        own: the thread's number.
        num_rows: N.
        numbers: where the matrix's numbers are.
        inputs: where the rows are, made ready.
        steps: what a step of each row is worth.
        out: where results are written, (N, out) float32.
        sums: where they are added to as well, (N, out) float32, or 0 for nowhere.
    """
    matrix = carray(longs_at(numbers), MATRIX_NUMBERS)
    row_bytes, out_dim = matrix[_ROW_BYTES], matrix[MATRIX_OUT_DIM]
    first, end, num_done = _next_rows(block, counters + 1, num_ranges, own, 0, out_dim)
    while first < end:
        start = 0
        for i in range(matrix[_NUM_PARTS]):
            part = numbers + 8 * (_FIRST_PART + i * _PART_NUMBERS)
            part_dim = carray(longs_at(part), _PART_NUMBERS)[_PART_OUT_DIM]
            whole_dim = (part_dim + TILE_WEIGHTS - 1) // TILE_WEIGHTS * TILE_WEIGHTS
            part_first, part_end = max(first - start, 0), min(end - start, whole_dim)
            if part_first < part_end:
                to = out + 4 * start
                if matrix[_IS_INT8]:
                    _multiply_int8(
                        part, row_bytes, part_first, part_end, num_rows, inputs, steps, to, out_dim
                    )
                else:
                    _multiply_bfloat16(
                        part, row_bytes, part_first, part_end, num_rows, inputs, to, out_dim
                    )
                if sums != 0:
                    _add(num_rows, part_first, min(part_end, part_dim), to, out_dim, sums, part_dim)
            start += whole_dim
        count_done(counter_at(block, counters), end - first)
        first, end, num_done = _next_rows(block, counters + 1, num_ranges, own, num_done, out_dim)


@njit
def _multiply_int8(  # type: ignore[no-untyped-def]
    numbers, row_bytes, first, end, num_rows, inputs, steps_at, out, out_dim
):
    """Multiply rows with weight rows from `first` to `end` of the part whose numbers are there."""
    part = carray(longs_at(numbers), _PART_NUMBERS)
    # Sums are written where the results will stand.
    row = 0
    while row < num_rows:
        count = tile_rows(num_rows - row, _INT8_INPUTS)
        num_blocks = (count * row_bytes + _INT8_BLOCKS_BYTES - 1) // _INT8_BLOCKS_BYTES
        most_bytes = (row_bytes // STEP_BYTES + num_blocks - 1) // num_blocks * STEP_BYTES
        for at in range(0, row_bytes, most_bytes):
            block_bytes = min(most_bytes, row_bytes - at)
            # The first rows' tiles ask memory for the weights that come next.
            ahead = 0
            if row == 0 and num_blocks > 1:
                ahead = TILE_WEIGHTS * row_bytes
            elif row == 0:
                ahead = _AHEAD_BYTES if num_rows == 1 else _AHEAD_OF_ROWS_BYTES
            for i in range(first, end, TILE_WEIGHTS):
                int8_tile(
                    part[_WEIGHTS] + i * row_bytes + TILE_WEIGHTS * at,
                    row_bytes,
                    inputs + row * row_bytes + at,
                    row_bytes,
                    block_bytes,
                    ahead,
                    out + 4 * (row * out_dim + i),
                    4 * out_dim,
                    at == 0,
                    count,
                )
        row += count
    end = min(end, part[_PART_OUT_DIM])
    steps = carray(floats_at(steps_at), num_rows)
    scales, sums = carray(floats_at(part[_SCALES]), end), carray(ints_at(part[_SUMS]), end)
    for row in range(num_rows):
        products = carray(ints_at(out + 4 * row * out_dim), end)
        results = carray(floats_at(out + 4 * row * out_dim), end)
        step = steps[row]
        for i in range(first, end):
            results[i] = float32(products[i] - _ZERO * sums[i]) * (step * scales[i])
    _add_bias(part[_BIAS], first, end, num_rows, out, out_dim)


@njit
def _multiply_bfloat16(  # type: ignore[no-untyped-def]
    numbers, row_bytes, first, end, num_rows, inputs, out, out_dim
):
    """Do the same with a part of bfloat16 weights."""
    part = carray(longs_at(numbers), _PART_NUMBERS)
    input_bytes = _BFLOAT16_INPUT_ROWS * row_bytes
    if num_rows == 1:
        # One input row leaves time to spare: a weight row after the other, straight through.
        for i in range(first, end):
            for at in range(0, row_bytes, _BFLOAT16_BLOCK_BYTES):
                bfloat16_dot(
                    part[_WEIGHTS] + i * row_bytes + at,
                    row_bytes,
                    inputs + _BFLOAT16_INPUT_ROWS * at,
                    input_bytes,
                    min(_BFLOAT16_BLOCK_BYTES, row_bytes - at),
                    _AHEAD_BYTES,
                    out + 4 * i,
                    4 * out_dim,
                    at == 0,
                    1,
                )
    else:
        row = 0
        while row < num_rows:
            count = tile_rows(num_rows - row, _BFLOAT16_INPUTS)
            ahead = TILE_WEIGHTS * row_bytes if row == 0 else 0
            for at in range(0, row_bytes, _BFLOAT16_BLOCK_BYTES):
                block_bytes = min(_BFLOAT16_BLOCK_BYTES, row_bytes - at)
                for i in range(first, end, TILE_WEIGHTS):
                    bfloat16_tile(
                        part[_WEIGHTS] + i * row_bytes + at,
                        row_bytes,
                        inputs + row * input_bytes + _BFLOAT16_INPUT_ROWS * at,
                        input_bytes,
                        block_bytes,
                        ahead,
                        out + 4 * (row * out_dim + i),
                        4 * out_dim,
                        at == 0,
                        count,
                    )
            row += count
    _add_bias(part[_BIAS], first, end, num_rows, out, out_dim)


@njit
def _add_bias(bias, first, end, num_rows, out, out_dim):  # type: ignore[no-untyped-def]
    """Add a bias, where there is one, to results from `first` to `end`."""
    if bias != 0:
        biases = carray(floats_at(bias), end)
        for row in range(num_rows):
            results = carray(floats_at(out + 4 * row * out_dim), end)
            for i in range(first, end):
                results[i] += biases[i]


@njit
def _add(num_rows, first, end, results_at, out_dim, sums_at, sums_dim):  # type: ignore[no-untyped-def]
    """Add results from `first` to `end` of each row to sums."""
    for row in range(num_rows):
        results = carray(floats_at(results_at + 4 * row * out_dim), end)
        sums = carray(floats_at(sums_at + 4 * row * sums_dim), end)
        for i in range(first, end):
            sums[i] += results[i]


@Kernel
def _linear(block: Any) -> None:
    args = carray(block, _NUMBERS + MATRIX_NUMBERS)
    num_ranges, num_rows = args[_NUM_RANGES], args[_NUM_ROWS]
    numbers = address_of(counter_at(block, _NUMBERS))
    row_bytes = 4 * args[_NUMBERS + MATRIX_IN_DIM]
    own = next_number(block)
    counters = len(args)
    drawn = counter_at(block, counters + 1)
    row = next_number(drawn)
    while row < num_rows:
        prepare_row(row, args[_X] + row * row_bytes, numbers, args[_INPUTS], args[_STEPS])
        next_number(counter_at(block, counters))
        row = next_number(drawn)
    ahead, ahead_end = first_bytes(numbers, own, num_ranges)
    wait_for(counter_at(block, counters), num_rows, ahead, ahead_end)
    counters += phase_counters(num_ranges)
    multiply(
        block,
        counters,
        num_ranges,
        own,
        num_rows,
        numbers,
        args[_INPUTS],
        args[_STEPS],
        args[_OUT],
        0,
    )
