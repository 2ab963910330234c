"""How threads share a phase's work and wait for its end: work queues of atomic counters, a barrier.

A phase has one counter of finished items and one work queue for each thread, each on a cache line
of its own. A phase of rows or pieces uses the first queue alone. Weight rows are spread over all
queues, in a range for each thread: a thread that reads on where it was is up to a seventh faster
than one that jumps. When its own range is empty it helps with the others'.
"""

from __future__ import annotations

from typing import Final

from numba import njit
from numba.extending import register_jitable

from voxlite.engine.kernels.descriptors import MAX_PARTS, matrix_at
from voxlite.engine.kernels.intrinsics import (
    CACHE_LINE_BYTES,
    fetch_add,
    load_counter,
    pause,
    prefetch,
)
from voxlite.engine.kernels.tiles import TILE_WEIGHTS

# Weight rows that a thread takes at a time, at most: the widest int8 layer's are 9,216 bytes, 64 of
# them 576 KiB, little enough for L2. A layer is 16 items or more, so that threads end together.
_MAX_WEIGHT_ROWS: Final = 64
_MIN_ITEMS: Final = 16
# Of the weights that it will read first a thread prefetches so many bytes while it waits.
_PREFETCH_BYTES: Final = 128 << 10


@register_jitable
def counters_bytes(num_threads: int) -> int:
    """Return the bytes of a phase's counters."""
    return (1 + num_threads) * CACHE_LINE_BYTES


@njit
def take_item(counters):  # type: ignore[no-untyped-def]
    """Take the next item from a phase's first work queue: 0, 1, 2 ... over all threads."""
    return fetch_add(counters + CACHE_LINE_BYTES, 1)


@njit
def finish_items(counters, count):  # type: ignore[no-untyped-def]
    """Add to the atomic counter of finished items. Who waits for it then sees what was written."""
    fetch_add(counters, count)


@njit
def wait_at_barrier(counters, num_items, prefetch_at, prefetch_end):  # type: ignore[no-untyped-def]
    """Spin until all items of a phase are done, and prefetch meanwhile.

    Returns:
        How far was prefetched, from `prefetch_at` up to `prefetch_end`.
    """
    while load_counter(counters) < num_items:
        if prefetch_at < prefetch_end:
            prefetch(prefetch_at)
            prefetch_at += CACHE_LINE_BYTES
        else:
            pause()
    return prefetch_at


@njit
def _range_start(index, num_threads, out_dim):  # type: ignore[no-untyped-def]
    """Return where a thread's range of weight rows starts: at a whole tile."""
    return out_dim // TILE_WEIGHTS * index // num_threads * TILE_WEIGHTS


@njit
def take_weight_rows(counters, num_threads, thread, num_empty, out_dim):  # type: ignore[no-untyped-def]
    """Take weight rows from a thread's own range, and when it is empty from those of others.

    Args:
        num_empty: how many ranges the thread has found empty.

    Returns:
        The first row and the end, the same where no row is left, and the new `num_empty`.
    """
    num_taken = min(_MAX_WEIGHT_ROWS, max(out_dim // _MIN_ITEMS // TILE_WEIGHTS, 1) * TILE_WEIGHTS)
    while num_empty < num_threads:
        index = (thread + num_empty) % num_threads
        first = _range_start(index, num_threads, out_dim)
        first += fetch_add(counters + (1 + index) * CACHE_LINE_BYTES, 1) * num_taken
        end = _range_start(index + 1, num_threads, out_dim)
        if first < end:
            return first, min(first + num_taken, end), num_empty
        num_empty += 1
    return out_dim, out_dim, num_empty


@njit
def first_weights(matrix_address, num_threads, thread):  # type: ignore[no-untyped-def]
    """Return from where to where the weights lie that a thread will read first."""
    matrix = matrix_at(matrix_address)
    row, i = _range_start(thread % num_threads, num_threads, matrix.out_dim), 0
    while i < MAX_PARTS - 1 and row > 0 and row >= matrix.parts[i].out_dim:
        row -= matrix.parts[i].out_dim
        i += 1
    part = matrix.parts[i]
    num_bytes = (part.out_dim - row) * matrix.row_bytes
    first = part.weights + row * matrix.row_bytes
    return first, first + min(num_bytes, _PREFETCH_BYTES)
