"""Programs: phases that all threads run one after the other, with a barrier behind each.

In: a `BATCH` and its `PHASE` records. A phase is split into items: rows, pieces, or weight rows.
Each thread takes items from the phase's work queues until they are empty, then spins at the barrier
until all are done, and meanwhile prefetches the weights that it will read next. All layers of
encoder or decoder are one program (`stack`); a single linear layer, norm, rotation or attention is
a program of one phase or two (below). So there is one kernel to compile, and one call for a pass.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numba import njit
from torch import Tensor

from voxlite.engine.kernels.attention import Windows, attend_item
from voxlite.engine.kernels.descriptors import (
    ATTEND,
    BATCH,
    GATE,
    MULTIPLY,
    NORM,
    PHASE,
    QUANTIZE,
    ROTATE,
    batch_at,
    matrix_at,
    phase_at,
)
from voxlite.engine.kernels.intrinsics import CACHE_LINE_BYTES, fetch_add
from voxlite.engine.kernels.linear import Int8Tiles, Matrix, multiply, quantize_row
from voxlite.engine.kernels.norm import gate_row, norm_row, scale_row
from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.rope import rotate_and_store_row
from voxlite.engine.kernels.work import (
    counters_bytes,
    finish_items,
    first_weights,
    take_item,
    wait_at_barrier,
)

_PHASE_BYTES: Final = PHASE.itemsize
Records = np.ndarray[Any, np.dtype[np.void]]


def run(phases: Records, **fields: int | float) -> None:
    """Run a program on all of PyTorch's threads.

    Args:
        phases: (n,) PHASE.
        fields: those of `BATCH` that the phases need. The caller keeps what they point at alive.
    """
    num_threads = torch.get_num_threads()
    # A first line is the counter that numbers the threads; the rest are the phases' counters.
    num_bytes = CACHE_LINE_BYTES + len(phases) * counters_bytes(num_threads)
    counters = np.zeros((num_bytes + CACHE_LINE_BYTES) // 8, np.int64)
    batch = np.zeros(1, BATCH)
    batch["phases"], batch["num_phases"] = phases.ctypes.data, len(phases)
    batch["counters"] = -(-counters.ctypes.data // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    batch["num_threads"] = num_threads
    for name, value in fields.items():
        batch[name] = value
    run_program(batch.ctypes.data, num_threads)


@Kernel
def run_program(address: Any) -> None:
    batch = batch_at(address)
    num_threads = batch.num_threads
    thread = fetch_add(batch.counters, 1)
    counters = batch.counters + CACHE_LINE_BYTES
    prefetch_at = prefetch_end = 0
    for i in range(batch.num_phases):
        phase = phase_at(batch.phases + i * _PHASE_BYTES)
        if phase.kind == MULTIPLY:
            multiply(batch, phase, counters, thread)
        else:
            _run_items(batch, phase, counters)
        if phase.prefetched_matrix != 0:
            prefetch_at, prefetch_end = first_weights(phase.prefetched_matrix, num_threads, thread)
        num_items = _num_items(batch, phase)
        prefetch_at = wait_at_barrier(counters, num_items, prefetch_at, prefetch_end)
        counters += counters_bytes(num_threads)


@njit
def _num_items(batch, phase):  # type: ignore[no-untyped-def]
    if phase.kind == MULTIPLY:
        return matrix_at(phase.matrix).out_dim
    if phase.kind == ATTEND:
        return batch.num_pieces * batch.num_kv_heads
    return batch.num_rows


@njit
def _run_items(batch, phase, counters):  # type: ignore[no-untyped-def]
    """Take items of any phase but a product's, until none is left."""
    num_items = _num_items(batch, phase)
    item = take_item(counters)
    while item < num_items:
        if phase.kind == ROTATE:
            rotate_and_store_row(batch, phase, item)
        elif phase.kind == ATTEND:
            attend_item(batch, phase, item)
        else:
            _prepare_row(batch, phase, item)
        finish_items(counters, 1)
        item = take_item(counters)


@njit
def _prepare_row(batch, phase, row):  # type: ignore[no-untyped-def]
    """Make a row ready for the next product: normed, or gated, or as it is; then quantized."""
    if phase.kind == NORM:
        dim = batch.dim
        x = phase.output + 4 * row * dim
        norm_row(phase.input + 4 * row * dim, dim, phase.norm_weight, batch.norm_eps, x)
        if phase.delay_scale != 0:
            scale_row(x, phase.delay_scale + row * batch.delay_scale_row_bytes, dim)
    else:
        dim = matrix_at(phase.matrix).in_dim
        x = phase.input + 4 * row * dim
        if phase.kind == GATE:
            # A row is the gate, which takes the result, and up behind it.
            x = phase.input + 8 * row * dim
            gate_row(x, dim)
    if phase.matrix != 0:
        quantize_row(batch, phase.matrix, row, x)


def int8_linear(x: Tensor, weight: Int8Tiles, bias: Tensor | None) -> Tensor:
    """Multiply rows by int8 weights.

    Each row is quantized to bytes first, by a scale of its own; the products are summed as
    integers. So a row's result doesn't depend on the rows beside it.

    Args:
        x: (N, in) float32.
        bias: (out,) float32.

    Returns:
        (N, out) float32.
    """
    return _linear(x, Matrix.of([(weight, bias)], x.shape[1]))[:, : len(weight.scales)]


def bfloat16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply a few rows by bfloat16 weights, with sums in float32.

    Where the processor has a dot product of bfloat16 numbers, rows are rounded to bfloat16 for it.

    Args:
        x: (N, in) float32.
        weight: (out, in) bfloat16 that `fits_bfloat16_linear`.

    Returns:
        (N, out) float32.
    """
    return _linear(x, Matrix.of([(weight, None)], x.shape[1]))


def _linear(x: Tensor, matrix: Matrix) -> Tensor:
    x = x.contiguous()
    quantized = torch.empty((len(x), matrix.input_bytes), dtype=torch.uint8)
    row_scales = torch.empty(len(x))
    out = torch.empty((len(x), matrix.out_dim))
    phases = np.zeros(2, PHASE)
    phases["kind"] = QUANTIZE, MULTIPLY
    phases["matrix"] = matrix.address
    phases["prefetched_matrix"] = matrix.address, 0
    phases["input"], phases["output"] = x.data_ptr(), out.data_ptr()
    run(
        phases,
        num_rows=len(x),
        quantized=quantized.data_ptr(),
        row_scales=row_scales.data_ptr(),
    )
    return out


def float32_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit mean square, and multiply it by the weight.

    Args:
        x: (N, dim) float32.
        weight: (dim,) float32.
        eps: added to the mean square.

    Returns:
        (N, dim) float32.

    Raises:
        TypeError: the weight isn't float32.
    """
    if weight.dtype is not torch.float32:
        raise TypeError(f"norm weights must be float32, not {weight.dtype}")
    x = x.contiguous()
    out = torch.empty_like(x)
    phases = np.zeros(1, PHASE)
    phases["kind"], phases["norm_weight"] = NORM, weight.data_ptr()
    phases["input"], phases["output"] = x.data_ptr(), out.data_ptr()
    run(phases, num_rows=len(x), dim=x.shape[1], norm_eps=eps)
    return out


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotations: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Rotate adjacent pairs of q and k in place, and write k and v to their slots in the cache.

    Args:
        q: (N, H, D) float32, of which rows may stand apart, but not what is in a row.
        k: (N, K, D) float32, likewise.
        v: the same.
        rotations: (N, 1, D / 2) complex64, e^(i angle) of each row's position.
        slot_mapping: (N,) int64.
        keys: (K, slots, D) bfloat16 that `fits_windowed_attention`.
        values: the same.
    """
    rotations = torch.view_as_real(rotations).contiguous()
    num_kv_heads, num_slots, head_size = keys.shape
    phases = np.zeros(1, PHASE)
    phases["kind"] = ROTATE
    phases["keys"], phases["values"] = keys.data_ptr(), values.data_ptr()
    run(
        phases,
        num_rows=len(q),
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_slots=num_slots,
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        q_row_bytes=4 * q.stride(0),
        k_row_bytes=4 * k.stride(0),
        v_row_bytes=4 * v.stride(0),
        rotations=rotations.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
    )


def windowed_attention(q: Tensor, keys: Tensor, values: Tensor, windows: Windows) -> Tensor:
    """Attend from each row to the frames that it reads; everything in float32.

    Args:
        q: (N, H, D) of any dtype.
        keys: (K, slots, D) bfloat16 that `fits_windowed_attention`.
        values: the same.

    Returns:
        (N, H, D) in the dtype of q.
    """
    num_kv_heads, num_slots, head_size = keys.shape
    queries = q.float()
    if queries.stride()[1:] != (head_size, 1):
        queries = queries.contiguous()
    out = torch.empty(q.shape)
    phases = np.zeros(1, PHASE)
    phases["kind"], phases["output"] = ATTEND, out.data_ptr()
    phases["keys"], phases["values"] = keys.data_ptr(), values.data_ptr()
    run(
        phases,
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_slots=num_slots,
        q=queries.data_ptr(),
        q_row_bytes=4 * queries.stride(0),
        reads=windows.frames.data_ptr(),
        pieces=windows.pieces.data_ptr(),
        num_pieces=len(windows.pieces),
    )
    return out.to(q.dtype)
