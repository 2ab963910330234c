"""All layers of encoder or decoder in one call: between two products nothing is waited for.

In: rows of a flat batch, the layers' weights and KV caches. Out: the rows behind the last layer.
Legend: N rows of the flat batch, H heads, K key/value heads, D head size.

A layer is ten phases. Threads draw a phase's work, rows or pieces or weight rows, and wait until
all of it is done; meanwhile they ask memory for the weights that they will read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, float32, int32, njit
from torch import Tensor

from engine.kernels.attention import Windows, attend_item
from engine.kernels.attention_tiles import POWER_COEFFICIENTS as _POWER_COEFFICIENTS
from engine.kernels.linear import (
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
from engine.kernels.norm import float32_tensor, norm_row
from engine.kernels.parallel import Kernel
from engine.kernels.rope import rotate_and_store_row
from engine.kernels.vectors import counter_at, floats_at, longs_at, next_number

# How rows are made ready to be multiplied: normed first, or gate and up multiplied, or as they are.
_NORMED, _GATED, _PLAIN = range(3)
_NUM_PHASES: Final = 10
# A layer's numbers: its norms, its matrices' numbers, and where its keys and values are.
_ATTENTION_NORM, _FFN_NORM, _WQKV = range(3)
_WO: Final = _WQKV + MATRIX_NUMBERS
_W13: Final = _WO + MATRIX_NUMBERS
_W2: Final = _W13 + MATRIX_NUMBERS
_KEYS: Final = _W2 + MATRIX_NUMBERS
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
    _NORMED_ROWS,
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
            _NORMED_ROWS: 4 * wqkv.in_dim,
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
    own = next_number(block)
    phase, scales = _NUM_ARGS, args[_SCALES]
    for layer in range(args[_NUM_LAYERS]):
        _run_layer(block, phase, own, args[_LAYERS] + 8 * layer * _LAYER_NUMBERS, scales)
        phase += _NUM_PHASES * (1 + args[_NUM_RANGES])
        if scales != 0:
            scales += args[_SCALES_LAYER_BYTES]


@njit
def _run_layer(block, phase, own, numbers, scales):  # type: ignore[no-untyped-def]
    """Run a layer.

    Args:
        phase: where in the block its first phase's counters are.
        own: the thread's number.
        numbers: where the layer's numbers are.
        scales: where its rows' scales are, or 0.
    """
    args, layer = carray(block, _NUM_ARGS), carray(longs_at(numbers), _LAYER_NUMBERS)
    num_ranges, num_rows = args[_NUM_RANGES], args[_NUM_ROWS]
    inputs, steps, x, out = args[_INPUTS], args[_STEPS], args[_X], args[_OUT]
    wqkv, wo = numbers + 8 * _WQKV, numbers + 8 * _WO
    w13, w2 = numbers + 8 * _W13, numbers + 8 * _W2
    next_phase = 1 + num_ranges

    _prepare(block, phase, _NORMED, x, wqkv, layer[_ATTENTION_NORM], 0)
    ahead, ahead_end = first_bytes(wqkv, own, num_ranges)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += next_phase
    multiply(block, phase, num_ranges, own, num_rows, wqkv, inputs, steps, args[_QKV], 0)
    ahead, ahead_end = first_bytes(wo, own, num_ranges)
    ahead = wait_for(counter_at(block, phase), layer[_WQKV + MATRIX_OUT_DIM], ahead, ahead_end)
    phase += next_phase

    _rotate(block, phase, layer)
    ahead = wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += next_phase
    _attend(block, phase, layer)
    num_items = args[_NUM_PIECES] * args[_NUM_KV_HEADS]
    ahead = wait_for(counter_at(block, phase), num_items, ahead, ahead_end)
    phase += next_phase

    _prepare(block, phase, _PLAIN, args[_ATTENDED], wo, 0, 0)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += next_phase
    multiply(block, phase, num_ranges, own, num_rows, wo, inputs, steps, out, x)
    ahead, ahead_end = first_bytes(w13, own, num_ranges)
    ahead = wait_for(counter_at(block, phase), layer[_WO + MATRIX_OUT_DIM], ahead, ahead_end)
    phase += next_phase

    _prepare(block, phase, _NORMED, x, w13, layer[_FFN_NORM], scales)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += next_phase
    multiply(block, phase, num_ranges, own, num_rows, w13, inputs, steps, args[_GATE_UP], 0)
    ahead, ahead_end = first_bytes(w2, own, num_ranges)
    ahead = wait_for(counter_at(block, phase), layer[_W13 + MATRIX_OUT_DIM], ahead, ahead_end)
    phase += next_phase

    _prepare(block, phase, _GATED, args[_GATE_UP], w2, 0, 0)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += next_phase
    multiply(block, phase, num_ranges, own, num_rows, w2, inputs, steps, out, x)
    wait_for(counter_at(block, phase), layer[_W2 + MATRIX_OUT_DIM], 0, 0)


@njit
def _prepare(block, phase, kind, rows, matrix, norm, scales):  # type: ignore[no-untyped-def]
    """Make rows ready to be multiplied with a matrix, whose numbers are there."""
    args = carray(block, _NUM_ARGS)
    num_rows = args[_NUM_ROWS]
    eps = carray(floats_at(args[_EPS]), 1)[0]
    dim = carray(longs_at(matrix), MATRIX_NUMBERS)[MATRIX_IN_DIM]
    # Behind the gate, which takes the result, a row has as much again.
    row_bytes = 8 * dim if kind == _GATED else 4 * dim
    drawn = counter_at(block, phase + 1)
    row = next_number(drawn)
    while row < num_rows:
        x = rows + row * row_bytes
        if kind == _NORMED:
            normed = args[_NORMED_ROWS] + 4 * row * dim
            norm_row(x, dim, norm, eps, normed)
            if scales != 0:
                _scale_row(normed, scales + row * args[_SCALES_ROW_BYTES], dim)
            x = normed
        elif kind == _GATED:
            _gate_row(x, dim)
        prepare_row(row, x, matrix, args[_INPUTS], args[_STEPS])
        next_number(counter_at(block, phase))
        row = next_number(drawn)


@njit
def _rotate(block, phase, layer):  # type: ignore[no-untyped-def]
    """Turn queries and keys, and write keys and values to the cache."""
    args = carray(block, _NUM_ARGS)
    num_rows, num_heads, num_kv_heads = args[_NUM_ROWS], args[_NUM_HEADS], args[_NUM_KV_HEADS]
    head_bytes = 4 * args[_HEAD_SIZE]
    slots = carray(longs_at(args[_SLOT_MAPPING]), num_rows)
    drawn = counter_at(block, phase + 1)
    row = next_number(drawn)
    while row < num_rows:
        q = args[_QKV] + 4 * row * layer[_WQKV + MATRIX_OUT_DIM]
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
def _attend(block, phase, layer):  # type: ignore[no-untyped-def]
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
            4 * layer[_WQKV + MATRIX_OUT_DIM],
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
