"""Lay out flat batches for attention: who stands where, and which cache slots its rows read.

In: each session's part of a batch, with its block table. Out: the tensors that all layers of a
stack share. What rows read is laid out for the kernel for CPUs, or as a segment for each session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    reads: Windows | tuple[Segment, ...]
    if fits_windowed_attention(cache, transformer.num_heads):
        reads = windows(parts, transformer.window, transformer.num_heads // len(cache))
    else:
        reads = tuple(segments(parts, transformer.window, cache))
    return AttentionBatch(
        rope.rotations(_ids(positions, device)),
        _ids(slots, device),
        reads,
    )


def windows(parts: Sequence[Part], window: int, groups: int) -> Windows:
    """Make what the kernel reads: `groups` is the number of queries of a key/value head."""
    sessions = []
    for part in parts:
        part.table.check_held(part.first_key(window), part.end)
        frames = [
            (first_key(position, window), position, own)
            for own, position in enumerate(part.row_positions, part.first)
        ]
        sessions.append((part.table.ring, frames))
    return Windows.of(sessions, groups)


def segments(parts: Sequence[Part], window: int, cache: Tensor) -> Iterator[Segment]:
    """Make each part a segment, for PyTorch to attend from."""
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


def _ids(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
