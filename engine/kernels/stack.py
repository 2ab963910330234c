"""All layers of encoder or decoder in one call: between two products nothing is waited for.

In: rows of a flat batch, the layers' weights and KV caches. Out: the rows behind the last layer.
Legend: N rows of the flat batch, H heads, K key/value heads, D head size.

A layer is ten phases: four products, with what makes rows ready for each, rotation and attention.
Threads draw a phase's work, which is rows, pieces or weight rows, and wait until all of it is done;
meanwhile they ask memory for the weights that they will read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, float32, int32, njit
from torch import Tensor

from voxlite.engine.kernels.attention import Windows, attend_item
from voxlite.engine.kernels.attention_tiles import POWER_COEFFICIENTS as _POWER_COEFFICIENTS
from voxlite.engine.kernels.linear import (
    MATRIX_IN_DIM,
    MATRIX_NUMBERS,
    MATRIX_OUT_DIM,
    MAX_BFLOAT16_ROWS,
    Matrix,
    first_bytes,
    multiply,
    phase_counters,
    prepare_row,
    wait_for,
)
from voxlite.engine.kernels.norm import float32_tensor, norm_row
from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.rope import rotate_and_store_row
from voxlite.engine.kernels.vectors import counter_at, floats_at, longs_at, next_number

# The products of a layer.
_NUM_PRODUCTS: Final = 4
_WQKV, _WO, _W13, _W2 = range(_NUM_PRODUCTS)
# Each has a phase that makes rows ready and one that multiplies; two more rotate and attend.
_NUM_PHASES: Final = 2 * _NUM_PRODUCTS + 2
# A layer's numbers: its norms, its matrices' numbers, and where its keys and values are.
_ATTENTION_NORM, _FFN_NORM, _MATRICES = range(3)
_KEYS: Final = _MATRICES + _NUM_PRODUCTS * MATRIX_NUMBERS
_VALUES: Final = _KEYS + 1
_LAYER_NUMBERS: Final = _VALUES + 1
# The kernel's block: its counter, and these.
(
    _NUM_RANGES,
    _NUM_LAYERS,
    _NUM_ROWS,
    _NUM_HEADS,
    _NUM_KV_HEADS,
    _HEAD_SIZE,
    _NUM_SLOTS,
    _NUM_PIECES,
    _X,
    _SCALES,
    _SCALES_LAYER_BYTES,
    _SCALES_ROW_BYTES,
    _EPS,
    _ROTATIONS,
    _SLOT_MAPPING,
    _FRAMES,
    _PIECES,
    _LAYERS,
    _NORMED,
    _INPUTS,
    _STEPS,
    _QKV,
    _ATTENDED,
    _GATE_UP,
    _OUT,
    _NUM_ARGS,
) = range(1, 27)
_LOG2_E: Final = 1.4426950408889634
# Added to this number, one up to 2^22 in magnitude is rounded to a whole one.
_ROUNDER: Final = 1.5 * 2**23


class LayerWeights(NamedTuple):
    """One layer's weights. The caller keeps them alive."""

    attention_norm: Tensor  # (dim,) float32
    wqkv: Matrix  # queries, keys and values
    wo: Matrix
    ffn_norm: Tensor  # (dim,) float32
    w13: Matrix  # gate and up
    w2: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.wqkv, self.wo, self.w13, self.w2

    @property
    def numbers(self) -> list[int]:
        norms = [norm.data_ptr() for norm in (self.attention_norm, self.ffn_norm)]
        matrices = [number for matrix in self.matrices for number in matrix.numbers]
        return [*norms, *matrices, 0, 0]


class StackKernel:
    """Runs layers on a CPU with a bfloat16 KV cache."""

    def __init__(
        self, layers: Sequence[LayerWeights], *, num_heads: int, head_size: int, norm_eps: float
    ) -> None:
        self._is_int8 = layers[0].wqkv.is_int8
        self._numbers = np.array([layer.numbers for layer in layers], np.int64)
        wqkv, wo, w13, w2 = layers[0].matrices
        self._row_bytes = {
            _NORMED: 4 * wqkv.in_dim,
            _INPUTS: max(matrix.input_bytes for matrix in layers[0].matrices),
            _STEPS: 4,
            _QKV: 4 * wqkv.out_dim,
            _ATTENDED: 4 * wo.in_dim,
            _GATE_UP: 4 * w13.out_dim,
            _OUT: 4 * max(wo.out_dim, w2.out_dim),
        }  # of each buffer
        self._num_heads, self._head_size = num_heads, head_size
        self._eps = float32_tensor(norm_eps)

    def takes(self, num_rows: int) -> bool:
        """Whether so many rows are best run here. bfloat16's products of many are PyTorch's."""
        return self._is_int8 or num_rows <= MAX_BFLOAT16_ROWS

    def __call__(
        self,
        x: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
        rotations: Tensor,
        slot_mapping: Tensor,
        windows: Windows,
        scales: Tensor | None,
    ) -> None:
        """Run all layers on x, in place.

        Args:
            x: (N, dim) float32, contiguous.
            caches: keys and values of each layer, (K, slots, D) bfloat16 each, that
                `fits_windowed_attention`.
            rotations: (N, 1, D / 2) complex64, e^(i angle) of each row's position.
            slot_mapping: (N,) int64, where each row's keys and values are written.
            windows: what each row reads.
            scales: (layers, N, dim) or (layers, 1, dim) float32, what multiplies the normed input
                of the feed-forward network, or None.
        """
        numbers = self._numbers.copy()
        numbers[:, _KEYS:] = [[tensor.data_ptr() for tensor in cache] for cache in caches]
        rotations = torch.view_as_real(rotations).contiguous()
        num_rows, num_threads = len(x), torch.get_num_threads()
        num_kv_heads, num_slots, _ = caches[0][0].shape
        scales_at = layer_bytes = row_bytes = 0
        if scales is not None:
            scales = scales.contiguous()
            scales_at, layer_bytes = scales.data_ptr(), 4 * scales.stride(0)
            row_bytes = 4 * scales.stride(1) if scales.shape[1] > 1 else 0
        buffers = [
            torch.empty(num_rows * size, dtype=torch.uint8) for size in self._row_bytes.values()
        ]
        _run_layers(
            num_threads,
            len(numbers),
            num_rows,
            self._num_heads,
            num_kv_heads,
            self._head_size,
            num_slots,
            len(windows.pieces),
            x.data_ptr(),
            scales_at,
            layer_bytes,
            row_bytes,
            self._eps.data_ptr(),
            rotations.data_ptr(),
            slot_mapping.data_ptr(),
            windows.frames.data_ptr(),
            windows.pieces.data_ptr(),
            numbers.ctypes.data,
            *(buffer.data_ptr() for buffer in buffers),
            num_counters=len(numbers) * _NUM_PHASES * phase_counters(num_threads),
        )


@Kernel
def _run_layers(block: Any) -> None:
    args = carray(block, _NUM_ARGS)
    num_ranges, num_rows = args[_NUM_RANGES], args[_NUM_ROWS]
    own = next_number(block)
    num_products = _NUM_PRODUCTS * args[_NUM_LAYERS]
    # Where the phase's counters are in the block.
    phase, next_phase = _NUM_ARGS, phase_counters(num_ranges)
    ahead, ahead_end = first_bytes(_matrix(args, 0), own, num_ranges)
    for number in range(num_products):
        product, matrix = number % _NUM_PRODUCTS, _matrix(args, number)
        _prepare(block, phase, number)
        ahead = wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
        phase += next_phase
        out, sums = args[_OUT], args[_X]
        if product == _WQKV:
            out, sums = args[_QKV], 0
        elif product == _W13:
            out, sums = args[_GATE_UP], 0
        multiply(
            block,
            phase,
            num_ranges,
            own,
            num_rows,
            matrix,
            args[_INPUTS],
            args[_STEPS],
            out,
            sums,
        )
        if number + 1 < num_products:
            ahead, ahead_end = first_bytes(_matrix(args, number + 1), own, num_ranges)
        out_dim = carray(longs_at(matrix), MATRIX_NUMBERS)[MATRIX_OUT_DIM]
        ahead = wait_for(counter_at(block, phase), out_dim, ahead, ahead_end)
        phase += next_phase
        if product == _WQKV:
            layer = carray(longs_at(_layer(args, number)), _LAYER_NUMBERS)
            _rotate(block, phase, layer, out_dim)
            ahead = wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
            phase += next_phase
            _attend(block, phase, layer, out_dim)
            num_items = args[_NUM_PIECES] * args[_NUM_KV_HEADS]
            ahead = wait_for(counter_at(block, phase), num_items, ahead, ahead_end)
            phase += next_phase


@njit
def _layer(args, number):  # type: ignore[no-untyped-def]
    """Return where the numbers are of the layer that a product belongs to."""
    return args[_LAYERS] + 8 * (number // _NUM_PRODUCTS * _LAYER_NUMBERS)


@njit
def _matrix(args, number):  # type: ignore[no-untyped-def]
    """Return where the numbers of a product's matrix are."""
    at = _MATRICES + number % _NUM_PRODUCTS * MATRIX_NUMBERS
    return _layer(args, number) + 8 * at


@njit
def _prepare(block, phase, number):  # type: ignore[no-untyped-def]
    """Make rows ready for a product: normed first, or gate and up multiplied, or as they are."""
    args = carray(block, _NUM_ARGS)
    layer, matrix = carray(longs_at(_layer(args, number)), _LAYER_NUMBERS), _matrix(args, number)
    num_rows, product = args[_NUM_ROWS], number % _NUM_PRODUCTS
    eps = carray(floats_at(args[_EPS]), 1)[0]
    dim = carray(longs_at(matrix), MATRIX_NUMBERS)[MATRIX_IN_DIM]
    scales = args[_SCALES]
    if scales != 0:
        scales += number // _NUM_PRODUCTS * args[_SCALES_LAYER_BYTES]
    drawn = counter_at(block, phase + 1)
    row = next_number(drawn)
    while row < num_rows:
        x = args[_NORMED] + 4 * row * dim
        if product == _WQKV:
            norm_row(args[_X] + 4 * row * dim, dim, layer[_ATTENTION_NORM], eps, x)
        elif product == _WO:
            x = args[_ATTENDED] + 4 * row * dim
        elif product == _W13:
            norm_row(args[_X] + 4 * row * dim, dim, layer[_FFN_NORM], eps, x)
            if scales != 0:
                _scale_row(x, scales + row * args[_SCALES_ROW_BYTES], dim)
        else:
            # Behind the gate, which takes the result, a row has as much again.
            x = args[_GATE_UP] + 8 * row * dim
            _gate_row(x, dim)
        prepare_row(row, x, matrix, args[_INPUTS], args[_STEPS])
        next_number(counter_at(block, phase))
        row = next_number(drawn)


@njit
def _rotate(block, phase, layer, qkv_dim):  # type: ignore[no-untyped-def]
    """Turn queries and keys, and write keys and values to the cache."""
    args = carray(block, _NUM_ARGS)
    num_rows, num_heads, num_kv_heads = args[_NUM_ROWS], args[_NUM_HEADS], args[_NUM_KV_HEADS]
    head_bytes = 4 * args[_HEAD_SIZE]
    slots = carray(longs_at(args[_SLOT_MAPPING]), num_rows)
    drawn = counter_at(block, phase + 1)
    row = next_number(drawn)
    while row < num_rows:
        q = args[_QKV] + 4 * row * qkv_dim
        k = q + num_heads * head_bytes
        rotate_and_store_row(
            num_heads,
            num_kv_heads,
            args[_HEAD_SIZE],
            args[_NUM_SLOTS],
            q,
            k,
            k + num_kv_heads * head_bytes,
            args[_ROTATIONS] + row * head_bytes,
            slots[row],
            layer[_KEYS],
            layer[_VALUES],
        )
        next_number(counter_at(block, phase))
        row = next_number(drawn)


@njit
def _attend(block, phase, layer, qkv_dim):  # type: ignore[no-untyped-def]
    """Attend from all rows to the cache."""
    args = carray(block, _NUM_ARGS)
    num_kv_heads = args[_NUM_KV_HEADS]
    drawn = counter_at(block, phase + 1)
    item = next_number(drawn)
    while item < args[_NUM_PIECES] * num_kv_heads:
        attend_item(
            item,
            num_kv_heads,
            args[_NUM_SLOTS],
            args[_HEAD_SIZE],
            args[_NUM_HEADS] // num_kv_heads,
            args[_FRAMES],
            args[_PIECES],
            args[_QKV],
            4 * qkv_dim,
            layer[_KEYS],
            layer[_VALUES],
            args[_ATTENDED],
        )
        next_number(counter_at(block, phase))
        item = next_number(drawn)


@njit
def _scale_row(row, scale, dim):  # type: ignore[no-untyped-def]
    x, scales = carray(floats_at(row), dim), carray(floats_at(scale), dim)
    for i in range(dim):
        x[i] *= scales[i]


@njit(error_model="numpy", fastmath={"contract"})
def _gate_row(row, dim):  # type: ignore[no-untyped-def]
    """Write SiLU(gate) times up, which stands behind it, where the gate was."""
    gates, ups = carray(floats_at(row), dim), carray(floats_at(row + 4 * dim), dim)
    for i in range(dim):
        gate = gates[i]
        # The sigmoid of either sign from e^-|gate|, which is at most 1.
        power = _power_of_2(max(-abs(gate) * float32(_LOG2_E), float32(-126)))
        part = float32(1) if gate >= 0 else power
        gates[i] = gate * (part / (float32(1) + power)) * ups[i]


@njit(error_model="numpy", fastmath={"contract"})
def _power_of_2(x):  # type: ignore[no-untyped-def]
    """Return 2 to the power of a number from -126 to 0."""
    # The whole number stands in the lowest bits.
    rounded = x + float32(_ROUNDER)
    fraction = x - (rounded - float32(_ROUNDER))
    result = float32(_POWER_COEFFICIENTS[5])
    result = result * fraction + float32(_POWER_COEFFICIENTS[4])
    result = result * fraction + float32(_POWER_COEFFICIENTS[3])
    result = result * fraction + float32(_POWER_COEFFICIENTS[2])
    result = result * fraction + float32(_POWER_COEFFICIENTS[1])
    result = result * fraction + float32(_POWER_COEFFICIENTS[0])
    exponent = np.int32(np.float32(rounded).view(np.int32) + int32(127))
    return result * np.int32(exponent << int32(23)).view(np.float32)
