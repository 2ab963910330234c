"""The paged sliding-window KV cache as bookkeeping: specs, block tables, who gives up what.

In: sessions, and the token positions that they are about to compute. Out: block tables that say in
which cache slots those and all earlier positions in the window lie. No torch here; the tensors are
in `model/attention.py`. Everything is counted in tokens (80 ms), for the encoder and the decoder
alike: an encoder token is a pooled entry of `block_pool_size` encoder frames.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.block_pool import BlockPool
from voxlite.engine.config import TransformerConfig, cdiv
from voxlite.engine.errors import Overloaded

logger = logging.getLogger(__name__)


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
    """Where a session's keys and values lie: block b of its stream is `blocks[b - first_block]`.

    It grows at the end, a block at a time, and drops blocks from its front:

        stream       3  4  5  6
        pool        41  7 88 12    -> first_block = 3, blocks = [41, 7, 88, 12]
    """

    frames_per_block: int
    first_block: int = 0
    # Ids in the pool, as int64 in one stretch of memory: a kernel reads them where they are.
    blocks: array[int] = field(default_factory=lambda: array("q"))
    num_shared: int = 0  # of the first blocks, which others hold too
    num_given_up: int = 0

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.blocks)

    @property
    def num_own(self) -> int:
        """Blocks that nobody else holds."""
        return len(self.blocks) - self.num_shared

    @property
    def first_frame(self) -> int:
        """The oldest frame whose keys and values are here."""
        return self.first_block * self.frames_per_block

    def slots(self, first_frame: int, end_frame: int) -> NDArray[np.int64]:
        """Return the cache slots of the stream's frames [first_frame, end_frame).

        The cache of a layer has `frames_per_block` slots for each block of the pool.
        """
        per_block = self.frames_per_block
        self.check_held(first_frame, end_frame)
        frames = np.arange(first_frame - self.first_frame, end_frame - self.first_frame)
        blocks = np.array(self.blocks)[frames // per_block]
        slots: NDArray[np.int64] = blocks * per_block + frames % per_block
        return slots

    def check_held(self, first_frame: int, end_frame: int) -> None:
        """Raise AssertionError unless the frames [first_frame, end_frame) have their slots."""
        assert self.first_frame <= first_frame
        assert end_frame <= self.end_block * self.frames_per_block


def _ignore(block: int) -> None:
    del block


@dataclass(slots=True)
class SlidingWindowManager:
    """Own the block tables of one stack: make room ahead of a step, free what left the window.

    Every session is guaranteed `blocks_per_session` blocks; what the pool has beyond goes to those
    that need it. Where that isn't whole windows for all, and the pool is empty, the session that
    holds most gives up its oldest block, and reads a shorter window until it has grown again.
    """

    spec: KVCacheSpec
    pool: BlockPool
    blocks_per_session: int
    # Told each block that nobody holds any longer.
    on_free: Callable[[int], None] = _ignore
    tables: dict[int, BlockTable] = field(default_factory=dict)
    # Starts that sessions share, kept for good: block tables by whatever tells them apart.
    prefixes: dict[int, BlockTable] = field(default_factory=dict)
    num_given_up_blocks: int = 0

    @property
    def num_prefix_blocks(self) -> int:
        return sum(len(prefix.blocks) for prefix in self.prefixes.values())

    def admit(self, session_id: int) -> None:
        """Make an empty block table.

        Raises:
            Overloaded: the pool can't guarantee another session its blocks.
        """
        assert session_id not in self.tables
        num_blocks = self.pool.num_blocks - self.num_prefix_blocks
        if (len(self.tables) + 1) * self.blocks_per_session > num_blocks:
            raise Overloaded(
                f"{len(self.tables)} sessions are guaranteed {self.blocks_per_session} KV-cache "
                f"blocks each, of {num_blocks}: there is no room for another"
            )
        self.tables[session_id] = BlockTable(self.spec.frames_per_block)

    def make_room(self, session_id: int, position: int, num_tokens: int) -> BlockTable:
        """Free what the tokens [position, position + num_tokens) don't read; hold what they write.

        Other sessions' tables may lose their oldest block: what is to be read is laid out when room
        has been made for all sessions of a batch.

        Returns the session's own table: valid until the next call for this session.
        """
        table = self.tables[session_id]
        self._free_until(table, self.spec.first_needed_token(position) // self.spec.block_size)
        assert position >= (table.first_block + table.num_shared) * self.spec.block_size
        self._extend(table, position + num_tokens)
        return table

    def prefix(self, key: int, num_tokens: int) -> BlockTable:
        """Return a shared start's block table, made at the first call."""
        if key not in self.prefixes:
            self.prefixes[key] = BlockTable(self.spec.frames_per_block)
            self._extend(self.prefixes[key], num_tokens)
        return self.prefixes[key]

    def start_behind(self, session_id: int, prefix: BlockTable, num_tokens: int) -> BlockTable:
        """Begin a session's empty table with the `num_tokens` tokens of a prefix.

        Whole blocks are shared. The last one, if it isn't full, is the session's own, and still to
        be copied: the frames from `num_shared` blocks on.
        """
        table = self.tables[session_id]
        assert table.end_block == 0
        table.num_shared = num_tokens // self.spec.block_size
        for block in prefix.blocks[: table.num_shared]:
            self.pool.share(block)
            table.blocks.append(block)
        self._extend(table, num_tokens)
        return table

    def reset(self, session_id: int) -> None:
        """Free all blocks of a session, which starts again at position 0 and stays admitted."""
        table = self.tables[session_id]
        self._free_until(table, table.end_block)
        table.first_block = 0

    def release(self, session_id: int) -> None:
        """Free all blocks of a session, and forget it."""
        self.reset(session_id)
        del self.tables[session_id]

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is held as often as tables name it."""
        self.pool.check_integrity()
        tables = [*self.tables.values(), *self.prefixes.values()]
        counts = Counter(block for table in tables for block in table.blocks)
        assert len(counts) == self.pool.num_held_blocks
        for block, count in counts.items():
            assert self.pool.ref_count(block) == count, (block, count)
        for table in self.tables.values():
            own = table.blocks[table.num_shared :]
            assert all(counts[block] == 1 for block in own), own

    def _extend(self, table: BlockTable, end_token: int) -> None:
        end_block = cdiv(end_token, self.spec.block_size)
        while table.end_block < end_block:
            while (block := self.pool.allocate()) is None:
                self._take_from_longest(table)
            table.blocks.append(block)

    def _take_from_longest(self, needy: BlockTable) -> None:
        """Make the session that holds most give up its oldest block.

        There is one beyond what it is guaranteed, or else all hold just that, and the needy one
        moves on in its own window.
        """
        longest = max(self.tables.values(), key=lambda table: table.num_own)
        if longest.num_own <= self.blocks_per_session:
            longest = needy
        assert longest.num_own >= self.blocks_per_session
        if longest.num_given_up == 0:
            session_id = next(i for i, table in self.tables.items() if table is longest)
            logger.warning(
                "session %d reads a shorter window from here on, now %d tokens: all %d KV-cache "
                "blocks are in use; fewer sessions (--max-num-seqs) or more memory "
                "(--kv-cache-gib) keep windows whole",
                session_id,
                (len(longest.blocks) - 1) * self.spec.block_size,
                self.pool.num_blocks,
            )
        longest.num_given_up += 1
        self.num_given_up_blocks += 1
        self._free_until(longest, longest.first_block + 1)

    def _free_until(self, table: BlockTable, first_block: int) -> None:
        num_blocks = max(0, min(first_block - table.first_block, len(table.blocks)))
        for block in table.blocks[:num_blocks]:
            if self.pool.free(block):
                self.on_free(block)
        del table.blocks[:num_blocks]
        table.first_block += num_blocks
        table.num_shared = max(0, table.num_shared - num_blocks)


@dataclass(frozen=True, slots=True)
class KVCacheManager:
    """The caches of both stacks, which admit a session together or not at all."""

    encoder: SlidingWindowManager
    decoder: SlidingWindowManager

    def admit(self, session_id: int) -> None:
        """Make a session's block tables.

        Raises:
            Overloaded: one of the pools has no room; nothing changes then.
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
