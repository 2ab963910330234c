"""Sliding-window attention over the paged KV cache, and the cache's tensors.

In: queries of a flat batch and, for each session in it, the cache slots of the keys that it may
read. Out: attention outputs. Legend: N rows of the flat batch, H heads, K key/value heads,
G = H / K, D head size, n rows and L keys of one session.

A layer's cache is head-major, (K, slots, D), so that each head reads one stretch of memory, and
windows are read in place. On CPUs with a bfloat16 cache a kernel does it for all sessions at once;
everywhere else PyTorch does, one session after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from voxlite.engine.model.operations import windowed_attention
from voxlite.engine.model.windows import Windows

# The score of a key that a row doesn't read. Not -inf: a row that reads no key of a run would be
# NaN, which oneDNN's bfloat16 products spread to other rows on CPUs with AMX (PyTorch 2.13).
_NO_SCORE: Final = -1e30


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


@dataclass(frozen=True, slots=True)
class KVCache:
    """The caches of all layers of a stack: `frames_per_block` slots for each block of its pool."""

    layers: tuple[LayerCache, ...]
    frames_per_block: int

    def copy_out(self, slots: Tensor) -> list[LayerCache]:
        """Return what all layers hold at slots (N,): (K, N, D) each."""
        return [
            LayerCache(layer.keys.index_select(1, slots), layer.values.index_select(1, slots))
            for layer in self.layers
        ]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Write at slots targets (N,) what slots sources (N,) hold."""
        self.copy_in(targets, self.copy_out(sources))

    def copy_in(self, slots: Tensor, saved: Sequence[LayerCache]) -> None:
        """Write at slots (N,) what `copy_out` returned."""
        for layer, source in zip(self.layers, saved, strict=True):
            layer.keys.index_copy_(1, slots, source.keys)
            layer.values.index_copy_(1, slots, source.values)

    def fill(self, blocks: range, value: float) -> None:
        """Overwrite blocks: tests poison freed ones, so that a stale read can't go unnoticed."""
        slots = slice(blocks.start * self.frames_per_block, blocks.stop * self.frames_per_block)
        for layer in self.layers:
            layer.keys[:, slots] = value
            layer.values[:, slots] = value


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's part of a batch: rows of queries, and the slots of the keys they read.

    `mask` is (n, L), True where a row may read a key; None where every row reads every key.
    """

    rows: slice
    key_runs: tuple[range, ...]
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
    first_query: int,
    num_queries: int,
    window: int,
    device: torch.device,
    *,
    num_alternatives: int = 0,
) -> Tensor:
    """Make the mask of consecutive queries over the keys that any of them reads.

    Keys run from the first query's oldest one to the last query itself. Window 3, queries 4 and 5:

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
    oldest_key, end = first_key(first_query, window), first_query + num_queries
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
    outs = [_attend_in_place(q[segment.rows], cache, segment) for segment in reads]
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(dtype)


def _attend_in_place(q: Tensor, cache: LayerCache, segment: Segment) -> Tensor:
    """Attend with one session's queries, (n, H, D).

    Runs are attended to one by one, and their results weighed by what each has of the sum under
    the softmax: nothing is copied where a window wraps around its ring.
    """
    queries = q.unflatten(1, (len(cache.keys), -1)).permute(1, 2, 0, 3)  # (K, G, n, D)
    q = queries.flatten(1, 2)  # (K, G n, D)
    mask = segment.mask
    if mask is not None and queries.shape[1] > 1:
        mask = mask.repeat(queries.shape[1], 1)  # (G n, L)
    outs, log_sums = [], []
    first = 0
    for run in segment.key_runs:
        keys, values = (x[:, run.start : run.stop] for x in (cache.keys, cache.values))
        part = None if mask is None else mask[:, first : first + len(run)]
        first += len(run)
        out, log_sum = _attend_dense(q, keys, values, part)
        outs.append(out)
        log_sums.append(log_sum)
    merged = outs[0] if len(outs) == 1 else _merged(outs, log_sums)
    return merged.view_as(queries).permute(2, 0, 1, 3).flatten(1, 2)


def _merged(outs: list[Tensor], log_sums: list[Tensor]) -> Tensor:
    """Weigh results of runs, (K, G n, D) each, by their parts of the sum, (K, G n) logarithms."""
    weights = torch.softmax(torch.stack(log_sums), dim=0)[..., None]  # (runs, K, G n, 1) float32
    # Where a run is masked as a whole its weight is 0, whatever its result is.
    merged = (torch.where(weights > 0, torch.stack(outs), 0) * weights).sum(dim=0)
    return merged.to(outs[0].dtype)


def _attend_dense(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend to one run of keys: (K, N, D), (K, L, D), (N, L).

    Returns:
        (K, N, D) outputs, and (K, N) float32 logarithms of the sums under the softmax.
    """
    scores = (q * q.shape[-1] ** -0.5 @ keys.transpose(1, 2)).float()
    if mask is not None:
        scores = scores.masked_fill(~mask, _NO_SCORE)
    return torch.softmax(scores, dim=-1).to(q.dtype) @ values, scores.logsumexp(dim=-1)
