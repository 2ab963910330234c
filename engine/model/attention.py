"""Sliding-window attention over the paged KV cache, and the cache's tensors.

In: queries of a flat batch and, for each session in it, the cache slots of the keys that it may
read. Out: attention outputs. Legend: N rows of the flat batch, H heads, K key/value heads,
G = H / K, D head size, n rows and L keys of one session.

A layer's cache is head-major, (K, slots, D), so that each head reads stretches of a block. On CPUs
with a bfloat16 cache a kernel reads them where they lie, for all sessions at once; everywhere else
PyTorch does, from a copy, one session after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from voxlite.engine.model.operations import windowed_attention
from voxlite.engine.model.windows import Windows


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer for all sessions, (K, slots, D) each."""

    keys: Tensor
    values: Tensor

    def write(self, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows (N, K, D) at slots (N,), in the cache's dtype."""
        dtype = self.keys.dtype
        self.keys.index_copy_(1, slot_mapping, keys.transpose(0, 1).to(dtype))
        self.values.index_copy_(1, slot_mapping, values.transpose(0, 1).to(dtype))


class KVCache:
    """The caches of all layers of a stack: `frames_per_block` slots for each block of its pool."""

    def __init__(self, storage: Tensor, frames_per_block: int) -> None:
        """Take uninitialised memory, (2, layers, K, slots, D): keys and values of each layer."""
        self._storage, self._frames_per_block = storage, frames_per_block
        self.layers = tuple(map(LayerCache, *storage))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Write at slots targets (N,) what slots sources (N,) hold, in all layers."""
        self._storage.index_copy_(3, targets, self._storage.index_select(3, sources))

    def fill(self, block: int, value: float) -> None:
        """Overwrite a block: tests poison freed ones, so that a stale read can't go unnoticed."""
        first = block * self._frames_per_block
        self._storage[:, :, :, first : first + self._frames_per_block] = value


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's part of a batch: rows of queries, and the slots of the keys they read.

    `mask` is (n, L), True where a row may read a key; None where every row reads every key.
    """

    rows: slice
    key_slots: Tensor  # (L,) int64
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What all layers of a stack share for one flat batch. Nothing in it is ever changed."""

    rotations: Tensor  # (N, 1, D / 2) complex64
    slot_mapping: Tensor  # (N,) int64, the slot of each row's own key
    reads: Windows | tuple[Segment, ...]  # which keys each row reads


def first_key(position: int, window: int) -> int:
    """Return the oldest position that the query at `position` reads: the window includes both."""
    return max(0, position - window + 1)


def window_mask(
    oldest_key: int,
    first_query: int,
    num_queries: int,
    window: int,
    device: torch.device,
    *,
    num_alternatives: int = 0,
) -> Tensor:
    """Make the mask of consecutive queries over the keys that any of them reads.

    Keys run from the oldest one that any of them reads to the last query itself. Window 3, oldest
    key 2, queries 4 and 5:

        key        2  3  4  5
        query 4    x  x  x  .
        query 5    .  x  x  x

    Alternatives are rows more that stand where the last queries do, each in place of one of them:
    it reads the same keys, but for its own, which lies behind all others. With one:

        key        2  3  4  5  5'
        query 4    x  x  x  .  .
        query 5    .  x  x  x  .
        query 5'   .  x  x  .  x

    Returns:
        (num_queries + num_alternatives, keys + num_alternatives) bool.
    """
    end = first_query + num_queries
    keys = torch.arange(oldest_key, end + num_alternatives, device=device)
    own_keys = torch.arange(first_query, end + num_alternatives, device=device)[:, None]
    queries = torch.where(own_keys < end, own_keys, own_keys - num_alternatives)
    return (keys < queries) & (keys > queries - window) | (keys == own_keys)


def paged_attention(q: Tensor, cache: LayerCache, reads: Windows | Sequence[Segment]) -> Tensor:
    """Attend from each session's queries to its own keys; softmax in float32.

    Args:
        q: (N, H, D).

    Returns:
        (N, H, D) in the dtype of q.
    """
    if isinstance(reads, Windows):
        return windowed_attention(q, cache.keys, cache.values, reads)
    dtype, q = q.dtype, q.to(cache.keys.dtype)
    outs = [_attend_to_segment(q[segment.rows], cache, segment) for segment in reads]
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(dtype)


def _attend_to_segment(q: Tensor, cache: LayerCache, segment: Segment) -> Tensor:
    """Attend with one session's queries, (n, H, D)."""
    keys, values = (x.index_select(1, segment.key_slots) for x in (cache.keys, cache.values))
    queries = q.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)  # (K, G, n, D)
    q = queries.flatten(1, 2)  # (K, G n, D)
    scores = (q * q.shape[-1] ** -0.5 @ keys.transpose(1, 2)).float()  # (K, G n, L)
    if segment.mask is not None:
        scores = scores.masked_fill(~segment.mask.repeat(queries.shape[1], 1), -torch.inf)
    out = torch.softmax(scores, dim=-1).to(q.dtype) @ values
    return out.view_as(queries).permute(2, 0, 1, 3).flatten(1, 2)
