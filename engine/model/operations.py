"""Single operations on the CPU kernels: a linear layer, a norm, rotation, attention.

In and out: tensors. Each is a program of one phase or two. Legend: N rows of the flat batch,
H heads, K key/value heads, D head size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from voxlite.engine.kernels.descriptors import ATTEND, MULTIPLY, NORM, PHASE, QUANTIZE, ROTATE
from voxlite.engine.kernels.program import run
from voxlite.engine.model.matrix import Int8Tiles, Matrix
from voxlite.engine.model.windows import Windows


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
    return _linear(x, Matrix.of([(weight, bias)], x.shape[1]))[:, : len(weight.sums)]


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
        torch.get_num_threads(),
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
    run(phases, torch.get_num_threads(), num_rows=len(x), dim=x.shape[1], norm_eps=eps)
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
        torch.get_num_threads(),
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
        torch.get_num_threads(),
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_slots=num_slots,
        q=queries.data_ptr(),
        q_row_bytes=4 * queries.stride(0),
        frames_per_block=windows.frames_per_block,
        reads=windows.frames.data_ptr(),
        pieces=windows.pieces.data_ptr(),
        num_pieces=len(windows.pieces),
    )
    return out.to(q.dtype)
