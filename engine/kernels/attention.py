"""Sliding-window attention that reads bfloat16 keys and values where they lie in the KV cache.

In: queries of a flat batch, a layer's cache, and what each row reads, for all sessions at once.
Out: attention outputs. Legend: N rows of the flat batch, H heads, K key/value heads, G = H / K,
D head size.

Threads draw pieces of work: a few rows of one session and one key/value head, whose queries share
each key and value that is read. Keys come in chunks of 64 frames, and a chunk starts at a multiple
of 64 in the stream: so a row's sums are the same whichever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from numba import carray, float32, int32, njit
from torch import Tensor

from voxlite.engine.kernels.attention_tiles import (
    CHUNK,
    FRAMES_AT,
    MAX_AT,
    MAX_TILE_QUERIES,
    NO_SCORE,
    STATE_BYTES,
    VALUE_DIMS,
    add_values,
    stack_bytes,
    transpose_keys,
    weigh_keys,
)
from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.vectors import (
    ask_for,
    floats_at,
    ints_at,
    longs_at,
    next_number,
    tile_rows,
)

# The most queries of a piece of work: their sums and weights fit the first cache.
_MAX_QUERIES: Final = 28
_MAX_HEAD_SIZE: Final = 128
_LOG2_E: Final = 1.4426950408889634
# Bytes that memory is read in.
_LINE: Final = 64
# Lanes of a register: keys that are turned into columns at a time, and words of them.
_BLOCK: Final = 16
# Where a piece's numbers are on its thread's stack.
_QUERY_BYTES: Final = 4 * _MAX_QUERIES * _MAX_HEAD_SIZE
_SUMS_AT: Final = _QUERY_BYTES
_COLUMNS_AT: Final = _SUMS_AT + _QUERY_BYTES
_WEIGHTS_AT: Final = _COLUMNS_AT + 2 * CHUNK * _MAX_HEAD_SIZE
_STATES_AT: Final = _WEIGHTS_AT + 4 * CHUNK * _MAX_QUERIES
_KEYS_AT: Final = _STATES_AT + STATE_BYTES * _MAX_QUERIES
_VALUES_AT: Final = _KEYS_AT + 8 * CHUNK
_STACK_BYTES: Final = _VALUES_AT + 8 * CHUNK


@dataclass(frozen=True, slots=True)
class Windows:
    """What each row of a flat batch reads, in pieces of a few rows of one session."""

    frames: Tensor  # (N, 3) int64: a row reads from the first up to the second, and the third
    pieces: Tensor  # (pieces, 4) int64: first row, rows, and the first slot and length of the ring

    @classmethod
    def of(
        cls, sessions: Sequence[tuple[range, Sequence[tuple[int, int, int]]]], groups: int
    ) -> Windows:
        """Lay out sessions.

        Args:
            sessions: of each the cache slots of its ring, frame f lying in ring[f % len(ring)], and
                the frames that its rows read: from the first up to the second, and the third, which
                isn't before the second. All from the first to the third are in the ring.
            groups: G, the query heads of a key/value head.
        """
        per_piece = _MAX_QUERIES // groups
        frames: list[tuple[int, int, int]] = []
        pieces: list[tuple[int, int, int, int]] = []
        for ring, rows in sessions:
            for first in range(0, len(rows), per_piece):
                count = min(per_piece, len(rows) - first)
                pieces.append((len(frames) + first, count, ring.start, len(ring)))
            frames.extend(rows)
        return cls(torch.tensor(frames), torch.tensor(pieces))


def fits_windowed_attention(keys: Tensor, num_heads: int) -> bool:
    """Whether `windowed_attention` can read a cache like keys, (K, slots, D), for H heads."""
    num_kv_heads, _, head_size = keys.shape
    return (
        keys.device.type == "cpu"
        and keys.dtype is torch.bfloat16
        and keys.is_contiguous()
        and head_size % VALUE_DIMS == 0
        and head_size <= _MAX_HEAD_SIZE
        and num_heads // num_kv_heads <= _MAX_QUERIES
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
    _attend(
        len(windows.pieces) * num_kv_heads,
        num_kv_heads,
        num_slots,
        head_size,
        q.shape[1] // num_kv_heads,
        windows.frames.data_ptr(),
        windows.pieces.data_ptr(),
        queries.data_ptr(),
        4 * queries.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
    )
    return out.to(q.dtype)


@Kernel
def _attend(block: Any) -> None:
    args = carray(block, 13)
    num_items, num_kv_heads = args[1], args[2]
    item = next_number(block)
    while item < num_items:
        attend_item(
            item,
            num_kv_heads,
            args[3],
            args[4],
            args[5],
            args[6],
            args[7],
            args[8],
            args[9],
            args[10],
            args[11],
            args[12],
        )
        item = next_number(block)


@njit
def attend_item(  # type: ignore[no-untyped-def]
    item,
    num_kv_heads,
    num_slots,
    head_size,
    groups,
    frames,
    pieces,
    q,
    q_row_bytes,
    keys,
    values,
    out,
):
    """Attend from the rows of a piece, with the queries of one key/value head: one of all items.

    Args:
        item: the piece's number times the number of key/value heads, plus the head.
        q: where queries are, float32, with a row every `q_row_bytes`.
        out: where results are written, (N, H, D) float32.
    """
    stack = stack_bytes(_STACK_BYTES)
    piece = carray(longs_at(pieces + 32 * (item // num_kv_heads)), 4)
    kv_head = item % num_kv_heads
    head_at = 4 * kv_head * groups * head_size
    row_bytes = 4 * num_kv_heads * groups * head_size
    head_bytes = 2 * kv_head * num_slots * head_size
    reads = frames + 24 * piece[0]
    first, end = _span(piece[1], reads)
    start = chunk = first // CHUNK * CHUNK
    queries = q + piece[0] * q_row_bytes + head_at
    _start(piece[1], groups, head_size, queries, q_row_bytes, reads, start, stack)
    while chunk < end:
        _find(
            piece[2],
            piece[3],
            head_size,
            keys + head_bytes,
            values + head_bytes,
            chunk,
            first,
            end,
            stack,
        )
        used, used_end = max(first - chunk, 0), min(end - chunk, CHUNK)
        _attend_to_chunk(piece[1] * groups, head_size, chunk - start, used, used_end, stack)
        chunk += CHUNK
    _finish(piece[1], groups, head_size, out + piece[0] * row_bytes + head_at, row_bytes, stack)


@njit
def _span(num_rows, frames):  # type: ignore[no-untyped-def]
    """Return the first frame that any row reads, and the end of all."""
    reads = carray(longs_at(frames), (num_rows, 3))
    first, end = reads[0, 0], reads[0, 2]
    for row in range(1, num_rows):
        first = min(first, reads[row, 0])
        end = max(end, reads[row, 2])
    return first, end + 1


@njit
def _start(num_rows, groups, head_size, q, row_bytes, frames, start, stack):  # type: ignore[no-untyped-def]
    """Put a piece's queries and states on the stack. Frames count from `start` there."""
    reads = carray(longs_at(frames), (num_rows, 3))
    scale = float32(_LOG2_E / head_size**0.5)
    for query in range(num_rows * groups):
        row = query // groups
        read = carray(floats_at(q + row * row_bytes + 4 * (query % groups) * head_size), head_size)
        scaled = carray(floats_at(stack + 4 * query * head_size), head_size)
        sums = carray(floats_at(stack + _SUMS_AT + 4 * query * head_size), head_size)
        for i in range(head_size):
            scaled[i] = read[i] * scale
            sums[i] = float32(0)
        state = stack + _STATES_AT + query * STATE_BYTES
        numbers = carray(floats_at(state), STATE_BYTES // 4)
        for i in range(_BLOCK):
            numbers[i] = float32(0)
        numbers[MAX_AT // 4] = float32(NO_SCORE)
        places = carray(ints_at(state + FRAMES_AT), 3)
        for i in range(3):
            places[i] = int32(reads[row, i] - start)


@njit
def _find(ring_start, ring_length, head_size, keys, values, chunk, first, end, stack):  # type: ignore[no-untyped-def]
    """Put the addresses of a chunk's keys and values on the stack.

    Before the first frame and behind the last one stand these two again: nothing else is read.
    Memory is asked for the values, which come after the keys, and for the next chunk's keys.
    """
    key_addresses = carray(longs_at(stack + _KEYS_AT), CHUNK)
    value_addresses = carray(longs_at(stack + _VALUES_AT), CHUNK)
    place = max(chunk, first) % ring_length
    for i in range(CHUNK):
        at = 2 * (ring_start + place) * head_size
        key_addresses[i] = keys + at
        value_addresses[i] = values + at
        for line in range(at, at + 2 * head_size, _LINE):
            ask_for(values + line)
            ask_for(keys + line + 2 * CHUNK * head_size)
        if first <= chunk + i < end - 1:
            place += 1
            if place == ring_length:
                place = 0


@njit
def _attend_to_chunk(num_queries, head_size, first_frame, used, used_end, stack):  # type: ignore[no-untyped-def]
    """Attend from a piece's queries to a chunk of keys, of which [used, used_end) are there."""
    for key in range(used // _BLOCK * _BLOCK, used_end, _BLOCK):
        for word in range(0, head_size // 2, _BLOCK):
            transpose_keys(
                stack + _KEYS_AT + 8 * key,
                4 * word,
                stack + _COLUMNS_AT + 4 * (word * CHUNK + key),
            )
    query = 0
    while query < num_queries:
        count = tile_rows(num_queries - query, MAX_TILE_QUERIES)
        queries = stack + 4 * query * head_size
        weights = stack + _WEIGHTS_AT + 4 * CHUNK * query
        states = stack + _STATES_AT + STATE_BYTES * query
        weigh_keys(queries, head_size, stack + _COLUMNS_AT, first_frame, states, weights, count)
        for dim in range(0, head_size, VALUE_DIMS):
            sums = stack + _SUMS_AT + 4 * (query * head_size + dim)
            add_values(
                weights,
                stack + _VALUES_AT,
                2 * dim,
                used,
                used_end,
                states,
                sums,
                4 * head_size,
                count,
            )
        query += count


@njit
def _finish(num_rows, groups, head_size, out, row_bytes, stack):  # type: ignore[no-untyped-def]
    """Write a piece's outputs: its sums, in order, divided by those of the weights."""
    for query in range(num_rows * groups):
        at = out + query // groups * row_bytes + 4 * (query % groups) * head_size
        written = carray(floats_at(at), head_size)
        sums = carray(floats_at(stack + _SUMS_AT + 4 * query * head_size), head_size)
        parts = carray(floats_at(stack + _STATES_AT + query * STATE_BYTES), _BLOCK)
        total = float32(0)
        for i in range(_BLOCK):
            total += parts[i]
        per_weight = float32(1) / total
        for first in range(0, head_size, 2 * _BLOCK):
            for i in range(_BLOCK):
                written[first + 2 * i] = sums[first + i] * per_weight
                written[first + 2 * i + 1] = sums[first + _BLOCK + i] * per_weight
