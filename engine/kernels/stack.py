"""All layers of encoder or decoder in one call: between two products nothing is waited for.

In: rows of a flat batch, the layers' weights and KV caches. Out: the rows behind the last layer.
Legend: N rows of the flat batch, H heads, K key/value heads, D head size.

A layer is ten phases. Threads draw a phase's work, rows or pieces or weight rows, and wait until
all of it is done; meanwhile they ask memory for the weights that they will read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, float32, int32, njit
from torch import Tensor

from engine.kernels.attention import Windows, attend_item
from engine.kernels.attention_tiles import POWER_COEFFICIENTS as _POWER_COEFFICIENTS
from engine.kernels.linear import (
    MATRIX_NUMBERS,
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
_NORMED: Final = 0
_GATED: Final = 1
_PLAIN: Final = 2
_NUM_PHASES: Final = 10
_LOG2_E: Final = 1.4426950408889634
_ROUNDER: Final = 1.5 * 2**23
# A layer's integers: two norms, its matrices, and where its keys and values are.
_WQKV_AT: Final = 2
_WO_AT: Final = _WQKV_AT + MATRIX_NUMBERS
_W13_AT: Final = _WO_AT + MATRIX_NUMBERS
_W2_AT: Final = _W13_AT + MATRIX_NUMBERS
_CACHE_AT: Final = _W2_AT + MATRIX_NUMBERS
_LAYER_NUMBERS: Final = _CACHE_AT + 2
_NUM_ARGS: Final = 26


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """What a row takes in each buffer."""

    normed: int
    inputs: int
    qkv: int
    attended: int
    gate_up: int
    out: int

    @classmethod
    def of(cls, layer: LayerWeights) -> RowBytes:
        return cls(
            normed=4 * layer.wqkv.in_dim,
            inputs=max(matrix.input_bytes for matrix in layer.matrices),
            qkv=4 * layer.wqkv.out_dim,
            attended=4 * layer.wo.in_dim,
            gate_up=4 * layer.w13.out_dim,
            out=4 * max(layer.wo.out_dim, layer.w2.out_dim),
        )


class StackKernel:
    """Runs layers on a CPU with a bfloat16 KV cache."""

    def __init__(
        self, layers: Sequence[LayerWeights], *, num_heads: int, head_size: int, norm_eps: float
    ) -> None:
        self._is_int8 = layers[0].wqkv.is_int8
        self._numbers = np.array([layer.numbers for layer in layers])
        self._row_bytes = RowBytes.of(layers[0])
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
        numbers[:, _CACHE_AT:] = [[tensor.data_ptr() for tensor in pair] for pair in caches]
        rotations = torch.view_as_real(rotations).contiguous()
        num_rows, num_threads = len(x), torch.get_num_threads()
        num_kv_heads, num_slots, _ = caches[0][0].shape
        scales_at = layer_bytes = row_bytes = 0
        if scales is not None:
            scales = scales.contiguous()
            scales_at, layer_bytes = scales.data_ptr(), 4 * scales.stride(0)
            row_bytes = 4 * scales.stride(1) if scales.shape[1] > 1 else 0
        sizes = self._row_bytes
        buffers = [
            torch.empty(num_rows * size, dtype=torch.uint8)
            for size in (
                sizes.normed,
                sizes.inputs,
                4,
                sizes.qkv,
                sizes.attended,
                sizes.gate_up,
                sizes.out,
            )
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
    num_ranges, num_layers = args[1], args[2]
    own = next_number(block)
    phase = _NUM_ARGS
    scales = args[10]
    for layer in range(num_layers):
        _run_layer(block, phase, own, args[18] + 8 * layer * _LAYER_NUMBERS, scales)
        phase += _NUM_PHASES * (1 + num_ranges)
        if scales != 0:
            scales += args[11]


@njit
def _run_layer(block, phase, own, layer_at, scales):  # type: ignore[no-untyped-def]
    """Run a layer, whose first phase's counters are at a place in the block."""
    args = carray(block, _NUM_ARGS)
    num_ranges, num_rows, num_heads, num_kv_heads, head_size, num_slots = (
        args[1],
        args[3],
        args[4],
        args[5],
        args[6],
        args[7],
    )
    x, eps = args[9], carray(floats_at(args[13]), 1)[0]
    normed, inputs, steps, qkv, attended, gate_up, out = (
        args[19],
        args[20],
        args[21],
        args[22],
        args[23],
        args[24],
        args[25],
    )
    layer = carray(longs_at(layer_at), _LAYER_NUMBERS)
    wqkv, wo = layer_at + 8 * _WQKV_AT, layer_at + 8 * _WO_AT
    w13, w2 = layer_at + 8 * _W13_AT, layer_at + 8 * _W2_AT
    step = 1 + num_ranges
    dim = layer[_WQKV_AT + 1]

    ahead, ahead_end = first_bytes(wqkv, own, num_ranges)
    _prepare(block, phase, _NORMED, num_rows, x, 4 * dim, layer[0], 0, 0, eps, normed, wqkv, inputs, steps)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += step
    multiply(block, phase, num_ranges, own, num_rows, wqkv, inputs, steps, qkv, 0)
    qkv_dim = layer[_WQKV_AT + 3]
    ahead, ahead_end = first_bytes(wo, own, num_ranges)
    ahead = wait_for(counter_at(block, phase), qkv_dim, ahead, ahead_end)
    phase += step

    _rotate(block, phase, layer_at, qkv, 4 * qkv_dim)
    ahead = wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += step
    num_items = args[8] * num_kv_heads
    drawn = counter_at(block, phase + 1)
    item = next_number(drawn)
    while item < num_items:
        attend_item(
            item,
            num_kv_heads,
            num_slots,
            head_size,
            num_heads // num_kv_heads,
            args[16],
            args[17],
            qkv,
            4 * qkv_dim,
            layer[_CACHE_AT],
            layer[_CACHE_AT + 1],
            attended,
        )
        next_number(counter_at(block, phase))
        item = next_number(drawn)
    ahead = wait_for(counter_at(block, phase), num_items, ahead, ahead_end)
    phase += step

    row_bytes = 4 * num_heads * head_size
    _prepare(block, phase, _PLAIN, num_rows, attended, row_bytes, 0, 0, 0, eps, normed, wo, inputs, steps)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += step
    multiply(block, phase, num_ranges, own, num_rows, wo, inputs, steps, out, x)
    ahead, ahead_end = first_bytes(w13, own, num_ranges)
    ahead = wait_for(counter_at(block, phase), layer[_WO_AT + 3], ahead, ahead_end)
    phase += step

    _prepare(block, phase, _NORMED, num_rows, x, 4 * dim, layer[1], scales, args[12], eps, normed, w13, inputs, steps)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += step
    multiply(block, phase, num_ranges, own, num_rows, w13, inputs, steps, gate_up, 0)
    ahead, ahead_end = first_bytes(w2, own, num_ranges)
    ahead = wait_for(counter_at(block, phase), layer[_W13_AT + 3], ahead, ahead_end)
    phase += step

    row_bytes = 4 * layer[_W13_AT + 3]
    _prepare(block, phase, _GATED, num_rows, gate_up, row_bytes, 0, 0, 0, eps, normed, w2, inputs, steps)
    wait_for(counter_at(block, phase), num_rows, ahead, ahead_end)
    phase += step
    multiply(block, phase, num_ranges, own, num_rows, w2, inputs, steps, out, x)
    wait_for(counter_at(block, phase), layer[_W2_AT + 3], 0, 0)


@njit
def _prepare(  # type: ignore[no-untyped-def]
    block, phase, kind, num_rows, rows, row_bytes, norm, scales, scale_bytes, eps, normed, matrix,
    inputs, steps,
):
    """Make rows ready to be multiplied with a matrix."""
    dim = carray(longs_at(matrix), MATRIX_NUMBERS)[1]
    drawn = counter_at(block, phase + 1)
    row = next_number(drawn)
    while row < num_rows:
        x = rows + row * row_bytes
        if kind == _NORMED:
            to = normed + 4 * row * dim
            norm_row(x, dim, norm, eps, to)
            if scales != 0:
                _scale_row(to, scales + row * scale_bytes, dim)
            x = to
        elif kind == _GATED:
            _gate_row(x, dim)
        prepare_row(row, x, matrix, inputs, steps)
        next_number(counter_at(block, phase))
        row = next_number(drawn)


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
    # Added to this number, x is rounded to a whole one, which stands in the lowest bits.
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


@njit
def _rotate(block, phase, layer_at, qkv, row_bytes):  # type: ignore[no-untyped-def]
    """Turn queries and keys, and write keys and values to the cache."""
    args = carray(block, _NUM_ARGS)
    num_rows, num_heads, num_kv_heads, head_size = args[3], args[4], args[5], args[6]
    layer = carray(longs_at(layer_at), _LAYER_NUMBERS)
    slots = carray(longs_at(args[15]), num_rows)
    keys_at, values_at = 4 * num_heads * head_size, 4 * (num_heads + num_kv_heads) * head_size
    drawn = counter_at(block, phase + 1)
    row = next_number(drawn)
    while row < num_rows:
        at = qkv + row * row_bytes
        rotate_and_store_row(
            num_heads,
            num_kv_heads,
            head_size,
            args[7],
            at,
            at + keys_at,
            at + values_at,
            args[14] + 4 * row * head_size,
            slots[row],
            layer[_CACHE_AT],
            layer[_CACHE_AT + 1],
        )
        next_number(counter_at(block, phase))
        row = next_number(drawn)
