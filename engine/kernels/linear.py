"""Linear layers of int8 or bfloat16 weights, at the speed of memory where rows are few.

In: weights (out, in), and rows (N, in). Out: rows (N, out). A product has two phases: rows are
quantized to what tiles take (`quantize_row`), then multiplied with the weights (`multiply`). Two
weight rows are read side by side and multiplied with a few input rows, whose sums stay in
registers: so a decoder step, which has few rows, reads each weight once. With more rows, as the
encoder has on a backlog, weights are multiplied again while they are in L2.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import carray, float32, int32, njit, uint8

from voxlite.engine.kernels.descriptors import INT8, matrix_at
from voxlite.engine.kernels.intrinsics import (
    bytes_at,
    floats_at,
    halves_at,
    ints_at,
    nearest_bfloat16,
    tile_rows,
    words_at,
)
from voxlite.engine.kernels.tiles import (
    BFLOAT16_INPUT_BYTES,
    HAS_AMX,
    STEP_BYTES,
    TILE_WEIGHTS,
    make_bfloat16_tile,
    make_int8_tile,
)
from voxlite.engine.kernels.work import finish_items, take_weight_rows

# The most input rows of a tile: with their sums they fit the registers of AVX-512. Without the
# processor's own dot product a bfloat16 weight takes two registers.
_HAS_DOT: Final = BFLOAT16_INPUT_BYTES == STEP_BYTES
_MAX_INT8_INPUTS: Final = 10
_MAX_BFLOAT16_INPUTS: Final = 10 if _HAS_DOT else 5
# Up to so many rows `bfloat16_linear` is as fast as PyTorch's product, or faster.
MAX_BFLOAT16_ROWS: Final = 10 if not _HAS_DOT else 42 if HAS_AMX else 1024
# Long rows are multiplied in slices of these sizes, so that a tile's input rows stay in L1; reading
# them from L2, while weights come from memory, takes up to twice as long.
_INT8_SLICES_BYTES: Final = 24 << 10  # of all rows of a tile together
_BFLOAT16_SLICE_BYTES: Final = 2 << 10  # of each row, always: the order of sums depends on it
# How far ahead of where it reads a thread prefetches, with one row and with more, unless rows are
# sliced: then by a tile. With half or twice as much a decoder pass is up to a quarter slower.
_PREFETCH_BYTES: Final = 4 << 10
_PREFETCH_BYTES_MANY_ROWS: Final = 8 << 10
# The byte that stands for 0 in a quantized row.
_ZERO_POINT: Final = 128
# A row's largest magnitude counts as at least 1e-30, so that its scale is above 0.
_TINY_BITS: Final = int(np.float32(1e-30).view(np.int32))
# An input row of bfloat16 weights takes as many bytes as so many weight rows.
_BFLOAT16_INPUT_ROWS: Final = BFLOAT16_INPUT_BYTES // STEP_BYTES
# Numbers of a step of bfloat16 weights at even positions, and at odd ones.
_HALF_STEP: Final = STEP_BYTES // 4
int8_tile = make_int8_tile(TILE_WEIGHTS, _MAX_INT8_INPUTS)
bfloat16_row = make_bfloat16_tile(1, 1)
bfloat16_tile = make_bfloat16_tile(TILE_WEIGHTS, _MAX_BFLOAT16_INPUTS)


@njit
def quantize_row(batch, matrix_address, row, x):  # type: ignore[no-untyped-def]
    """Convert the row at an address, float32, to what a matrix's tiles take.

    Args:
        row: its number, which says where in the batch's buffers it is written.
    """
    matrix = matrix_at(matrix_address)
    out = batch.quantized + row * matrix.input_bytes
    if matrix.weight_type == INT8:
        _quantize_to_bytes(x, matrix.in_dim, matrix.row_bytes, out, batch.row_scales + 4 * row)
    else:
        _quantize_to_bfloat16(x, matrix.in_dim, out)


@njit
def _quantize_to_bytes(row, in_dim, row_bytes, out, scale_at):  # type: ignore[no-untyped-def]
    """Quantize a row to bytes by its own scale, and write the scale."""
    x, bits = carray(floats_at(row), in_dim), carray(ints_at(row), in_dim)
    quantized = carray(bytes_at(out), row_bytes)
    # Magnitudes are in the order of their bits, and NaN comes last: such a row's scale is NaN, and
    # so are its outputs.
    largest_bits = int32(_TINY_BITS)
    for i in range(in_dim):
        largest_bits = max(largest_bits, bits[i] & int32(0x7FFFFFFF))
    carray(ints_at(scale_at), 1)[0] = largest_bits
    scale = carray(floats_at(scale_at), 1)
    largest = scale[0]
    scale[0] = largest / float32(127)
    per_step = float32(127) / largest
    for i in range(in_dim):
        quantized[i] = uint8(int32(x[i] * per_step + float32(_ZERO_POINT + 0.5)))
    for i in range(in_dim, row_bytes):
        quantized[i] = uint8(_ZERO_POINT)


@njit
def _quantize_to_bfloat16(row, in_dim, out):  # type: ignore[no-untyped-def]
    """Round a row to bfloat16, or lay out its float32 numbers in the order of a tile's steps."""
    x = carray(words_at(row), in_dim)
    if _HAS_DOT:
        halves = carray(halves_at(out), in_dim)
        for i in range(in_dim):
            halves[i] = nearest_bfloat16(x[i])
    else:
        numbers = carray(words_at(out), in_dim)
        for first in range(0, in_dim, 2 * _HALF_STEP):
            for i in range(_HALF_STEP):
                numbers[first + i] = x[first + 2 * i]
                numbers[first + _HALF_STEP + i] = x[first + 2 * i + 1]


@njit
def multiply(batch, phase, counters, thread):  # type: ignore[no-untyped-def]
    """Multiply all quantized rows with weight rows, until none is left in the work queues."""
    matrix = matrix_at(phase.matrix)
    out_dim = matrix.out_dim
    first, end, num_empty = take_weight_rows(counters, batch.num_threads, thread, 0, out_dim)
    while first < end:
        start = 0  # the part's first output
        for i in range(matrix.num_parts):
            part = matrix.parts[i]
            padded_dim = (part.out_dim + TILE_WEIGHTS - 1) // TILE_WEIGHTS * TILE_WEIGHTS
            part_first, part_end = max(first - start, 0), min(end - start, padded_dim)
            if part_first < part_end:
                out = phase.output + 4 * start
                _multiply_part(batch, matrix, part, out, part_first, part_end)
                if phase.residual != 0:
                    part_end = min(part_end, part.out_dim)
                    _add_to_residual(batch, matrix, part, phase.residual, out, part_first, part_end)
            start += padded_dim
        finish_items(counters, end - first)
        first, end, num_empty = take_weight_rows(
            counters, batch.num_threads, thread, num_empty, out_dim
        )


@njit
def _multiply_part(batch, matrix, part, out, first, end):  # type: ignore[no-untyped-def]
    """Multiply with weight rows [first, end) of a part, whose first output is written at `out`."""
    num_rows, row = batch.num_rows, 0
    is_int8 = matrix.weight_type == INT8
    if num_rows == 1 and not is_int8:
        _multiply_bfloat16_row(batch, matrix, part, out, first, end)
        row = 1
    max_inputs = _MAX_INT8_INPUTS if is_int8 else _MAX_BFLOAT16_INPUTS
    while row < num_rows:
        count = tile_rows(num_rows - row, max_inputs)
        _multiply_rows(batch, matrix, part, out, (first, end), row, count)
        row += count
    if is_int8:
        _dequantize(batch, matrix, part, out, first, min(end, part.out_dim))
    if part.bias != 0:
        _add_bias(batch, matrix, part, out, first, min(end, part.out_dim))


@njit
def _multiply_rows(batch, matrix, part, out, span, row, count):  # type: ignore[no-untyped-def]
    """Multiply input rows [row, row + count), a tile's, and write their sums."""
    row_bytes, input_bytes, out_bytes = matrix.row_bytes, matrix.input_bytes, 4 * matrix.out_dim
    weights, weights_per_byte = part.weights, 1
    inputs_per_byte = _BFLOAT16_INPUT_ROWS
    slice_bytes, prefetch_bytes = _BFLOAT16_SLICE_BYTES, TILE_WEIGHTS * row_bytes
    is_int8 = matrix.weight_type == INT8
    if is_int8:
        weights_per_byte, inputs_per_byte = TILE_WEIGHTS, 1  # interleaved
        num_slices = (count * row_bytes + _INT8_SLICES_BYTES - 1) // _INT8_SLICES_BYTES
        slice_bytes = (row_bytes // STEP_BYTES + num_slices - 1) // num_slices * STEP_BYTES
        if num_slices == 1:
            prefetch_bytes = _PREFETCH_BYTES if batch.num_rows == 1 else _PREFETCH_BYTES_MANY_ROWS
    if row > 0:
        prefetch_bytes = 0  # the first rows' tiles have brought the weights
    inputs, out_row = batch.quantized + row * input_bytes, out + row * out_bytes
    for at in range(0, row_bytes, slice_bytes):
        num_bytes = min(slice_bytes, row_bytes - at)
        input_pair = inputs + inputs_per_byte * at, input_bytes
        for i in range(span[0], span[1], TILE_WEIGHTS):
            weight_pair = weights + i * row_bytes + weights_per_byte * at, row_bytes
            out_pair = out_row + 4 * i, out_bytes
            if is_int8:
                int8_tile(
                    weight_pair, input_pair, out_pair, num_bytes, prefetch_bytes, at == 0, count
                )
            else:
                bfloat16_tile(
                    weight_pair, input_pair, out_pair, num_bytes, prefetch_bytes, at == 0, count
                )


@njit
def _multiply_bfloat16_row(batch, matrix, part, out, first, end):  # type: ignore[no-untyped-def]
    """Multiply a single row: one weight row after the other, which reads memory straight through.

    Two at once would gain nothing, since one input row leaves the processor time to spare.
    """
    row_bytes, inputs, weights = matrix.row_bytes, batch.quantized, part.weights
    input_bytes = _BFLOAT16_INPUT_ROWS * row_bytes
    for i in range(first, end):
        for at in range(0, row_bytes, _BFLOAT16_SLICE_BYTES):
            bfloat16_row(
                (weights + i * row_bytes + at, row_bytes),
                (inputs + _BFLOAT16_INPUT_ROWS * at, input_bytes),
                (out + 4 * i, 4),
                min(_BFLOAT16_SLICE_BYTES, row_bytes - at),
                _PREFETCH_BYTES,
                at == 0,
                1,
            )


@njit
def _dequantize(batch, matrix, part, out, first, end):  # type: ignore[no-untyped-def]
    """Turn integer sums [first, end) into results, by the scales of rows and outputs."""
    num_rows, row_bytes = batch.num_rows, 4 * matrix.out_dim
    row_scales = carray(floats_at(batch.row_scales), num_rows)
    scales, sums = carray(floats_at(part.scales), end), carray(ints_at(part.sums), end)
    for row in range(num_rows):
        products = carray(ints_at(out + row * row_bytes), end)
        results = carray(floats_at(out + row * row_bytes), end)
        row_scale = row_scales[row]
        for i in range(first, end):
            product = products[i] - _ZERO_POINT * sums[i]
            results[i] = float32(product) * (row_scale * scales[i])


@njit
def _add_bias(batch, matrix, part, out, first, end):  # type: ignore[no-untyped-def]
    biases = carray(floats_at(part.bias), end)
    for row in range(batch.num_rows):
        results = carray(floats_at(out + 4 * row * matrix.out_dim), end)
        for i in range(first, end):
            results[i] += biases[i]


@njit
def _add_to_residual(batch, matrix, part, residual, out, first, end):  # type: ignore[no-untyped-def]
    """Add results [first, end) of all rows to the residual, (N, out_dim of the part)."""
    num_rows, row_bytes, residual_bytes = batch.num_rows, 4 * matrix.out_dim, 4 * part.out_dim
    for row in range(num_rows):
        results = carray(floats_at(out + row * row_bytes), end)
        sums = carray(floats_at(residual + row * residual_bytes), end)
        for i in range(first, end):
            sums[i] += results[i]
