"""Rotary position embedding of queries and keys, and writing keys and values to the KV cache."""

from __future__ import annotations

from numba import carray, njit

from voxlite.engine.kernels.intrinsics import (
    floats_at,
    halves_at,
    longs_at,
    nearest_bfloat16,
    words_at,
)


@njit
def rotate_and_store_row(batch, phase, row):  # type: ignore[no-untyped-def]
    """Rotate a row's queries and keys in place, and write its keys and values to its slot."""
    head_size, num_slots = batch.head_size, batch.num_slots
    keys, values = phase.keys, phase.values
    slot = carray(longs_at(batch.slot_mapping), batch.num_rows)[row]
    rotations = batch.rotations + 4 * row * head_size
    q = batch.q + row * batch.q_row_bytes
    for head in range(batch.num_heads):
        _rotate(q + 4 * head * head_size, rotations, head_size)
    k, v = batch.k + row * batch.k_row_bytes, batch.v + row * batch.v_row_bytes
    for head in range(batch.num_kv_heads):
        key, value = k + 4 * head * head_size, v + 4 * head * head_size
        _rotate(key, rotations, head_size)
        at = 2 * (head * num_slots + slot) * head_size
        _store(key, keys + at, head_size)
        _store(value, values + at, head_size)


@njit
def _rotate(head, rotations, head_size):  # type: ignore[no-untyped-def]
    """Multiply adjacent pairs by complex numbers."""
    pairs = carray(floats_at(head), head_size)
    factors = carray(floats_at(rotations), head_size)
    for i in range(0, head_size, 2):
        real, imaginary = pairs[i], pairs[i + 1]
        pairs[i] = real * factors[i] - imaginary * factors[i + 1]
        pairs[i + 1] = real * factors[i + 1] + imaginary * factors[i]


@njit
def _store(numbers, out, head_size):  # type: ignore[no-untyped-def]
    """Round float32 to bfloat16."""
    bits = carray(words_at(numbers), head_size)
    halves = carray(halves_at(out), head_size)
    for i in range(head_size):
        halves[i] = nearest_bfloat16(bits[i])
