"""Rotary position embedding, and the way of keys and values into a bfloat16 KV cache, in one call.

In: queries, keys and values as linear layers leave them. Out: queries and keys turned where they
stand, and the cache. Legend: N rows of the flat batch, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import carray, njit
from torch import Tensor

from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.vectors import (
    floats_at,
    halves_at,
    longs_at,
    nearest_bfloat16,
    next_number,
    words_at,
)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotations: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Turn adjacent pairs of q and k in place, and write k and v to their slots in the cache.

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
    _rotate_and_store(
        len(q),
        q.shape[1],
        num_kv_heads,
        head_size,
        num_slots,
        q.data_ptr(),
        4 * q.stride(0),
        k.data_ptr(),
        4 * k.stride(0),
        v.data_ptr(),
        4 * v.stride(0),
        rotations.data_ptr(),
        slot_mapping.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
    )


@Kernel
def _rotate_and_store(block: Any) -> None:
    args = carray(block, 16)
    num_rows, num_heads, num_kv_heads, head_size = args[1], args[2], args[3], args[4]
    slots = carray(longs_at(args[13]), num_rows)
    row = next_number(block)
    while row < num_rows:
        rotate_and_store_row(
            num_heads,
            num_kv_heads,
            head_size,
            args[5],
            args[6] + row * args[7],
            args[8] + row * args[9],
            args[10] + row * args[11],
            args[12] + 4 * row * head_size,
            slots[row],
            args[14],
            args[15],
        )
        row = next_number(block)


@njit
def rotate_and_store_row(  # type: ignore[no-untyped-def]
    num_heads, num_kv_heads, head_size, num_slots, q, k, v, rotations, slot, keys, values
):
    """Do it for one row: q, k, v, its rotations and the cache's tensors are addresses."""
    head_bytes = 4 * head_size
    for head in range(num_heads):
        _rotate(q + head * head_bytes, rotations, head_size)
    for head in range(num_kv_heads):
        key, value = k + head * head_bytes, v + head * head_bytes
        _rotate(key, rotations, head_size)
        at = 2 * (head * num_slots + slot) * head_size
        _store(key, keys + at, head_size)
        _store(value, values + at, head_size)


@njit
def _rotate(head, rotations, head_size):  # type: ignore[no-untyped-def]
    """Multiply pairs by complex numbers."""
    pairs = carray(floats_at(head), head_size)
    turns = carray(floats_at(rotations), head_size)
    for i in range(0, head_size, 2):
        real, imaginary = pairs[i], pairs[i + 1]
        pairs[i] = real * turns[i] - imaginary * turns[i + 1]
        pairs[i + 1] = real * turns[i + 1] + imaginary * turns[i]


@njit
def _store(numbers, to, head_size):  # type: ignore[no-untyped-def]
    """Round float32 to bfloat16."""
    bits = carray(words_at(numbers), head_size)
    halves = carray(halves_at(to), head_size)
    for i in range(head_size):
        halves[i] = nearest_bfloat16(bits[i])
