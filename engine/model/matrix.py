"""Weights in the layouts that the CPU kernels read, and their descriptors.

In: weights (out, in) int8 or bfloat16, and biases. Out: a `Matrix`, which kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.kernels.descriptors import BFLOAT16, INT8, MATRIX, MAX_PARTS, PART
from voxlite.engine.kernels.tiles import BFLOAT16_INPUT_BYTES, STEP_BYTES, TILE_WEIGHTS


class Int8Tiles(NamedTuple):
    """Int8 weights in an interleaved layout, which a tile reads from front to back.

    Processors prefetch one stream of memory better than several. So the two rows of a tile are
    interleaved, 64 bytes each:

        output     0        1        0          1          0           ...
        inputs     0..63    0..63    64..127    64..127    128..191    ...
    """

    values: Tensor  # (tiles, steps, 2, 64) int8, with zeros where a tile or step is not whole
    scales: Tensor  # (out,) float32, quantization scales
    sums: Tensor  # (out,) int32, the sum of each output's weights

    @classmethod
    def of(cls, values: Tensor, scales: Tensor) -> Int8Tiles:
        """Lay out weights (out, in) int8 with a scale for each output, (out,) float32."""
        num_tiles, num_steps, *_ = cls.shape(*values.shape)
        padding = (0, -values.shape[1] % STEP_BYTES, 0, -len(values) % TILE_WEIGHTS)
        steps = F.pad(values, padding).view(num_tiles, TILE_WEIGHTS, num_steps, STEP_BYTES)
        sums = values.sum(dim=1, dtype=torch.int32)
        return cls(steps.transpose(1, 2).contiguous(), scales, sums)

    @staticmethod
    def shape(out_dim: int, in_dim: int) -> tuple[int, int, int, int]:
        """Return the shape of `values`."""
        return -(-out_dim // TILE_WEIGHTS), -(-in_dim // STEP_BYTES), TILE_WEIGHTS, STEP_BYTES


def fits_bfloat16_linear(weight: Tensor) -> bool:
    """Whether a weight, (out, in), lies on a CPU as bfloat16 in whole tiles and steps."""
    out_dim, in_dim = weight.shape
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and out_dim % TILE_WEIGHTS == 0
        and 2 * in_dim % STEP_BYTES == 0
        and weight.is_contiguous()
    )


class Matrix(NamedTuple):
    """Weights of one input, whose outputs stand side by side, and their descriptor."""

    descriptor: np.ndarray[Any, np.dtype[np.void]]  # (1,) MATRIX
    tensors: tuple[Tensor, ...]  # kept alive here
    weight_type: int
    in_dim: int
    out_dim: int  # in whole tiles
    input_bytes: int  # of a quantized row

    @classmethod
    def of(cls, parts: Sequence[tuple[Int8Tiles | Tensor, Tensor | None]], in_dim: int) -> Matrix:
        """Describe weights and their biases.

        Args:
            parts: int8 weights, of one part; or up to three parts that `fits_bfloat16_linear`. A
                bias is (out,) float32.
        """
        assert len(parts) <= MAX_PARTS
        assert len({type(weight) for weight, _ in parts}) == 1
        tensors: list[Tensor] = []
        records = np.zeros(MAX_PARTS, PART)
        for record, (weight, bias) in zip(records, parts, strict=False):
            names: tuple[str, ...] = ("weights",)
            fields: tuple[Tensor, ...]
            if isinstance(weight, Int8Tiles):
                names, fields = ("weights", "scales", "sums"), tuple(weight)
                record["out_dim"] = len(weight.sums)
            else:
                fields = (weight,)
                record["out_dim"] = len(weight)
            if bias is not None:
                names, fields = (*names, "bias"), (*fields, bias)
            for name, tensor in zip(names, fields, strict=True):
                record[name] = tensor.data_ptr()
            tensors.extend(fields)
        weight_type = INT8 if isinstance(parts[0][0], Int8Tiles) else BFLOAT16
        # Of a weight row, and of an input row as tiles take it.
        row_bytes = 2 * in_dim
        input_bytes = row_bytes * BFLOAT16_INPUT_BYTES // STEP_BYTES
        if weight_type == INT8:
            row_bytes = input_bytes = -(-in_dim // STEP_BYTES) * STEP_BYTES
        out_dim = int((-(-records["out_dim"] // TILE_WEIGHTS) * TILE_WEIGHTS).sum())
        descriptor = np.zeros(1, MATRIX)
        descriptor[0] = (weight_type, in_dim, row_bytes, input_bytes, out_dim, len(parts), records)
        return cls(descriptor, tuple(tensors), weight_type, in_dim, out_dim, input_bytes)

    @property
    def address(self) -> int:
        """Where the descriptor is."""
        return self.descriptor.ctypes.data
