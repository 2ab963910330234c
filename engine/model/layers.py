"""The pieces that encoder and decoder share: RoPE, norms and the transformer block.

Legend: N rows of a flat batch (positions of many sessions, one after the other, no padding),
H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config import TransformerConfig
from engine.kernels.attention import Windows
from engine.kernels.norm import float32_rms_norm
from engine.kernels.rope import rotate_and_store
from engine.model.attention import AttentionBatch, LayerCache, paged_attention
from engine.model.linear import Projection, Projections


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One pre-norm transformer layer: attention and a SwiGLU feed-forward network."""

    attention_norm: Tensor  # (dim,)
    wqkv: Projections  # (H D, dim), (K D, dim), (K D, dim)
    wo: Projection  # (dim, H D)
    ffn_norm: Tensor  # (dim,)
    w13: Projections  # gate (hidden, dim), up (hidden, dim)
    w2: Projection  # down (dim, hidden)


class Rope:
    """Rotary position embedding of adjacent pairs (2j, 2j + 1), as Mistral's files lay them out.

    Angles are products of absolute positions in float64: a position of any size stays exact.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float64, device=device)
        self._frequencies = config.rope_theta ** -(exponents / config.head_size)  # (D / 2,)

    def rotations(self, positions: Tensor) -> Tensor:
        """Return e^(i angle) for positions (N,) int64, as (N, 1, D / 2) complex64."""
        angles = positions.to(torch.float64)[:, None] * self._frequencies
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None, :]


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn each adjacent pair of x, (N, H, D), by its position's angles; computed in float32."""
    pairs = torch.view_as_complex(x.to(torch.float32).unflatten(-1, (-1, 2)))  # (N, H, D / 2)
    return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x, (N, dim), to unit mean square; the mean is taken in float32."""
    if x.dtype is torch.float32 and x.device.type == "cpu":
        return float32_rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def run_block(
    x: Tensor,
    block: Block,
    config: TransformerConfig,
    batch: AttentionBatch,
    cache: LayerCache,
    scale_ffn_input: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run one layer on x, (N, dim), and write its keys and values to the cache.

    Args:
        scale_ffn_input: applied to the normed input of the feed-forward network, (N, dim).
    """
    h = rms_norm(x, block.attention_norm, config.norm_eps)
    q, k, v = (rows.unflatten(-1, (-1, config.head_size)) for rows in block.wqkv(h))
    if isinstance(batch.reads, Windows):
        rotate_and_store(q, k, v, batch.rotations, batch.slot_mapping, cache.keys, cache.values)
    else:
        q, k = rotate(q, batch.rotations), rotate(k, batch.rotations)
        cache.write(batch.slot_mapping, k, v)
    x = x + block.wo(paged_attention(q, cache, batch.reads).flatten(-2))
    h = rms_norm(x, block.ffn_norm, config.norm_eps)
    if scale_ffn_input is not None:
        h = scale_ffn_input(h)
    gate, up = block.w13(h)
    return x + block.w2(F.silu(gate).mul_(up))
