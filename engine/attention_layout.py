"""Lay out flat batches for attention: who stands where, and which cache slots its rows read.

In: each session's part of a batch, with its block table. Out: the tensors that all layers of a
stack share. What rows read is laid out for the kernel for CPUs, or as a segment for each session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from voxlite.engine.config import TransformerConfig
from voxlite.engine.kv_cache_manager import BlockTable
from voxlite.engine.model.attention import AttentionBatch, Segment, first_key, window_mask
from voxlite.engine.model.layers import Rope
from voxlite.engine.model.windows import Windows, fits_windowed_attention


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

    def first_key(self, position: int, window: int) -> int:
        """Return the oldest position that the query at `position` reads."""
        return max(first_key(position, window), self.table.first_frame)


def lay_out(
    parts: Sequence[Part], transformer: TransformerConfig, rope: Rope, cache: Tensor
) -> AttentionBatch:
    """Lay out a flat batch of one stack.

    Args:
        cache: a tensor of its KV cache, for dtype and device.
    """
    device = cache.device
    positions = [position for part in parts for position in part.row_positions]
    slots = np.concatenate([part.table.slots(part.first, part.end) for part in parts])
    reads: Windows | tuple[Segment, ...]
    if fits_windowed_attention(cache, transformer.num_heads):
        reads = windows(parts, transformer.window, transformer.num_heads // len(cache))
    else:
        reads = tuple(segments(parts, transformer.window, cache))
    return AttentionBatch(
        rope.rotations(torch.tensor(positions, device=device)),
        torch.from_numpy(slots).to(device),
        reads,
    )


def windows(parts: Sequence[Part], window: int, groups: int) -> Windows:
    """Make what the kernel reads: `groups` is the number of queries of a key/value head."""
    sessions = []
    for part in parts:
        frames = [
            (part.first_key(position, window), position, own)
            for own, position in enumerate(part.row_positions, part.first)
        ]
        part.table.check_held(frames[0][0], part.end)
        sessions.append((part.table.blocks, part.table.first_block, frames))
    return Windows.of(sessions, parts[0].table.frames_per_block, groups)


def segments(parts: Sequence[Part], window: int, cache: Tensor) -> Iterator[Segment]:
    """Make each part a segment, for PyTorch to attend from."""
    first_row = 0
    for part in parts:
        rows = slice(first_row, first_row + part.num_rows)
        first_row = rows.stop
        oldest_key = part.first_key(part.first, window)
        mask = None
        if part.num_rows > 1:
            mask = window_mask(
                oldest_key,
                part.first,
                part.num_frames,
                window,
                cache.device,
                num_alternatives=part.num_alternatives,
            )
        slots = torch.from_numpy(part.table.slots(oldest_key, part.end))
        yield Segment(rows, slots.to(cache.device), mask)
