"""Linear layers as they are stored and multiplied: dense, or int8.

In: weights (out, in) as read from a checkpoint. Out: callables on rows, (N, in) -> (N, out). A
decoder step has few rows and reads every weight once, so on a CPU it runs at the speed of memory at
best: what counts is how near a kernel comes to that, and how many bytes a weight has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.kernels.linear import MAX_BFLOAT16_ROWS
from voxlite.engine.model.matrix import Int8Tiles, Matrix, fits_bfloat16_linear
from voxlite.engine.model.operations import bfloat16_linear, int8_linear

_INT8_MAX: Final = 127
# The largest magnitude that a row counts as having at least: a step of it is above 0.
_TINY: Final = 1e-30


class Projection(Protocol):
    """Any linear layer: rows (N, in) to rows (N, out)."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Projections(Protocol):
    """Linear layers of one input: rows (N, in) to rows (N, out) of each."""

    def __call__(self, x: Tensor) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Each:
    """Linear layers of one input, one after the other."""

    layers: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        return [layer(x) for layer in self.layers]


@dataclass(frozen=True, slots=True)
class Fused:
    """Linear layers of one input as a single one, whose outputs are those of all side by side."""

    layer: Projection
    out_dims: tuple[int, ...]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        outs: Sequence[Tensor] = self.layer(x).split(self.out_dims, dim=-1)
        return outs


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense linear layer. Rows may have another dtype than weights; what comes out has theirs."""

    weight: Tensor  # (out, in)
    bias: Tensor | None = None  # (out,); on a CPU float32

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= MAX_BFLOAT16_ROWS and fits_bfloat16_linear(self.weight):
            out = bfloat16_linear(x.float(), self.weight)
        else:
            out = F.linear(x.to(self.weight.dtype), self.weight)
        if self.bias is not None:
            out = out.to(self.bias.dtype).add_(self.bias)
        return out.to(x.dtype)


def quantize(weights: Sequence[Tensor]) -> Int8Tiles:
    """Round each row of weights, (out, in) each, to 127 steps on either side of zero.

    The outputs of several weights come to stand side by side.
    """
    rounded, scales = zip(*map(_quantized_rows, weights), strict=True)
    return Int8Tiles.of(torch.cat(rounded), torch.cat(scales))


def _quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp_min(_TINY) / _INT8_MAX
    return (weight / scales[:, None]).round_().to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A linear layer of int8 weights with a scale per output: float32 rows to float32 rows."""

    weight: Int8Tiles
    bias: Tensor | None = None  # (out,) float32

    def __call__(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.bias)


def matrix(layers: Projection | Projections, in_dim: int) -> Matrix | None:
    """Return what `StackProgram` reads of linear layers of one input, or None where it can't.

    Args:
        in_dim: what the layers' rows have.
    """
    parts: tuple[object, ...]
    match layers:
        case Fused(Int8Linear() as layer, _):
            parts = (layer,)
        case Each(each):
            parts = each
        case _:
            parts = (layers,)
    pairs: list[tuple[Int8Tiles | Tensor, Tensor | None]] = []
    for part in parts:
        match part:
            case Linear(weight, bias) if fits_bfloat16_linear(weight):
                pairs.append((weight, bias))
            # int8 weights of one input are one part: `Fused` quantizes them together.
            case Int8Linear(tiles, bias) if len(parts) == 1:
                pairs.append((tiles, bias))
            case _:
                return None
    if any(bias is not None and bias.dtype is not torch.float32 for _, bias in pairs):
        return None
    return Matrix.of(pairs, in_dim)
