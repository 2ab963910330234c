"""Descriptors: the records that a kernel reads, as numpy's structured dtypes.

Python fills them in (`np.zeros(n, PHASE)`, `record["input"] = tensor.data_ptr()`), a kernel reads
them by name (`phase.input`). Every field that names a tensor is its address; who fills it in keeps
the tensor alive. Legend: N rows of the flat batch, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from voxlite.engine.kernels.intrinsics import record_reader

MAX_PARTS: Final = 3
_ADDRESS: Final = np.int64


# One of a matrix's weight tensors: it gives a range of the outputs.
PART: Final = np.dtype(
    [
        ("weights", _ADDRESS),
        ("scales", _ADDRESS),  # (out,) float32, quantization scales
        ("sums", _ADDRESS),  # (out,) int32, each output's sum of int8 weights
        ("bias", _ADDRESS),  # (out,) float32, or 0
        ("out_dim", np.int64),
    ]
)

# Weight types.
INT8, BFLOAT16 = range(2)

# A fused matrix: parts with the same input, whose outputs are concatenated.
MATRIX: Final = np.dtype(
    [
        ("weight_type", np.int64),  # INT8 or BFLOAT16
        ("in_dim", np.int64),
        ("row_bytes", np.int64),  # of a weight row
        ("input_bytes", np.int64),  # of a quantized input row
        ("out_dim", np.int64),  # of all parts, each rounded up to whole tiles
        ("num_parts", np.int64),
        ("parts", PART, (MAX_PARTS,)),
    ]
)

# The kinds of phases. Each is split into items, which threads take from a work queue.
NORM, GATE, QUANTIZE, MULTIPLY, ROTATE, ATTEND = range(6)

# What all threads do between two barriers.
PHASE: Final = np.dtype(
    [
        ("kind", np.int64),
        ("matrix", _ADDRESS),  # to multiply with, or for which rows are quantized; or 0
        ("prefetched_matrix", _ADDRESS),  # prefetched at this barrier and later ones; 0: go on
        ("norm_weight", _ADDRESS),  # (dim,) float32
        ("delay_scale", _ADDRESS),  # (N, dim) or (dim,) float32 that multiplies normed rows, or 0
        ("keys", _ADDRESS),  # a layer's cache, (K, slots, D) bfloat16
        ("values", _ADDRESS),  # the same
        ("input", _ADDRESS),  # (N, dim) float32
        ("output", _ADDRESS),  # (N, dim) float32
        ("residual", _ADDRESS),  # (N, dim) float32, to which outputs are added, or 0
    ]
)

# What all phases of a program share.
BATCH: Final = np.dtype(
    [
        ("phases", _ADDRESS),
        ("num_phases", np.int64),
        ("num_threads", np.int64),
        ("counters", _ADDRESS),  # see `program`
        ("num_rows", np.int64),  # N
        ("dim", np.int64),  # of rows to be normed
        ("norm_eps", np.float32),
        ("delay_scale_row_bytes", np.int64),  # 0: all rows share one
        ("quantized", _ADDRESS),  # (N, row bytes): rows as tiles take them
        ("row_scales", _ADDRESS),  # (N,) float32, their quantization scales
        ("num_heads", np.int64),  # H
        ("num_kv_heads", np.int64),  # K
        ("head_size", np.int64),  # D
        ("num_slots", np.int64),  # of a layer's cache
        ("frames_per_block", np.int64),  # slots of each of its blocks
        ("q", _ADDRESS),  # (N, H, D) float32, with q_row_bytes from one row to the next
        ("k", _ADDRESS),  # (N, K, D) float32
        ("v", _ADDRESS),  # the same
        ("q_row_bytes", np.int64),
        ("k_row_bytes", np.int64),
        ("v_row_bytes", np.int64),
        ("rotations", _ADDRESS),  # (N, D / 2) complex64
        ("slot_mapping", _ADDRESS),  # (N,) int64
        ("reads", _ADDRESS),  # (N,) READ
        ("pieces", _ADDRESS),  # (num_pieces,) PIECE
        ("num_pieces", np.int64),
    ],
    align=True,
)

# The frames that a row attends to: [first, end), and its own, which isn't before `end`.
READ: Final = np.dtype([("first", np.int64), ("end", np.int64), ("own", np.int64)])

# A few rows of one session.
PIECE: Final = np.dtype(
    [
        ("first_row", np.int64),
        ("num_rows", np.int64),
        # Where its stream's block 0 would stand: blocks that it holds no longer are never read.
        ("blocks", _ADDRESS),  # int64 ids
    ]
)

batch_at = record_reader(BATCH)
matrix_at = record_reader(MATRIX)
phase_at = record_reader(PHASE)
piece_at = record_reader(PIECE)
read_at = record_reader(READ)
