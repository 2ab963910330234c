"""Linear layers as they are stored and multiplied: dense, or as packed int8.

In: weights (out, in) as read from a checkpoint. Out: callables on rows, (N, in) -> (N, out). A
decoder step has few rows and reads every weight once, so on a CPU it runs at the speed of memory at
best: what counts is how near a kernel comes to that, and how many bytes a weight has. An encoder
that runs ahead has up to two hundred rows, and what counts is how fast a kernel multiplies.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """A dense linear layer: weight (out, in), bias (out,) or None, in the dtype of its input."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and x.dtype is torch.bfloat16 and x.device.type == "cpu":
            # PyTorch's own product of a matrix and one row reads memory twice as fast as oneDNN's.
            # (`torch.backends.mkldnn.flags` takes 10 us, the switch itself none.)
            torch._C._set_mkldnn_enabled(False)
            try:
                return F.linear(x, self.weight, self.bias)
            finally:
                torch._C._set_mkldnn_enabled(True)
        return F.linear(x, self.weight, self.bias)


class Int8Weight(NamedTuple):
    """A weight in eight bits: `values * scales[:, None]` is nearest to the original."""

    values: Tensor  # (out, in) int8
    scales: Tensor  # (out,) float32

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Weight:
        """Round each row of weight, (out, in), to 127 steps on either side of zero."""
        weight = weight.float()
        scales = weight.abs().amax(dim=1).clamp_min(_TINY) / _INT8_MAX
        return cls((weight / scales[:, None]).round_().to(torch.int8), scales)

    @classmethod
    def cat(cls, weights: Sequence[Int8Weight]) -> Int8Weight:
        """Put the outputs of several weights side by side."""
        values, scales = zip(*weights, strict=True)
        return cls(torch.cat(values), torch.cat(scales))


class Int8Linear(Protocol):
    """A linear layer of int8 weights with a scale per output.

    Each row of its input becomes int8 too, as steps of its own largest magnitude. Products are
    summed as integers: exactly, so that a row's result doesn't depend on the rows beside it. Takes
    and gives float32 rows.
    """

    @classmethod
    def pack(cls, weight: Int8Weight, bias: Tensor | None) -> Self:
        """Lay out a quantized weight as the kernel reads it."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class FbgemmLinear:
    """Int8 by fbgemm, as PyTorch brings it: nearest to the speed of memory where rows are few.

    Its kernel rounds float32 rows itself, with one scale for all of them: so they are divided by
    their largest magnitude beforehand.
    """

    packed: Any  # fbgemm's packed weight, a torch ScriptObject
    bias: Tensor | None  # (out,) float32
    num_steps: int  # on either side of zero, of an input

    @classmethod
    def pack(cls, weight: Int8Weight, bias: Tensor | None) -> Self:
        zero_points = torch.zeros(len(weight.scales), dtype=torch.int64)
        with warnings.catch_warnings():
            # The pinned version of torch has quantized tensors; later ones may not.
            warnings.filterwarnings("ignore", message=".*quantize_per_tensor.*deprecated")
            quantized = torch._make_per_channel_quantized_tensor(
                weight.values, weight.scales.double(), zero_points, axis=0
            )
        packed = torch.ops.quantized.linear_prepack(quantized, None)
        return cls(packed, None if bias is None else bias.float(), _num_steps())

    def __call__(self, x: Tensor) -> Tensor:
        largest = _largest(x)
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / self.num_steps, self.num_steps + 1, self.packed
        )
        return _scaled(out, largest, self.bias)


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """Int8 by oneDNN, as PyTorch brings it: the faster one where rows are many.

    Two cores with VNNI, the encoder: a third slower than fbgemm with 4 rows, equal with 32, a fifth
    faster with 192.
    """

    packed: Tensor  # (in, out) int8, in oneDNN's own layout
    scales: Tensor  # (out,) float32
    bias: Tensor | None  # (out,) float32
    num_steps: int  # on either side of zero, of an input

    @classmethod
    def pack(cls, weight: Int8Weight, bias: Tensor | None) -> Self:
        packed = torch.ops.onednn.qlinear_prepack(weight.values, None)
        return cls(packed, weight.scales, None if bias is None else bias.float(), _num_steps())

    def __call__(self, x: Tensor) -> Tensor:
        zero_point = self.num_steps + 1
        step = _largest(x).mul_(1 / self.num_steps)
        rounded = (x / step).add_(zero_point + 0.5).to(torch.uint8)
        out = torch.ops.onednn.qlinear_pointwise.default(
            rounded,
            1.0,  # a step: each row has its own
            zero_point,
            self.packed,
            self.scales,
            None,  # zero points of the weight: all 0
            None,  # bias: it comes after a row's step
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return _scaled(out, step, self.bias)


def _num_steps() -> int:
    # Without VNNI instructions both kernels add pairs of products in 16 bits, where 8-bit rows
    # would overflow; 7-bit ones don't.
    return _INT8_MAX if torch.cpu._is_vnni_supported() else _INT8_MAX // 2


def _largest(x: Tensor) -> Tensor:
    """Return each row's largest magnitude, (N, 1), to divide by."""
    return x.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY)


def _scaled(out: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply the rows of a product by their scales, (N, 1), and add the bias: in place."""
    out = out.mul_(scales)
    return out if bias is None else out.add_(bias)
