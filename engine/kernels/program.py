"""Programs: phases that all threads run one after the other, with a barrier behind each.

In: a `BATCH` and its `PHASE` records. A phase is split into items: rows, pieces, or weight rows.
Each thread takes items from the phase's work queues until they are empty, then spins at the barrier
until all are done, and meanwhile prefetches the weights that it will read next. All layers of
encoder or decoder are one program, and so is a single linear layer, norm, rotation or attention:
there is one kernel to compile, and one call for a whole pass.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from voxlite.engine.kernels.attention import attend_item
from voxlite.engine.kernels.descriptors import (
    ATTEND,
    BATCH,
    GATE,
    MULTIPLY,
    NORM,
    PHASE,
    ROTATE,
    batch_at,
    matrix_at,
    phase_at,
)
from voxlite.engine.kernels.intrinsics import CACHE_LINE_BYTES, fetch_add
from voxlite.engine.kernels.linear import multiply, quantize_row
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


def run(phases: Records, num_threads: int, **fields: int | float) -> None:
    """Run a program on so many threads.

    Args:
        phases: (n,) PHASE.
        fields: those of `BATCH` that the phases need. The caller keeps what they point at alive.
    """
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
    """Take items of any phase but MULTIPLY, until none is left."""
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
