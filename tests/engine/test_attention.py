"""Paged attention: which keys are read, and that nothing else can be."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from voxlite.engine.attention_layout import Part, segments, windows
from voxlite.engine.block_pool import BlockPool
from voxlite.engine.kv_cache_manager import BlockTable, KVCacheSpec, SlidingWindowManager
from voxlite.engine.model.attention import LayerCache, Segment, paged_attention, window_mask
from voxlite.engine.model.windows import Windows, fits_windowed_attention

CPU = torch.device("cpu")
NUM_KV_HEADS, GROUPS, HEAD_SIZE = 2, 3, 64
Reads = Windows | tuple[Segment, ...]
MakeReads = Callable[[Sequence[Part], int, LayerCache, int], Reads]


def for_pytorch(parts: Sequence[Part], window: int, cache: LayerCache, num_heads: int) -> Reads:
    return tuple(segments(parts, window, cache.keys))


def for_the_kernel(parts: Sequence[Part], window: int, cache: LayerCache, num_heads: int) -> Reads:
    assert fits_windowed_attention(cache.keys, num_heads)
    return windows(parts, window, num_heads // len(cache.keys))


BOTH_WAYS = pytest.mark.parametrize("make_reads", [for_pytorch, for_the_kernel])


class Probe:
    """One session's cache whose values tell which keys a query attended to.

    All keys are 0, so that every key that is read weighs the same; the value of frame f has a 1 in
    dimension f of all heads' dimensions. Slots that were never written, or are freed, hold NaN.
    """

    def __init__(self, window: int, block_size: int, max_new_tokens: int, num_frames: int) -> None:
        spec = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=4,
            head_size=HEAD_SIZE,
            window_frames=window,
            block_pool_size=4,
        )
        num_blocks = spec.max_admission_blocks_per_request(max_new_tokens, None)
        self.manager = SlidingWindowManager(spec, BlockPool(num_blocks), num_blocks)
        random.Random(0).shuffle(self.manager.pool._free)
        self.manager.on_free = self._poison
        self.manager.admit(0)
        self.window, self.num_heads = window, -(-num_frames // HEAD_SIZE)
        shape = (self.num_heads, num_blocks * spec.frames_per_block, HEAD_SIZE)
        self.cache = LayerCache(*torch.full((2, *shape), torch.nan, dtype=torch.bfloat16))

    def attended(self, first_token: int, num_tokens: int, make_reads: MakeReads) -> list[list[int]]:
        """Write the next tokens' frames and list, for each of them, the frames it reads."""
        table = self.manager.make_room(0, first_token, num_tokens)
        first, count = 4 * first_token, 4 * num_tokens
        slots = torch.from_numpy(table.slots(first, first + count))
        values = torch.eye(self.num_heads * HEAD_SIZE)[first : first + count]
        values = values.unflatten(1, (self.num_heads, HEAD_SIZE))
        self.cache.write(slots, torch.zeros_like(values), values)
        parts = [Part(table, first, count)]
        reads = make_reads(parts, self.window, self.cache, self.num_heads)
        out = paged_attention(torch.randn(values.shape), self.cache, reads).flatten(1)
        assert not out.isnan().any()
        return [row.nonzero().flatten().tolist() for row in out]

    def _poison(self, block: int) -> None:
        per_block = self.manager.spec.frames_per_block
        slots = slice(block * per_block, (block + 1) * per_block)
        self.cache.keys[:, slots] = self.cache.values[:, slots] = torch.nan


@pytest.mark.parametrize(("window", "chunk_tokens"), [(749, 3), (750, 1), (750, 7), (751, 3)])
@BOTH_WAYS
def test_each_frame_reads_exactly_its_window(
    window: int, chunk_tokens: int, make_reads: MakeReads
) -> None:
    """Includes encoder frames 748..753 and 1498..1503, and every block edge up to 1520."""
    probe = Probe(window, block_size=16, max_new_tokens=chunk_tokens, num_frames=1540)
    for first_token in range(0, 380, chunk_tokens):
        for row, frames in enumerate(probe.attended(first_token, chunk_tokens, make_reads)):
            frame = 4 * first_token + row
            assert frames == list(range(max(0, frame - window + 1), frame + 1))


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 2, 3])
@BOTH_WAYS
def test_small_windows_and_blocks_read_exactly_their_window(
    block_size: int, chunk_tokens: int, make_reads: MakeReads
) -> None:
    probe = Probe(7, block_size=block_size, max_new_tokens=chunk_tokens, num_frames=200)
    for first_token in range(0, 45, chunk_tokens):
        for row, frames in enumerate(probe.attended(first_token, chunk_tokens, make_reads)):
            frame = 4 * first_token + row
            assert frames == list(range(max(0, frame - 6), frame + 1))


def test_the_window_mask_is_the_drawn_one() -> None:
    assert window_mask(2, 4, 2, 3, CPU).int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    mask = window_mask(2, 4, 2, 3, CPU, num_alternatives=1)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 0, 1]]


def test_a_mask_has_no_keys_that_were_given_up() -> None:
    assert window_mask(3, 4, 2, 3, CPU).int().tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_attention_over_scattered_slots_equals_dense_attention(rows: int) -> None:
    torch.manual_seed(0)
    num_keys = 12
    keys, values = torch.randn(2, NUM_KV_HEADS, num_keys, HEAD_SIZE)
    queries = torch.randn(rows, NUM_KV_HEADS * GROUPS, HEAD_SIZE)
    mask = window_mask(0, num_keys - rows, rows, 100, CPU)
    slots = torch.randperm(num_keys)
    scattered = LayerCache(torch.empty_like(keys), torch.empty_like(values))
    scattered.keys[:, slots], scattered.values[:, slots] = keys, values
    out = paged_attention(queries, scattered, [Segment(slice(0, rows), slots, mask)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, expected)


def test_sessions_in_one_batch_read_only_their_own_keys() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, NUM_KV_HEADS, 6, HEAD_SIZE)
    queries = torch.randn(2, NUM_KV_HEADS * GROUPS, HEAD_SIZE)
    segments = [
        Segment(slice(0, 1), torch.arange(3), None),
        Segment(slice(1, 2), torch.arange(3, 6), None),
    ]
    out = paged_attention(queries, LayerCache(keys, values), segments)
    others_changed = keys.clone()
    others_changed[:, 3:] = torch.nan
    alone = paged_attention(queries[:1], LayerCache(others_changed, values), segments[:1])
    torch.testing.assert_close(out[:1], alone)


SHAPES = [(8, 2, 64, 11), (32, 8, 128, 200), (4, 4, 64, 75), (28, 1, 64, 64), (6, 2, 128, 65)]
# Frames and alternatives of a session's rows, and where they start.
ROWS = [(1, 0), (4, 0), (4, 3), (2, 1), (39, 0)]
FIRSTS = [0, 1, 7, 50, 63, 64, 127, 999, 100_003]


FRAMES_PER_BLOCK = 6  # blocks begin in the middle of a chunk of the kernel's, and end in another


class Sessions:
    """Sessions of all ages in one cache, in which every slot that isn't held is no number.

    Neighbours in a stream lie anywhere in the pool, and some have given up a part of their window.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_size, self.window = shape
        generator = torch.Generator().manual_seed(0)
        rows = [(rows, first) for first in FIRSTS for rows in ROWS]
        blocks_each = -(-(self.window + 40) // FRAMES_PER_BLOCK) + 2
        free = torch.randperm(len(rows) * blocks_each, generator=generator).tolist()
        cache_shape = (*(2, self.num_kv_heads, len(free) * FRAMES_PER_BLOCK, self.head_size),)
        self.cache = LayerCache(*torch.full(cache_shape, torch.nan, dtype=dtype))
        self.parts = []
        for i, ((num_frames, num_alternatives), first) in enumerate(rows):
            table = BlockTable(FRAMES_PER_BLOCK)
            part = Part(table, first, num_frames, num_alternatives)
            oldest = part.first_key(first, self.window)
            table.first_block = oldest // FRAMES_PER_BLOCK + (i % 4 == 0 and first > 60)
            last_block = (part.end + num_alternatives - 1) // FRAMES_PER_BLOCK
            for _ in range(table.first_block, last_block + 1):
                table.blocks.append(free.pop())
            slots = table.slots(part.first_key(first, self.window), part.end)
            held = torch.randn(
                (2, self.num_kv_heads, len(slots), self.head_size), generator=generator
            )
            self.cache.keys[:, slots], self.cache.values[:, slots] = held.to(dtype)
            self.parts.append(part)
        num_rows = sum(part.num_rows for part in self.parts)
        self.queries = 2 * torch.randn(
            (num_rows, self.num_heads, self.head_size), generator=generator
        )

    def attend(self) -> torch.Tensor:
        reads = for_the_kernel(self.parts, self.window, self.cache, self.num_heads)
        return paged_attention(self.queries, self.cache, reads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_what_float64_does(shape: tuple[int, int, int, int]) -> None:
    sessions = Sessions(shape, torch.bfloat16)
    assert len(sessions.parts) > 30
    cache = LayerCache(sessions.cache.keys.double(), sessions.cache.values.double())
    reads = for_pytorch(sessions.parts, sessions.window, cache, sessions.num_heads)
    expected = paged_attention(sessions.queries.double(), cache, reads)
    assert not expected.isnan().any()
    out = sessions.attend()
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_row_of_the_kernel_knows_of_no_others(shape: tuple[int, int, int, int]) -> None:
    """Neither of other sessions nor of how many rows its own has beside it."""
    sessions = Sessions(shape, torch.bfloat16)
    together, row = sessions.attend(), 0
    for part in sessions.parts:
        cut = [
            Part(part.table, first, 1) for first in range(part.first, part.first + part.num_frames)
        ]
        for first, alone in [(row, [part]), (row, cut)]:
            count = sum(part.num_rows for part in alone)
            reads = for_the_kernel(alone, sessions.window, sessions.cache, sessions.num_heads)
            out = paged_attention(sessions.queries[first : first + count], sessions.cache, reads)
            assert torch.equal(out, together[first : first + count])
        row += part.num_rows


def test_the_kernel_takes_queries_of_any_dtype_and_size() -> None:
    sessions = Sessions(SHAPES[0], torch.bfloat16)
    for size in (1e-3, 1.0, 100.0):
        sessions.queries = (sessions.queries * size).bfloat16()
        out = sessions.attend()
        assert out.dtype is torch.bfloat16
        assert out.isfinite().all()
        sessions.queries = sessions.queries.float()
        torch.testing.assert_close(out.float(), sessions.attend(), rtol=1e-2, atol=1e-2)


def test_what_is_no_number_stays_with_its_row() -> None:
    sessions = Sessions(SHAPES[0], torch.bfloat16)
    expected = sessions.attend()
    sessions.queries[3, 2, 5] = torch.nan
    out = sessions.attend()
    assert out[3, 2].isnan().all()
    out[3, 2] = expected[3, 2]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("dtype", "head_size", "is_kernel"),
    [
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 16, False),
        (torch.bfloat16, 192, False),
        (torch.float32, 64, False),
    ],
    ids=str,
)
def test_the_kernel_is_for_bfloat16_and_whole_registers(
    dtype: torch.dtype, head_size: int, is_kernel: bool
) -> None:
    keys = torch.zeros((2, 16, head_size), dtype=dtype)
    assert fits_windowed_attention(keys, 8) is is_kernel
    assert not fits_windowed_attention(keys, 58)  # 29 queries of a key/value head


@pytest.mark.parametrize("num_masked", [61, 64, 157])
def test_keys_that_a_row_does_not_read_leave_no_trace(num_masked: int) -> None:
    """On CPUs with AMX a row of NaN beside others made them NaN, too."""
    generator = torch.Generator().manual_seed(0)
    cache = LayerCache(*torch.randn((2, 2, 512, 16), generator=generator).bfloat16())
    queries = torch.randn((192, 2, 16), generator=generator).bfloat16()
    mask = torch.ones((192, num_masked + 64), dtype=torch.bool)
    mask[100:, :num_masked] = False
    slots = torch.randperm(512, generator=generator)[: num_masked + 64]
    out = paged_attention(queries, cache, [Segment(slice(0, 192), slots, mask)])
    read = Segment(slice(0, 92), slots[num_masked:], None)
    only = paged_attention(queries[100:], cache, [read])
    assert out.isfinite().all()
    torch.testing.assert_close(out[100:], only, rtol=0, atol=0.02)


def test_the_kernel_changes_nothing_that_describes_the_windows() -> None:
    """FAULTS 22, for the bfloat16 path: block tables and windows are the same after a call."""
    sessions = Sessions(SHAPES[0], torch.bfloat16)
    reads = windows(sessions.parts, sessions.window, sessions.num_heads // sessions.num_kv_heads)
    before = [reads.frames.clone(), reads.pieces.clone()]
    tables = [list(part.table.blocks) for part in sessions.parts]
    cache = [sessions.cache.keys.clone(), sessions.cache.values.clone()]
    first = paged_attention(sessions.queries, sessions.cache, reads)
    assert torch.equal(paged_attention(sessions.queries, sessions.cache, reads), first)
    assert torch.equal(reads.frames, before[0]) and torch.equal(reads.pieces, before[1])
    assert [list(part.table.blocks) for part in sessions.parts] == tables
    for tensor, copy in zip((sessions.cache.keys, sessions.cache.values), cache, strict=True):
        assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16))
