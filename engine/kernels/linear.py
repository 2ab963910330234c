"""Linear layers of int8 or bfloat16 weights that are read where they lie.

In: weights (out, in), and rows (N, in). Out: rows (N, out). Four weight rows are read side by side
and multiplied with a few input rows, whose sums stay in registers: so a decoder step, which has few
rows, reads each weight once, at the speed of memory. With more rows, as the encoder has when it
runs ahead, weights are multiplied again with the next few while they are in the second cache.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numba import carray, float32, int32, njit, uint8, uint32
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.parallel import Kernel
from engine.kernels.vectors import (
    STEP_BYTES,
    bfloat16_tile,
    bytes_at,
    floats_at,
    halves_at,
    int8_tile,
    ints_at,
    next_number,
    words_at,
)

# Weight rows of a tile.
_WEIGHTS: Final = 4
# The most input rows of a tile, whose sums fit the registers of AVX-512.
_INT8_INPUTS: Final = 7
_BFLOAT16_INPUTS: Final = 5
# Up to so many rows `bfloat16_linear` is faster than PyTorch's product: two tiles.
MAX_BFLOAT16_ROWS: Final = 2 * _BFLOAT16_INPUTS
# Weight rows that a thread draws at a time, at most: of the widest layer's 9,216 bytes 64 rows are
# 576 KiB, little enough for the second cache.
_DRAWN: Final = 64
# The byte that stands for 0 in an input.
_ZERO: Final = 128
# The largest magnitude that a row counts as having at least, 1e-30: a step of it is above 0.
_TINY_BITS: Final = int(np.float32(1e-30).view(np.int32))
# Numbers of a step of bfloat16 weights at even positions, and at odd ones.
_HALF_STEP: Final = STEP_BYTES // 4


class Int8Rows:
    """Int8 weights as `int8_linear` reads them: in whole tiles and steps, padded by zeros."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Take weights, which aren't copied if their shape is a multiple of (4, 64).

        Args:
            values: (out, in) int8.
            scales: (out,) float32, what a step of each output's weights is worth.
            bias: (out,) float32 or None.
        """
        out_dim, in_dim = values.shape
        padding = (0, -in_dim % STEP_BYTES, 0, -out_dim % _WEIGHTS)
        self.out_dim = out_dim
        self.values = F.pad(values, padding) if any(padding) else values.contiguous()
        self.scales = F.pad(scales, padding[2:])
        self.bias = None if bias is None else F.pad(bias, padding[2:])
        self.sums = self.values.sum(dim=1, dtype=torch.int32)


def int8_linear(x: Tensor, weight: Int8Rows) -> Tensor:
    """Multiply rows by int8 weights.

    Each row becomes bytes first, as steps of its own largest magnitude; the products are summed as
    integers. So a row's result doesn't depend on the rows beside it.

    Args:
        x: (N, in) float32.

    Returns:
        (N, out) float32.
    """
    x = x.contiguous()
    num_rows, in_dim = x.shape
    out_dim, padded_dim = weight.values.shape
    rounded = torch.empty((num_rows, padded_dim), dtype=torch.uint8)
    steps = torch.empty(num_rows)
    out = torch.empty((num_rows, out_dim))
    _round_rows(num_rows, in_dim, padded_dim, x.data_ptr(), rounded.data_ptr(), steps.data_ptr())
    _int8_linear(
        num_rows,
        out_dim,
        padded_dim,
        rounded.data_ptr(),
        steps.data_ptr(),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        weight.sums.data_ptr(),
        0 if weight.bias is None else weight.bias.data_ptr(),
        out.data_ptr(),
    )
    return out[:, : weight.out_dim]


def fits_bfloat16_linear(weight: Tensor) -> bool:
    """Whether the shape of a weight, (out, in) bfloat16, is one of whole tiles and steps."""
    out_dim, in_dim = weight.shape
    return out_dim % _WEIGHTS == 0 and 2 * in_dim % STEP_BYTES == 0 and weight.is_contiguous()


def bfloat16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply a few rows by bfloat16 weights, with sums in float32.

    Args:
        x: (N, in) bfloat16.
        weight: (out, in) bfloat16 that `fits_bfloat16_linear`.

    Returns:
        (N, out) float32.
    """
    x = x.contiguous()
    num_rows, in_dim = x.shape
    spread = torch.empty((num_rows, in_dim))
    out = torch.empty((num_rows, len(weight)))
    _spread_rows(num_rows, in_dim, x.data_ptr(), spread.data_ptr())
    _bfloat16_linear(
        num_rows, len(weight), in_dim, spread.data_ptr(), weight.data_ptr(), out.data_ptr()
    )
    return out


@Kernel
def _round_rows(block: Any) -> None:
    args = carray(block, 7)
    num_rows, in_dim, padded_dim = args[1], args[2], args[3]
    steps = carray(floats_at(args[6]), num_rows)
    row = next_number(block)
    while row < num_rows:
        x = carray(floats_at(args[4] + 4 * row * in_dim), in_dim)
        bits = carray(ints_at(args[4] + 4 * row * in_dim), in_dim)
        rounded = carray(bytes_at(args[5] + row * padded_dim), padded_dim)
        # Magnitudes are in the order of their bits, and what is no number comes last: its row
        # is none, then.
        largest_bits = int32(_TINY_BITS)
        for i in range(in_dim):
            largest_bits = max(largest_bits, bits[i] & int32(0x7FFFFFFF))
        carray(ints_at(args[6]), num_rows)[row] = largest_bits
        largest = steps[row]
        steps[row] = largest / float32(127)
        per_step = float32(127) / largest
        for i in range(in_dim):
            rounded[i] = uint8(int32(x[i] * per_step + float32(_ZERO + 0.5)))
        for i in range(in_dim, padded_dim):
            rounded[i] = uint8(_ZERO)
        row = next_number(block)


@Kernel
def _spread_rows(block: Any) -> None:
    args = carray(block, 5)
    num_rows, in_dim = args[1], args[2]
    row = next_number(block)
    while row < num_rows:
        x = carray(halves_at(args[3] + 2 * row * in_dim), in_dim)
        spread = carray(words_at(args[4] + 4 * row * in_dim), in_dim)
        for first in range(0, in_dim, 2 * _HALF_STEP):
            for i in range(_HALF_STEP):
                spread[first + i] = uint32(x[first + 2 * i]) << uint32(16)
                spread[first + _HALF_STEP + i] = uint32(x[first + 2 * i + 1]) << uint32(16)
        row = next_number(block)


@njit
def _multiply_int8(count, weights, in_bytes, x, ahead, out, out_bytes):  # type: ignore[no-untyped-def]
    """Multiply a tile's weight rows with `count` input rows."""
    if count == 1:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 1)
    elif count == 2:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 2)
    elif count == 3:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 3)
    elif count == 4:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 4)
    elif count == 5:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 5)
    elif count == 6:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 6)
    else:
        int8_tile(weights, in_bytes, x, in_bytes, ahead, out, out_bytes, _WEIGHTS, 7)


@Kernel
def _int8_linear(block: Any) -> None:
    args = carray(block, 11)
    num_rows, out_dim, in_dim, x = args[1], args[2], args[3], args[4]
    steps = carray(floats_at(args[5]), num_rows)
    weights, bias, out = args[6], args[9], args[10]
    scales = carray(floats_at(args[7]), out_dim)
    sums = carray(ints_at(args[8]), out_dim)
    drawn = _drawn(out_dim)
    first = next_number(block) * drawn
    while first < out_dim:
        end = min(first + drawn, out_dim)
        row = 0
        while row < num_rows:
            count = _tile_rows(num_rows - row, _INT8_INPUTS)
            # The first tile asks memory for the weights that come next.
            ahead = _WEIGHTS * in_dim if row == 0 else 0
            inputs = x + row * in_dim
            for i in range(first, end, _WEIGHTS):
                # Sums are written where the results will stand.
                sums_at = out + 4 * (row * out_dim + i)
                _multiply_int8(
                    count, weights + i * in_dim, in_dim, inputs, ahead, sums_at, 4 * out_dim
                )
            row += count
        for row in range(num_rows):
            products = carray(ints_at(out + 4 * row * out_dim), out_dim)
            results = carray(floats_at(out + 4 * row * out_dim), out_dim)
            step = steps[row]
            for i in range(first, end):
                results[i] = float32(products[i] - _ZERO * sums[i]) * (step * scales[i])
            if bias != 0:
                biases = carray(floats_at(bias), out_dim)
                for i in range(first, end):
                    results[i] += biases[i]
        first = next_number(block) * drawn


@njit
def _multiply_bfloat16(count, weights, in_bytes, x, ahead, out, out_bytes):  # type: ignore[no-untyped-def]
    """Multiply a tile's weight rows with `count` input rows."""
    x_bytes = 2 * in_bytes
    if count == 1:
        bfloat16_tile(weights, in_bytes, x, x_bytes, ahead, out, out_bytes, _WEIGHTS, 1)
    elif count == 2:
        bfloat16_tile(weights, in_bytes, x, x_bytes, ahead, out, out_bytes, _WEIGHTS, 2)
    elif count == 3:
        bfloat16_tile(weights, in_bytes, x, x_bytes, ahead, out, out_bytes, _WEIGHTS, 3)
    elif count == 4:
        bfloat16_tile(weights, in_bytes, x, x_bytes, ahead, out, out_bytes, _WEIGHTS, 4)
    else:
        bfloat16_tile(weights, in_bytes, x, x_bytes, ahead, out, out_bytes, _WEIGHTS, 5)


@Kernel
def _bfloat16_linear(block: Any) -> None:
    args = carray(block, 7)
    num_rows, out_dim, in_dim, x = args[1], args[2], args[3], args[4]
    weights, out = args[5], args[6]
    in_bytes = 2 * in_dim
    drawn = _drawn(out_dim)
    first = next_number(block) * drawn
    while first < out_dim:
        row = 0
        while row < num_rows:
            count = _tile_rows(num_rows - row, _BFLOAT16_INPUTS)
            ahead = _WEIGHTS * in_bytes if row == 0 else 0
            inputs = x + row * 4 * in_dim
            for i in range(first, min(first + drawn, out_dim), _WEIGHTS):
                to = out + 4 * (row * out_dim + i)
                _multiply_bfloat16(
                    count, weights + i * in_bytes, in_bytes, inputs, ahead, to, 4 * out_dim
                )
            row += count
        first = next_number(block) * drawn


@njit
def _drawn(out_dim: int) -> int:
    """Return how many weight rows a thread draws at a time: of small layers, a sixteenth."""
    return min(_DRAWN, max(out_dim // 16 // _WEIGHTS, 1) * _WEIGHTS)


@njit
def _tile_rows(num_left: int, most: int) -> int:
    """Return how many input rows to take next. 8 are 4 and 4 then, not 7 and 1."""
    num_tiles = (num_left + most - 1) // most
    return (num_left + num_tiles - 1) // num_tiles
