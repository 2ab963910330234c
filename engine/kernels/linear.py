"""Linear layers of int8 or bfloat16 weights, at the speed of memory where rows are few.

In: weights (out, in), and rows (N, in). Out: rows (N, out). Four weight rows are read side by side
and multiplied with a few input rows, whose sums stay in registers: so a decoder step, which has few
rows, reads each weight once. With more rows, as the encoder has when it runs ahead, weights are
multiplied again with the next few while they are in the second cache.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, float32, int32, njit, uint8
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.parallel import Kernel
from engine.kernels.vectors import (
    BFLOAT16_INPUT_BYTES,
    STEP_BYTES,
    bfloat16_tile,
    bytes_at,
    counter_at,
    drawn_so_far,
    floats_at,
    halves_at,
    int8_tile,
    ints_at,
    nearest_bfloat16,
    next_number,
    tile_rows,
    words_at,
)

# Weight rows of a tile.
_WEIGHTS: Final = 4
# The most input rows of a tile, whose sums fit the registers of AVX-512.
_INT8_INPUTS: Final = 7
# Without the processor's own dot product a weight takes two registers.
_HAS_DOT: Final = BFLOAT16_INPUT_BYTES == STEP_BYTES
_BFLOAT16_INPUTS: Final = 7 if _HAS_DOT else 5
# Up to so many rows `bfloat16_linear` is faster than PyTorch's product: some tiles.
MAX_BFLOAT16_ROWS: Final = (6 if _HAS_DOT else 2) * _BFLOAT16_INPUTS
# Weight rows that a thread draws at a time, at most: of the widest layer's 9,216 bytes 64 rows are
# 576 KiB, little enough for the second cache.
_DRAWN: Final = 64
# How far ahead of where it reads a thread asks for memory.
_AHEAD_BYTES: Final = 4096
# Two more counters, of input rows: how many were drawn to be converted, and how many are.
_NO_ROWS: Final = (0, 0)
# The byte that stands for 0 in an input.
_ZERO: Final = 128
# The largest magnitude that a row counts as having at least, 1e-30: a step of it is above 0.
_TINY_BITS: Final = int(np.float32(1e-30).view(np.int32))
# Numbers of a step of bfloat16 weights at even positions, and at odd ones.
_HALF_STEP: Final = STEP_BYTES // 4


class Int8Tiles(NamedTuple):
    """Int8 weights in the order in which `int8_linear` reads them, which is straight through.

    A processor reads one stretch of memory ahead of its own accord, four not as well. So the rows
    of a tile take turns:

        output     0        1        2        3        0          1          ...
        inputs     0..63    0..63    0..63    0..63    64..127    64..127    ...
    """

    values: Tensor  # (tiles, steps, 4, 64) int8, with zeros where a tile or step is not whole
    scales: Tensor  # (out,) float32, what a step of each output's weights is worth
    sums: Tensor  # (out,) int32, the sum of each output's weights

    @classmethod
    def of(cls, values: Tensor, scales: Tensor) -> Int8Tiles:
        """Lay out weights (out, in) int8 with a scale for each output, (out,) float32."""
        num_tiles, num_steps, *_ = cls.shape(*values.shape)
        padding = (0, -values.shape[1] % STEP_BYTES, 0, -len(values) % _WEIGHTS)
        steps = F.pad(values, padding).view(num_tiles, _WEIGHTS, num_steps, STEP_BYTES)
        sums = values.sum(dim=1, dtype=torch.int32)
        return cls(steps.transpose(1, 2).contiguous(), scales, sums)

    @staticmethod
    def shape(out_dim: int, in_dim: int) -> tuple[int, int, int, int]:
        """Return the shape of `values`."""
        return -(-out_dim // _WEIGHTS), -(-in_dim // STEP_BYTES), _WEIGHTS, STEP_BYTES


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
    x = x.contiguous()
    num_rows, in_dim = x.shape
    num_tiles, num_steps, *_ = weight.values.shape
    out_dim, whole_out_dim, whole_in_dim = (
        len(weight.scales),
        num_tiles * _WEIGHTS,
        num_steps * STEP_BYTES,
    )
    rounded = torch.empty((num_rows, whole_in_dim), dtype=torch.uint8)
    steps = torch.empty(num_rows)
    out = torch.empty((num_rows, whole_out_dim))
    ranges = _ranges()
    _int8_linear(
        *_NO_ROWS,
        len(ranges),
        num_rows,
        out_dim,
        whole_out_dim,
        in_dim,
        whole_in_dim,
        x.data_ptr(),
        rounded.data_ptr(),
        steps.data_ptr(),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        weight.sums.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        *ranges,
    )
    return out[:, :out_dim]


def fits_bfloat16_linear(weight: Tensor) -> bool:
    """Whether a weight, (out, in), lies on a CPU as bfloat16 in whole tiles and steps."""
    out_dim, in_dim = weight.shape
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and out_dim % _WEIGHTS == 0
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
    x = x.contiguous()
    num_rows, in_dim = x.shape
    inputs = torch.empty((num_rows, in_dim), dtype=torch.bfloat16 if _HAS_DOT else torch.float32)
    out = torch.empty((num_rows, len(weight)))
    ranges = _ranges()
    _bfloat16_linear(
        *_NO_ROWS,
        len(ranges),
        num_rows,
        len(weight),
        in_dim,
        x.data_ptr(),
        inputs.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *ranges,
    )
    return out


def _ranges() -> list[int]:
    """Return a counter for each thread, of its range of weight rows.

    A thread that reads on where it was is up to a seventh faster than one that begins elsewhere
    every time, as with a single counter.
    """
    return [0] * torch.get_num_threads()


@njit
def _round_row(row, in_dim, whole_in_dim, x_at, rounded_at, steps_at):  # type: ignore[no-untyped-def]
    """Make bytes of a row, and note what one of their steps is worth."""
    x = carray(floats_at(x_at + 4 * row * in_dim), in_dim)
    bits = carray(ints_at(x_at + 4 * row * in_dim), in_dim)
    rounded = carray(bytes_at(rounded_at + row * whole_in_dim), whole_in_dim)
    # Magnitudes are in the order of their bits, and what is no number comes last: its row is none,
    # then.
    largest_bits = int32(_TINY_BITS)
    for i in range(in_dim):
        largest_bits = max(largest_bits, bits[i] & int32(0x7FFFFFFF))
    carray(ints_at(steps_at + 4 * row), 1)[0] = largest_bits
    step = carray(floats_at(steps_at + 4 * row), 1)
    largest = step[0]
    step[0] = largest / float32(127)
    per_step = float32(127) / largest
    for i in range(in_dim):
        rounded[i] = uint8(int32(x[i] * per_step + float32(_ZERO + 0.5)))
    for i in range(in_dim, whole_in_dim):
        rounded[i] = uint8(_ZERO)


@njit
def _halve_row(row, in_dim, x_at, inputs_at):  # type: ignore[no-untyped-def]
    """Make what a tile takes of a row: bfloat16, or float32 in the order of its steps."""
    x = carray(words_at(x_at + 4 * row * in_dim), in_dim)
    if _HAS_DOT:
        halves = carray(halves_at(inputs_at + 2 * row * in_dim), in_dim)
        for i in range(in_dim):
            halves[i] = nearest_bfloat16(x[i])
    else:
        spread = carray(words_at(inputs_at + 4 * row * in_dim), in_dim)
        for first in range(0, in_dim, 2 * _HALF_STEP):
            for i in range(_HALF_STEP):
                spread[first + i] = x[first + 2 * i]
                spread[first + _HALF_STEP + i] = x[first + 2 * i + 1]


@njit
def _start(index, num_ranges, out_dim):  # type: ignore[no-untyped-def]
    """Return where a range of weight rows starts: at a whole tile."""
    return out_dim // _WEIGHTS * index // num_ranges * _WEIGHTS


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
    drawn = min(_DRAWN, max(out_dim // 16 // _WEIGHTS, 1) * _WEIGHTS)
    while num_done < num_ranges:
        index = (own + num_done) % num_ranges
        first = _start(index, num_ranges, out_dim)
        first += next_number(counter_at(block, counters + index)) * drawn
        end = _start(index + 1, num_ranges, out_dim)
        if first < end:
            return first, min(first + drawn, end), num_done
        num_done += 1
    return out_dim, out_dim, num_done


@Kernel
def _int8_linear(block: Any) -> None:
    args = carray(block, 17)
    num_ranges, num_rows, out_dim, whole_out_dim = args[3], args[4], args[5], args[6]
    row_dim, in_dim = args[7], args[8]
    x, weights, bias, out = args[10], args[12], args[15], args[16]
    drawn_rows, done_rows = counter_at(block, 1), counter_at(block, 2)
    row = next_number(drawn_rows)
    while row < num_rows:
        _round_row(row, row_dim, in_dim, args[9], x, args[11])
        next_number(done_rows)
        row = next_number(drawn_rows)
    while drawn_so_far(done_rows) < num_rows:
        pass  # another thread has the last row
    steps = carray(floats_at(args[11]), num_rows)
    scales = carray(floats_at(args[13]), out_dim)
    sums = carray(ints_at(args[14]), out_dim)
    own = next_number(block)
    first, end, num_done = _next_rows(block, len(args), num_ranges, own, 0, whole_out_dim)
    while first < end:
        row = 0
        while row < num_rows:
            count = tile_rows(num_rows - row, _INT8_INPUTS)
            # The first tile asks memory for the weights that come next.
            ahead = _AHEAD_BYTES if row == 0 else 0
            inputs = x + row * in_dim
            for i in range(first, end, _WEIGHTS):
                # Sums are written where the results will stand.
                at = out + 4 * (row * whole_out_dim + i)
                int8_tile(
                    weights + i * in_dim,
                    in_dim,
                    inputs,
                    in_dim,
                    ahead,
                    at,
                    4 * whole_out_dim,
                    _WEIGHTS,
                    count,
                    _INT8_INPUTS,
                )
            row += count
        for row in range(num_rows):
            products = carray(ints_at(out + 4 * row * whole_out_dim), out_dim)
            results = carray(floats_at(out + 4 * row * whole_out_dim), out_dim)
            step = steps[row]
            for i in range(first, min(end, out_dim)):
                results[i] = float32(products[i] - _ZERO * sums[i]) * (step * scales[i])
            if bias != 0:
                biases = carray(floats_at(bias), out_dim)
                for i in range(first, min(end, out_dim)):
                    results[i] += biases[i]
        first, end, num_done = _next_rows(
            block, len(args), num_ranges, own, num_done, whole_out_dim
        )


@njit
def _multiply_bfloat16(count, weights, in_bytes, x, x_bytes, ahead, out, out_bytes):  # type: ignore[no-untyped-def]
    """Multiply a tile's weight rows with `count` input rows."""
    if count == 1:
        # One input row leaves time to spare: a weight row after the other, straight through.
        for i in range(_WEIGHTS):
            row = weights + i * in_bytes
            bfloat16_tile(row, in_bytes, x, x_bytes, _AHEAD_BYTES, out + 4 * i, out_bytes, 1, 1, 1)
    else:
        bfloat16_tile(
            weights,
            in_bytes,
            x,
            x_bytes,
            ahead,
            out,
            out_bytes,
            _WEIGHTS,
            count,
            _BFLOAT16_INPUTS,
        )


@Kernel
def _bfloat16_linear(block: Any) -> None:
    args = carray(block, 11)
    num_ranges, num_rows, out_dim, in_dim = args[3], args[4], args[5], args[6]
    x, weights, out = args[8], args[9], args[10]
    in_bytes = 2 * in_dim
    x_bytes = in_bytes // STEP_BYTES * BFLOAT16_INPUT_BYTES
    drawn_rows, done_rows = counter_at(block, 1), counter_at(block, 2)
    row = next_number(drawn_rows)
    while row < num_rows:
        _halve_row(row, in_dim, args[7], x)
        next_number(done_rows)
        row = next_number(drawn_rows)
    while drawn_so_far(done_rows) < num_rows:
        pass  # another thread has the last row
    own = next_number(block)
    first, end, num_done = _next_rows(block, len(args), num_ranges, own, 0, out_dim)
    while first < end:
        row = 0
        while row < num_rows:
            count = tile_rows(num_rows - row, _BFLOAT16_INPUTS)
            ahead = _WEIGHTS * in_bytes if row == 0 else 0
            inputs = x + row * x_bytes
            for i in range(first, end, _WEIGHTS):
                to = out + 4 * (row * out_dim + i)
                _multiply_bfloat16(
                    count, weights + i * in_bytes, in_bytes, inputs, x_bytes, ahead, to, 4 * out_dim
                )
            row += count
        first, end, num_done = _next_rows(block, len(args), num_ranges, own, num_done, out_dim)
