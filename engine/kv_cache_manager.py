"""The paged sliding-window KV cache as bookkeeping: specs, block tables, admission by reservation.

In: sessions, and the token positions that they are about to compute. Out: block tables that say in
which cache slots those and all earlier positions in the window lie. No torch here; the tensors are
in `model/attention.py`. Everything is counted in tokens (80 ms), for the encoder and the decoder
alike: an encoder token is a pooled entry of `block_pool_size` encoder frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from voxlite.engine.block_pool import BlockPool
from voxlite.engine.config import TransformerConfig, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Shape and window of one stack's KV cache.

    A token stores `block_pool_size` positions (frames): 4 in the encoder, 1 in the decoder. The
    window is the model's own, in frames and including the query, so an encoder window of 750 means
    that 188 past tokens are needed beside the current one:

        encoder frame    4n-752 4n-751 4n-750 [4n-749| ... | 4n 4n+1 4n+2 4n+3]
        token            ----------- n-188 ----------| ... | ------- n -------
        Frame 4n-749, the last of token n-188, is read by frame 4n alone; yet it must be resident.
    """

    block_size: int
    num_kv_heads: int  # of one token: block_pool_size times those of one frame
    head_size: int
    window_frames: int
    block_pool_size: int

    @property
    def sliding_window(self) -> int:
        """The window in tokens, rounded up: cdiv(750, 4) = 188."""
        return cdiv(self.window_frames, self.block_pool_size)

    @property
    def past_tokens(self) -> int:
        """Tokens before the current one that its frames may still read: cdiv(749, 4) = 188."""
        return cdiv(self.window_frames - 1, self.block_pool_size)

    @property
    def frames_per_block(self) -> int:
        return self.block_size * self.block_pool_size

    @property
    def elements_per_block(self) -> int:
        """Numbers stored in a block by one layer, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size

    def first_needed_token(self, position: int) -> int:
        """Return the oldest token that is read while computing the token at `position`."""
        return max(0, position - self.past_tokens)

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int | None
    ) -> int:
        """Return the most blocks that a session can hold at once, at the worst alignment.

        A step that computes n tokens reads and writes past_tokens + n consecutive ones. The worst
        start is the last token of a block: 4B encoder, n = 1: 1 + cdiv(188 + 1 - 1, 16) = 13.

        Args:
            max_num_batched_tokens: most tokens computed in one step.
            max_model_len: most tokens a session may have; None where it is unlimited.
        """
        resident_tokens = self.past_tokens + max_num_batched_tokens
        blocks = 1 + cdiv(resident_tokens - 1, self.block_size)
        if max_model_len is None:
            return blocks
        return min(blocks, cdiv(max_model_len, self.block_size))


def make_kv_cache_spec(
    transformer: TransformerConfig, block_size: int, block_pool_size: int = 1
) -> KVCacheSpec:
    """Make the spec of a stack whose tokens pool `block_pool_size` positions."""
    return KVCacheSpec(
        block_size=block_size,
        num_kv_heads=block_pool_size * transformer.num_kv_heads,
        head_size=transformer.head_size,
        window_frames=transformer.window,
        block_pool_size=block_pool_size,
    )


@dataclass(slots=True)
class BlockTable:
    """Where a session's blocks lie: block b of its stream is `reservation[b % len(reservation)]`.

    Held are the blocks [first_block, end_block) of the stream. They use the reservation as a ring,
    and so lie in one run of neighbours, or in two where the ring wraps:

        reservation 40..44, held [3, 7)      stream    3  4  5  6
                                             pool     43 44 40 41   -> runs [43, 45), [40, 42)
    """

    reservation: range
    frames_per_block: int
    first_block: int = 0
    end_block: int = 0

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block

    @property
    def ring(self) -> range:
        """The cache slots of the reservation: frame f of the stream lies in ring[f % len(ring)]."""
        reservation, per_block = self.reservation, self.frames_per_block
        return range(reservation.start * per_block, reservation.stop * per_block)

    def check_held(self, first_frame: int, end_frame: int) -> None:
        """Raise AssertionError unless the frames [first_frame, end_frame) have their slots."""
        assert self.first_block * self.frames_per_block <= first_frame
        assert end_frame <= self.end_block * self.frames_per_block

    def block_runs(self, first_block: int, end_block: int) -> list[range]:
        """Return the pool's block ids of stream blocks [first_block, end_block), as runs."""
        return self._runs(first_block, end_block, blocks_to_units=1)

    def slot_runs(self, first_frame: int, end_frame: int) -> list[range]:
        """Return the cache slots of the stream's frames [first_frame, end_frame), as runs.

        The cache of a layer has `frames_per_block` slots for each block of the pool.
        """
        self.check_held(first_frame, end_frame)
        return self._runs(first_frame, end_frame, blocks_to_units=self.frames_per_block)

    def slot(self, frame: int) -> int:
        """Return the cache slot of one of the stream's frames."""
        return self.slot_runs(frame, frame + 1)[0].start

    def _runs(self, first: int, end: int, blocks_to_units: int) -> list[range]:
        ring = len(self.reservation) * blocks_to_units
        offset = self.reservation.start * blocks_to_units
        runs = []
        while first < end:
            num = min(end - first, ring - first % ring)
            runs.append(range(offset + first % ring, offset + first % ring + num))
            first += num
        return runs


def _ignore(blocks: range) -> None:
    del blocks


@dataclass(slots=True)
class SlidingWindowManager:
    """Own the block tables of one stack: make room ahead of a step, free what left the window.

    `on_free` is told each run of blocks that is no longer held.
    """

    spec: KVCacheSpec
    pool: BlockPool
    blocks_per_session: int
    on_free: Callable[[range], None] = _ignore
    tables: dict[int, BlockTable] = field(default_factory=dict)

    def admit(self, session_id: int) -> None:
        """Reserve all that the session can ever hold, so that it never waits for another's blocks.

        Raises:
            Overloaded: the pool has no room for another session.
        """
        assert session_id not in self.tables
        reservation = self.pool.reserve(self.blocks_per_session)
        self.tables[session_id] = BlockTable(reservation, self.spec.frames_per_block)

    def make_room(self, session_id: int, position: int, num_tokens: int) -> BlockTable:
        """Free what the tokens [position, position + num_tokens) don't read; hold what they write.

        Returns the session's own table: valid until the next call for this session.
        """
        table = self.tables[session_id]
        first_block = self.spec.first_needed_token(position) // self.spec.block_size
        self._free_until(table, first_block)
        end_block = cdiv(position + num_tokens, self.spec.block_size)
        for run in table.block_runs(table.end_block, end_block):
            self.pool.allocate(run)
        table.end_block = max(table.end_block, end_block)
        return table

    def reset(self, session_id: int) -> None:
        """Free all blocks of a session, which starts again at position 0 and stays admitted."""
        table = self.tables[session_id]
        self._free_until(table, table.end_block)
        table.first_block = table.end_block = 0

    def release(self, session_id: int) -> None:
        """Free all blocks of a session and give back its reservation."""
        self.reset(session_id)
        self.pool.cancel(self.tables.pop(session_id).reservation)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once."""
        pool = self.pool
        held = [
            block
            for table in self.tables.values()
            for run in table.block_runs(table.first_block, table.end_block)
            for block in run
        ]
        assert len(held) == len(set(held)) == pool.num_held_blocks, (held, pool.num_held_blocks)
        assert all(pool.is_held(block) for block in held)
        assert pool.num_blocks == (
            pool.num_free_blocks + pool.num_reserved_blocks + pool.num_held_blocks
        )
        promised = len(self.tables) * self.blocks_per_session
        assert pool.num_reserved_blocks + pool.num_held_blocks == promised
        assert all(t.num_blocks <= self.blocks_per_session for t in self.tables.values())

    def _free_until(self, table: BlockTable, first_block: int) -> None:
        first_block = min(first_block, table.end_block)
        for run in table.block_runs(table.first_block, first_block):
            self.pool.free(run)
            self.on_free(run)
        table.first_block = max(table.first_block, first_block)


@dataclass(frozen=True, slots=True)
class KVCacheManager:
    """Admit sessions to both stacks' caches together, or to neither."""

    encoder: SlidingWindowManager
    decoder: SlidingWindowManager

    def admit(self, session_id: int) -> None:
        """Reserve a session's blocks.

        Raises:
            Overloaded: one of the pools has no room; nothing is reserved then.
        """
        self.encoder.admit(session_id)
        try:
            self.decoder.admit(session_id)
        except BaseException:
            self.encoder.release(session_id)
            raise

    def reset(self, session_id: int) -> None:
        self.encoder.reset(session_id)
        self.decoder.reset(session_id)

    def release(self, session_id: int) -> None:
        self.encoder.release(session_id)
        self.decoder.release(session_id)

    def check_integrity(self) -> None:
        self.encoder.check_integrity()
        self.decoder.check_integrity()
