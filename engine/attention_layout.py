"""Lay out flat batches for attention: who stands where, and which cache slots its rows read.

In: each session's part of a batch, with its block table. Out: the tensors that all layers of a
stack share. Large windows become a segment each; small ones are copied, and those of neighbours
with as many rows become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.config import TransformerConfig
from engine.kv_cache_manager import BlockTable
from engine.model.attention import (
    AttentionBatch,
    GatheredSegments,
    Segment,
    first_key,
    window_mask,
    window_masks,
)
from engine.model.layers import Rope

# A window that is copied has keys of at most so many numbers in one layer: 256 KiB in bfloat16.
# Up to there a copy takes less time than a session's own calls do.
_MAX_GATHERED_NUMBERS: Final = 2**17


class Part(NamedTuple):
    """One session's part of a flat batch: frames [first, first + num_frames), and alternatives to
    the last of them (see `window_mask`).
    """

    table: BlockTable
    first: int
    num_frames: int
    num_alternatives: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_frames + self.num_alternatives

    @property
    def end(self) -> int:
        """The end of its rows' slots in the stream."""
        return self.first + self.num_rows

    @property
    def row_positions(self) -> list[int]:
        end = self.first + self.num_frames
        return [*range(self.first, end), *range(end - self.num_alternatives, end)]

    def first_key(self, window: int) -> int:
        return first_key(self.first, window)


def lay_out(
    parts: Sequence[Part], transformer: TransformerConfig, rope: Rope, cache: Tensor
) -> AttentionBatch:
    """Lay out a flat batch of one stack.

    Args:
        cache: a tensor of its KV cache, for dtype and device.
    """
    device = cache.device
    positions = [position for part in parts for position in part.row_positions]
    slots = [
        slot for part in parts for run in part.table.slot_runs(part.first, part.end) for slot in run
    ]
    num_numbers = transformer.window * transformer.num_kv_heads * transformer.head_size
    make_segments = gathered_segments if num_numbers <= _MAX_GATHERED_NUMBERS else segments
    return AttentionBatch(
        rope.rotations(_ids(positions, device)),
        _ids(slots, device),
        tuple(make_segments(parts, transformer.window, cache)),
    )


def segments(parts: Sequence[Part], window: int, cache: Tensor) -> Iterator[Segment]:
    """Make each part a segment, whose window is read in place."""
    first_row = 0
    for part in parts:
        rows = slice(first_row, first_row + part.num_rows)
        first_row = rows.stop
        key_runs = tuple(part.table.slot_runs(part.first_key(window), part.end))
        mask = None
        if part.num_rows > 1:
            mask = window_mask(
                part.first,
                part.num_frames,
                window,
                cache.device,
                num_alternatives=part.num_alternatives,
            )
        yield Segment(rows, key_runs, mask)


def gathered_segments(
    parts: Sequence[Part], window: int, cache: Tensor
) -> Iterator[GatheredSegments]:
    """Take neighbouring parts of as many rows together, and copy their windows.

    Window 3, one row each, at positions 1 and 8; behind the shorter window stands its last key:

        session 0    key 0    1    1
                         x    x    .
        session 1    key 6    7    8
                         x    x    x
    """
    device, first_row = cache.device, 0
    for (num_frames, num_alternatives), neighbours in groupby(parts, lambda part: part[2:]):
        group = list(neighbours)
        for part in group:
            part.table.check_held(part.first_key(window), part.end)
        rows = slice(first_row, first_row + len(group) * group[0].num_rows)
        first_row = rows.stop
        num_keys = max(part.end - part.first_key(window) for part in group)
        first_keys = _ids([part.first_key(window) for part in group], device)[:, None]
        last_keys = _ids([part.end - 1 for part in group], device)[:, None]
        rings = [part.table.ring for part in group]
        ring_starts = _ids([ring.start for ring in rings], device)[:, None]
        ring_lengths = _ids([len(ring) for ring in rings], device)[:, None]
        keys = (first_keys + torch.arange(num_keys, device=device)).minimum(last_keys)  # (S, L)
        mask = window_masks(
            _ids([part.first for part in group], device),
            num_frames,
            num_keys - num_alternatives,
            window,
            num_alternatives,
        )
        bias = cache.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        yield GatheredSegments(rows, (ring_starts + keys % ring_lengths).flatten(), bias)


def _ids(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
