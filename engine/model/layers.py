"""What encoder and decoder share: RoPE, norms, a transformer layer, and a stack of layers.

Legend: N rows of a flat batch (positions of many sessions, one after the other, no padding),
H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.config import TransformerConfig
from voxlite.engine.model.attention import AttentionBatch, LayerCache, paged_attention
from voxlite.engine.model.linear import Projection, Projections, matrix
from voxlite.engine.model.operations import float32_rms_norm, rotate_and_store
from voxlite.engine.model.stack_program import LayerWeights, StackProgram
from voxlite.engine.model.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
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


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers of encoder or decoder."""

    config: TransformerConfig
    layers: tuple[Layer, ...]

    def __call__(
        self,
        x: Tensor,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        ffn_scales: Tensor | None = None,
    ) -> Tensor:
        """Run the layers on x, (N, dim), and write its keys and values to the caches.

        Args:
            ffn_scales: what multiplies the normed input of each feed-forward network, (layers, N,
                dim) or (layers, 1, dim), or None.
        """
        kernel = self._kernel
        if kernel is not None and kernel.takes(len(x)) and isinstance(batch.reads, Windows):
            x = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            pairs = [(cache.keys, cache.values) for cache in caches]
            kernel(x, pairs, batch.rotations, batch.slot_mapping, batch.reads, ffn_scales)
            return x
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            scale = None if ffn_scales is None else ffn_scales[i]
            x = run_layer(x, layer, self.config, batch, cache, scale)
        return x

    @cached_property
    def _kernel(self) -> StackProgram | None:
        """What runs all layers in one call, or None where it can't."""
        config = self.config
        layers = []
        for layer in self.layers:
            norms = layer.attention_norm, layer.ffn_norm
            wqkv, w13 = (matrix(x, config.dim) for x in (layer.wqkv, layer.w13))
            wo = matrix(layer.wo, config.num_heads * config.head_size)
            w2 = matrix(layer.w2, config.hidden_dim)
            if wqkv is None or wo is None or w13 is None or w2 is None:
                return None
            if any(norm.dtype is not torch.float32 for norm in norms):
                return None
            layers.append(LayerWeights(norms[0], wqkv, wo, norms[1], w13, w2))
        return StackProgram(
            layers,
            num_heads=config.num_heads,
            head_size=config.head_size,
            norm_eps=config.norm_eps,
        )


def run_layer(
    x: Tensor,
    layer: Layer,
    config: TransformerConfig,
    batch: AttentionBatch,
    cache: LayerCache,
    ffn_scale: Tensor | None = None,
) -> Tensor:
    """Run one layer on x, (N, dim), and write its keys and values to the cache.

    Args:
        ffn_scale: what multiplies the normed input of the feed-forward network, (N, dim) or (1,
            dim), or None.
    """
    h = rms_norm(x, layer.attention_norm, config.norm_eps)
    q, k, v = (rows.unflatten(-1, (-1, config.head_size)) for rows in layer.wqkv(h))
    if isinstance(batch.reads, Windows):
        rotate_and_store(q, k, v, batch.rotations, batch.slot_mapping, cache.keys, cache.values)
    else:
        q, k = rotate(q, batch.rotations), rotate(k, batch.rotations)
        cache.write(batch.slot_mapping, k, v)
    x = x + layer.wo(paged_attention(q, cache, batch.reads).flatten(-2))
    h = rms_norm(x, layer.ffn_norm, config.norm_eps)
    if ffn_scale is not None:
        h = h * ffn_scale
    gate, up = layer.w13(h)
    return x + layer.w2(F.silu(gate).mul_(up))
