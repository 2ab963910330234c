"""The text decoder with its delay conditioning.

In: adapter outputs and token ids of a flat batch of positions. Out: logits of the rows asked for.
Legend: N rows of the flat batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.model.attention import AttentionBatch, LayerCache
from voxlite.engine.model.layers import Stack, rms_norm
from voxlite.engine.model.linear import Linear, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Weights of the decoder. Its activations have the dtype of its norms."""

    embedding: Tensor  # (V, dim)
    head: Projection  # (V, dim): the embedding again, as it is multiplied
    stack: Stack
    delay_down: tuple[Linear, ...]  # per layer (ada_norm_dim, dim)
    delay_up: tuple[Linear, ...]  # per layer (dim, ada_norm_dim)
    norm: Tensor  # (dim,)

    def delay_scales(self, num_delay_tokens: int) -> Tensor:
        """Compute what multiplies each layer's feed-forward input: 1 + scale, (layers, dim).

        Depends on the delay alone. Computed in float32, returned in the model's dtype.
        """
        half = self.stack.config.dim // 2
        device = self.embedding.device
        steps = torch.arange(half, dtype=torch.float32, device=device) / half
        angles = num_delay_tokens * torch.exp(-math.log(10_000.0) * steps)
        t_cond = torch.cat((angles.cos(), angles.sin()))  # (dim,)
        scales = [
            up.weight.float() @ F.gelu(down.weight.float() @ t_cond)
            for down, up in zip(self.delay_down, self.delay_up, strict=True)
        ]
        return (1.0 + torch.stack(scales)).to(self.norm.dtype)

    def __call__(
        self,
        audio: Tensor,
        token_ids: Tensor,
        delay_scales: Tensor,
        logit_rows: Tensor,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """Run the decoder on a flat batch.

        Args:
            audio: (N, dim) adapter outputs.
            token_ids: (N,) int64, the token that stands at each position.
            delay_scales: (layers, N, dim) or (layers, 1, dim), each row's `delay_scales`.
            logit_rows: (R,) int64, the rows whose next token is wanted.

        Returns:
            (R, V) logits in float32.
        """
        x = audio.to(self.norm.dtype) + F.embedding(token_ids, self.embedding).to(self.norm.dtype)
        x = self.stack(x, batch, caches, delay_scales)
        h = rms_norm(x[logit_rows], self.norm, self.stack.config.norm_eps)
        return self.head(h).float()
