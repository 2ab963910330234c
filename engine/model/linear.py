"""Linear layers as they are stored and multiplied: dense, or as packed int8.

In: weights (out, in) as read from a checkpoint. Out: callables on rows, (N, in) -> (N, out). A
decoder step has few rows and reads every weight once, so on a CPU it runs at the speed of memory at
best: what counts is how near a kernel comes to that, and how many bytes a weight has.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_INT8_MAX: Final = 127
_TINY: Final = torch.finfo(torch.float32).tiny


class Projection(Protocol):
    """Any linear layer: rows (N, in) to rows (N, out)."""

    def __call__(self, x: Tensor) -> Tensor: ...


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


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """Weights as int8 with a scale per output; each row of the input as int8 with its own scale.

    The kernel is fbgemm's, as PyTorch brings it; it takes and gives float32 rows, and has one scale
    for all rows of a product. So rows are divided by their largest magnitude beforehand: they then
    all have the same scale, and a row's result doesn't depend on the rows beside it. Products are
    summed as integers: exactly, whatever the batch.
    """

    packed: Any  # fbgemm's packed weight, a torch ScriptObject
    bias: Tensor | None  # (out,) float32
    num_steps: int  # on either side of zero, of an input

    @classmethod
    def pack(cls, weight: Int8Weight, bias: Tensor | None) -> Int8Linear:
        """Lay out a quantized weight as the kernel reads it."""
        zero_points = torch.zeros(len(weight.scales), dtype=torch.int64)
        with warnings.catch_warnings():
            # The pinned version of torch has quantized tensors; later ones may not.
            warnings.filterwarnings("ignore", message=".*quantize_per_tensor.*deprecated")
            quantized = torch._make_per_channel_quantized_tensor(
                weight.values, weight.scales.double(), zero_points, axis=0
            )
        return cls(
            torch.ops.quantized.linear_prepack(quantized, None),
            None if bias is None else bias.float(),
            # Without VNNI instructions pairs of products are added in 16 bits, where 8-bit rows
            # would overflow; 7-bit ones don't.
            num_steps=_INT8_MAX if torch.cpu._is_vnni_supported() else _INT8_MAX // 2,
        )

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(_TINY)
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / self.num_steps, self.num_steps + 1, self.packed
        )
        out = out.mul_(largest)
        return out if self.bias is None else out.add_(self.bias)
