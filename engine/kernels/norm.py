"""RMS norm of rows in one call. PyTorch's takes six, whose code the weights push out of the caches.

In: rows and a weight. Out: rows.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from numba import carray, float32
from torch import Tensor

from engine.kernels.parallel import Kernel
from engine.kernels.vectors import floats_at, next_number


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
        num_rows, dim, x.data_ptr(), weight.data_ptr(), _float32(eps).data_ptr(), out.data_ptr()
    )
    return out


@cache
def _float32(number: float) -> Tensor:
    return torch.tensor([number], dtype=torch.float32)


@partial(Kernel, fastmath={"reassoc", "nsz"})  # so that squares are summed in registers
def _rms_norm(block: Any) -> None:
    args = carray(block, 7)
    num_rows, dim = args[1], args[2]
    weight, eps = carray(floats_at(args[4]), dim), carray(floats_at(args[5]), 1)[0]
    row = next_number(block)
    while row < num_rows:
        x = carray(floats_at(args[3] + 4 * row * dim), dim)
        out = carray(floats_at(args[6] + 4 * row * dim), dim)
        squares = float32(0)
        for i in range(dim):
            squares += x[i] * x[i]
        scale = float32(1) / (squares / float32(dim) + eps) ** float32(0.5)
        for i in range(dim):
            out[i] = x[i] * scale * weight[i]
        row = next_number(block)
