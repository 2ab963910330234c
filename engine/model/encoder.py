"""The causal audio encoder with its conv stem, and the adapter to the decoder's width.

In: mel frames of a flat batch of tokens, with each session's carry-over. Out: one adapter output
per token. Legend: T tokens, F = 4 T encoder frames, 8 T mel frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.model.attention import AttentionBatch, LayerCache
from voxlite.engine.model.layers import Stack, rms_norm
from voxlite.engine.model.linear import Linear, Projection

KERNEL: Final = 3
# Rows that a causal convolution of kernel 3 needs from before: kernel - stride.
MEL_CARRY: Final = KERNEL - 1
CONV_CARRY: Final = KERNEL - 2


@dataclass(frozen=True, slots=True)
class ConvState:
    """What the conv stem carries from one token of a session to the next."""

    mel: Tensor  # (2, 128), the last mel frames
    conv: Tensor  # (1, dim), the last output of the first convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Weights of conv stem, layers and adapter. Convolutions are stored as linear layers."""

    block_pool_size: int  # encoder frames per token
    conv1: Linear  # (dim, 128 * 3)
    conv2: Linear  # (dim, dim * 3)
    stack: Stack
    norm: Tensor  # (dim,)
    adapter_in: Projection  # (decoder dim, 4 dim)
    adapter_out: Projection  # (decoder dim, decoder dim)

    def initial_conv_state(self) -> ConvState:
        """Return the zeros that stand before a stream's first mel frame."""
        weight = self.conv1.weight
        num_mel_bins = weight.shape[1] // KERNEL
        return ConvState(
            mel=weight.new_zeros(MEL_CARRY, num_mel_bins),
            conv=weight.new_zeros(CONV_CARRY, self.stack.config.dim),
        )

    def conv_stem(
        self, mels: Sequence[Tensor], states: Sequence[ConvState]
    ) -> tuple[Tensor, list[ConvState]]:
        """Run both convolutions for one stretch of each session.

        Args:
            mels: for each session (8 T, 128) mel frames, in the model's dtype.
            states: for each session what its earlier tokens left.

        Returns:
            (F, dim) flat encoder frames of all sessions, and the new states.
        """
        windows, mel_carry = _windows([s.mel for s in states], mels, stride=1)
        hidden = F.gelu(self.conv1(windows)).split([len(mel) for mel in mels])
        windows, conv_carry = _windows([s.conv for s in states], hidden, stride=2)
        out = F.gelu(self.conv2(windows))
        return out, [ConvState(*carry) for carry in zip(mel_carry, conv_carry, strict=True)]

    def transformer(self, x: Tensor, batch: AttentionBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Run the layers and the final norm on encoder frames x, (F, dim)."""
        x = self.stack(x.to(self.norm.dtype), batch, caches)
        return rms_norm(x, self.norm, self.stack.config.norm_eps)

    def adapter(self, x: Tensor) -> Tensor:
        """Pool encoder outputs (F, dim) into tokens: (T, decoder dim)."""
        pooled = x.reshape(-1, self.block_pool_size * self.stack.config.dim)  # (T, 4 dim)
        return self.adapter_out(F.gelu(self.adapter_in(pooled)))


def _windows(
    carries: Sequence[Tensor], parts: Sequence[Tensor], stride: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """Lay out the inputs of a kernel-3 convolution over each session's rows, as rows to multiply.

    With carries a of one row and parts x of two, and stride 2, windows start at rows 0 and 3:

        row    0    1    2    3    4    5
               a0   x00  x01  a1   x10  x11

    Args:
        carries: for each session its last rows of before, (kernel - stride, channels).
        parts: for each session its new rows, (rows, channels), a multiple of the stride.

    Returns:
        (outputs, channels * 3), channel-major, as a convolution's weight (out, in, 3) flattens, and
        for each session what to carry on.
    """
    padded = torch.cat([x for pair in zip(carries, parts, strict=True) for x in pair])
    device, num_carried = padded.device, KERNEL - stride
    sessions = torch.arange(len(parts), device=device)
    counts = torch.tensor([len(part) for part in parts], device=device)
    session_of_output = sessions.repeat_interleave(counts // stride)
    outputs = torch.arange(len(session_of_output), device=device)
    starts = stride * outputs + num_carried * session_of_output
    windows = padded.unfold(0, KERNEL, 1).index_select(0, starts).flatten(1)
    ends = counts.cumsum(0) + num_carried * (sessions + 1)
    carried = ends[:, None] + torch.arange(-num_carried, 0, device=device)
    return windows, padded.index_select(0, carried.flatten()).split(num_carried)
