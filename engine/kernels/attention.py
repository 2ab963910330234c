"""Sliding-window attention that reads bfloat16 keys and values where they lie in the KV cache.

In: queries of a flat batch, a layer's cache, and what each row reads, for all sessions at once.
Out: attention outputs. Legend: N rows of the flat batch, H heads, K key/value heads, G = H / K,
D head size.

An item of work is a piece (a few rows of one session) and one key/value head, whose queries share
each key and value that is read. Keys come in chunks of 64 frames, and a chunk starts at a multiple
of 64 in the stream: so a row's sums are the same whichever rows stand beside it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import carray, float32, int32, njit

from voxlite.engine.kernels.attention_tiles import (
    CHUNK,
    MAX_TILE_QUERIES,
    NO_SCORE,
    STATE,
    VALUE_DIMS,
    add_values,
    state_at,
    transpose_keys,
    weigh_keys,
)
from voxlite.engine.kernels.descriptors import PIECE, READ, piece_at, read_at
from voxlite.engine.kernels.intrinsics import (
    CACHE_LINE_BYTES,
    LANES,
    floats_at,
    longs_at,
    prefetch,
    stack_bytes,
    tile_rows,
)

# The most queries of a piece: their sums and weights fit L1.
MAX_QUERIES: Final = 28
MAX_HEAD_SIZE: Final = 128
_LOG2_E: Final = 1.4426950408889634
# What an item needs on its thread's stack.
_SCRATCH: Final = np.dtype(
    [
        ("queries", np.float32, (MAX_QUERIES, MAX_HEAD_SIZE)),
        ("sums", np.float32, (MAX_QUERIES, MAX_HEAD_SIZE)),
        ("columns", np.uint32, (MAX_HEAD_SIZE // 2, CHUNK)),  # a chunk's keys, transposed
        ("weights", np.float32, (MAX_QUERIES, CHUNK)),
        ("states", STATE, (MAX_QUERIES,)),
        ("keys", np.int64, (CHUNK,)),  # addresses of a chunk's keys
        ("next_keys", np.int64, (CHUNK,)),
        ("values", np.int64, (CHUNK,)),
    ]
)
_SUMS_AT, _COLUMNS_AT, _WEIGHTS_AT, _STATES_AT, _KEYS_AT, _NEXT_KEYS_AT, _VALUES_AT = (
    int(_SCRATCH.fields[name][1])  # type: ignore[index]
    for name in ("sums", "columns", "weights", "states", "keys", "next_keys", "values")
)
_SCRATCH_BYTES: Final = _SCRATCH.itemsize
_STATE_BYTES: Final = STATE.itemsize
_PIECE_BYTES: Final = PIECE.itemsize
_READ_BYTES: Final = READ.itemsize


@njit
def attend_item(batch, phase, item):  # type: ignore[no-untyped-def]
    """Attend from the rows of a piece, with the queries of one key/value head.

    Args:
        item: the piece's number times the number of key/value heads, plus the head.
    """
    scratch = stack_bytes(_SCRATCH_BYTES)
    num_kv_heads, head_size = batch.num_kv_heads, batch.head_size
    groups = batch.num_heads // num_kv_heads
    piece = piece_at(batch.pieces + item // num_kv_heads * _PIECE_BYTES)
    reads = batch.reads + piece.first_row * _READ_BYTES
    kv_head = item % num_kv_heads
    head_at, cache_at = 4 * kv_head * groups * head_size, 2 * kv_head * batch.num_slots * head_size
    keys, values = phase.keys + cache_at, phase.values + cache_at
    span = _span(piece.num_rows, reads)
    start = chunk = span[0] // CHUNK * CHUNK
    _load_queries(batch, piece, groups, head_at, reads, start, scratch)
    keys_at, next_keys_at = scratch + _KEYS_AT, scratch + _NEXT_KEYS_AT
    _find_chunk(batch, piece.blocks, keys, chunk, span, keys_at, keys_at, values - keys, scratch)
    while chunk < span[1]:
        _find_chunk(
            batch,
            piece.blocks,
            keys,
            chunk + CHUNK,
            span,
            keys_at,
            next_keys_at,
            values - keys,
            scratch,
        )
        used = max(span[0] - chunk, 0), min(span[1] - chunk, CHUNK)
        num_queries = piece.num_rows * groups
        _attend_to_chunk(num_queries, head_size, chunk - start, used, keys_at, scratch)
        keys_at, next_keys_at = next_keys_at, keys_at
        chunk += CHUNK
    row_bytes = 4 * batch.num_heads * head_size
    out = phase.output + piece.first_row * row_bytes + head_at
    _write_outputs(piece.num_rows, groups, head_size, out, row_bytes, scratch)


@njit
def _span(num_rows, reads):  # type: ignore[no-untyped-def]
    """Return the first frame that any row reads, and the end of all."""
    first, end = read_at(reads).first, read_at(reads).own
    for row in range(1, num_rows):
        read = read_at(reads + row * _READ_BYTES)
        first, end = min(first, read.first), max(end, read.own)
    return first, end + 1


@njit
def _load_queries(batch, piece, groups, head_at, reads, start, scratch):  # type: ignore[no-untyped-def]
    """Scale a piece's queries, and reset sums and states, whose frames are relative to `start`."""
    head_size = batch.head_size
    scale = float32(_LOG2_E / head_size**0.5)
    for query in range(piece.num_rows * groups):
        row = query // groups
        at = batch.q + (piece.first_row + row) * batch.q_row_bytes + head_at
        q = carray(floats_at(at + 4 * (query % groups) * head_size), head_size)
        scaled = carray(floats_at(scratch + 4 * query * head_size), head_size)
        sums = carray(floats_at(scratch + _SUMS_AT + 4 * query * head_size), head_size)
        for i in range(head_size):
            scaled[i] = q[i] * scale
            sums[i] = float32(0)
        state = state_at(scratch + _STATES_AT + query * _STATE_BYTES)
        for i in range(LANES):
            state.weight_sums[i] = float32(0)
        state.largest = float32(NO_SCORE)
        read = read_at(reads + row * _READ_BYTES)
        state.first = int32(read.first - start)
        state.end = int32(read.end - start)
        state.own = int32(read.own - start)


@njit
def _find_chunk(batch, blocks, keys, chunk, span, keys_at, next_keys_at, values_from_keys, scratch):  # type: ignore[no-untyped-def]
    """Write the addresses of a chunk's values and of the next chunk's keys, and prefetch both.

    Positions outside `span` repeat the first or last frame's address, so nothing else is read.
    """
    key_addresses = carray(longs_at(keys_at), CHUNK)
    value_addresses = carray(longs_at(scratch + _VALUES_AT), CHUNK)
    next_addresses = carray(longs_at(next_keys_at), CHUNK)
    key_bytes, frames_per_block = 2 * batch.head_size, batch.frames_per_block
    first, last = span[0], span[1] - 1
    frame = min(max(chunk, first), last)
    block, place = frame // frames_per_block, frame % frames_per_block
    key = keys + (_block_at(blocks, block) * frames_per_block + place) * key_bytes
    for i in range(CHUNK):
        next_addresses[i] = key
        value = key_addresses[i] + values_from_keys
        value_addresses[i] = value
        for line in range(0, key_bytes, CACHE_LINE_BYTES):
            prefetch(value + line)
            prefetch(key + line)
        if first <= chunk + i < last:
            key += key_bytes
            place += 1
            if place == frames_per_block:
                block, place = block + 1, 0
                key = keys + _block_at(blocks, block) * frames_per_block * key_bytes


@njit
def _block_at(blocks, block):  # type: ignore[no-untyped-def]
    return carray(longs_at(blocks + 8 * block), 1)[0]


@njit
def _attend_to_chunk(num_queries, head_size, first_frame, used, keys_at, scratch):  # type: ignore[no-untyped-def]
    """Attend from a piece's queries to a chunk of keys, of which [used[0], used[1]) are there.

    Args:
        keys_at: where their addresses are.
    """
    for key in range(used[0] // LANES * LANES, used[1], LANES):
        for word in range(0, head_size // 2, LANES):
            transpose_keys(
                keys_at + 8 * key,
                4 * word,
                scratch + _COLUMNS_AT + 4 * (word * CHUNK + key),
            )
    query = 0
    while query < num_queries:
        count = tile_rows(num_queries - query, MAX_TILE_QUERIES)
        queries = scratch + 4 * query * head_size
        weights = scratch + _WEIGHTS_AT + 4 * CHUNK * query
        states = scratch + _STATES_AT + _STATE_BYTES * query
        weigh_keys(queries, head_size, scratch + _COLUMNS_AT, first_frame, states, weights, count)
        for dim in range(0, head_size, VALUE_DIMS):
            sums = scratch + _SUMS_AT + 4 * (query * head_size + dim)
            values = scratch + _VALUES_AT, 2 * dim
            add_values(weights, values, used, states, (sums, 4 * head_size), count)
        query += count


@njit
def _write_outputs(num_rows, groups, head_size, out, row_bytes, scratch):  # type: ignore[no-untyped-def]
    """Write a piece's outputs: its sums, in order, divided by those of the weights."""
    for query in range(num_rows * groups):
        at = out + query // groups * row_bytes + 4 * (query % groups) * head_size
        written = carray(floats_at(at), head_size)
        sums = carray(floats_at(scratch + _SUMS_AT + 4 * query * head_size), head_size)
        state = state_at(scratch + _STATES_AT + query * _STATE_BYTES)
        total = float32(0)
        for i in range(LANES):
            total += state.weight_sums[i]
        per_weight = float32(1) / total
        for first in range(0, head_size, 2 * LANES):
            for i in range(LANES):
                written[first + 2 * i] = sums[first + i] * per_weight
                written[first + 2 * i + 1] = sums[first + LANES + i] * per_weight
