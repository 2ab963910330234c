"""What the CPU kernel for attention reads of a flat batch: each row's window, in frames.

Legend: N rows of the flat batch, H heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from voxlite.engine.kernels.attention import MAX_HEAD_SIZE, MAX_QUERIES
from voxlite.engine.kernels.attention_tiles import VALUE_DIMS


@dataclass(frozen=True, slots=True)
class Windows:
    """What each row of a flat batch reads, in pieces of a few rows of one session."""

    frames: Tensor  # (N, 3) int64: READ
    pieces: Tensor  # (pieces, 3) int64: PIECE
    frames_per_block: int
    # The block tables, in whose memory the pieces point.
    tables: tuple[array[int], ...]

    @classmethod
    def of(
        cls,
        sessions: Sequence[tuple[array[int], int, Sequence[tuple[int, int, int]]]],
        frames_per_block: int,
        groups: int,
    ) -> Windows:
        """Lay out sessions. Their block tables must not change until the kernel has run.

        Args:
            sessions: of each the blocks that it holds, which of its stream's is the first of them,
                and the frames that its rows read: from the first up to the second, and the third,
                which isn't before the second. All from the first to the third are in the blocks.
            groups: G, the query heads of a key/value head.
        """
        per_piece = MAX_QUERIES // groups
        frames: list[tuple[int, int, int]] = []
        pieces: list[tuple[int, int, int]] = []
        for blocks, first_block, rows in sessions:
            stream = blocks.buffer_info()[0] - blocks.itemsize * first_block
            for first in range(0, len(rows), per_piece):
                pieces.append((len(frames) + first, min(per_piece, len(rows) - first), stream))
            frames.extend(rows)
        return cls(
            torch.tensor(frames),
            torch.tensor(pieces),
            frames_per_block,
            tuple(blocks for blocks, _, _ in sessions),
        )


def fits_windowed_attention(keys: Tensor, num_heads: int) -> bool:
    """Whether the kernel can read a cache like keys, (K, slots, D), for H heads."""
    num_kv_heads, _, head_size = keys.shape
    return (
        keys.device.type == "cpu"
        and keys.dtype is torch.bfloat16
        and keys.is_contiguous()
        and head_size % VALUE_DIMS == 0
        and head_size <= MAX_HEAD_SIZE
        and num_heads // num_kv_heads <= MAX_QUERIES
    )
