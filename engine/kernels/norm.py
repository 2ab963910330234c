"""RMS norm of rows in one call. PyTorch's takes six, whose code the weights push out of the caches.

In: rows and a weight. Out: rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray, float32, njit
from torch import Tensor

from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.vectors import floats_at, next_number


def float32_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit mean square, and multiply it by the weight.

    Args:
        x: (N, dim) float32.
        weight: (dim,) float32.
        eps: added to the mean square.

    Returns:
        (N, dim) float32.
    """
    x = x.contiguous()
    num_rows, dim = x.shape
    out = torch.empty_like(x)
    _rms_norm(
        num_rows,
        dim,
        x.data_ptr(),
        weight.data_ptr(),
        float32_tensor(eps).data_ptr(),
        out.data_ptr(),
    )
    return out


@cache
def float32_tensor(number: float) -> Tensor:
    """Give a number an address."""
    return torch.tensor([number], dtype=torch.float32)


@Kernel
def _rms_norm(block: Any) -> None:
    args = carray(block, 7)
    num_rows, dim = args[1], args[2]
    eps = carray(floats_at(args[5]), 1)[0]
    row = next_number(block)
    while row < num_rows:
        at = 4 * row * dim
        norm_row(args[3] + at, dim, args[4], eps, args[6] + at)
        row = next_number(block)


@njit(fastmath={"reassoc", "nsz"})  # so that squares are summed in registers
def norm_row(row, dim, weight, eps, out):  # type: ignore[no-untyped-def]
    """Norm the row at an address, and write it to another."""
    x, weights = carray(floats_at(row), dim), carray(floats_at(weight), dim)
    normed = carray(floats_at(out), dim)
    squares = float32(0)
    for i in range(dim):
        squares += x[i] * x[i]
    scale = float32(1) / (squares / float32(dim) + eps) ** float32(0.5)
    for i in range(dim):
        normed[i] = x[i] * scale * weights[i]
