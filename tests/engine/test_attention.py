"""Paged attention: which keys are read, and that nothing else can be."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from engine.attention_layout import Part, gathered_segments, segments
from engine.block_pool import BlockPool
from engine.kv_cache_manager import KVCacheSpec, SlidingWindowManager
from engine.model import attention
from engine.model.attention import (
    GatheredSegments,
    LayerCache,
    Segment,
    paged_attention,
    window_mask,
)

CPU = torch.device("cpu")
MakeSegments = Callable[
    [Sequence[Part], int, torch.Tensor], Iterator[Segment] | Iterator[GatheredSegments]
]
IN_PLACE_OR_GATHERED = pytest.mark.parametrize("make_segments", [segments, gathered_segments])
NUM_KV_HEADS, GROUPS, HEAD_SIZE = 2, 3, 4


class Probe:
    """One session's cache whose values tell which keys a query attended to.

    All keys are 0, so that every key that is read weighs the same; the value of frame f has a 1 in
    the dimension f - base. Slots that were never written, or are freed, hold NaN.
    """

    def __init__(self, window: int, block_size: int, max_new_tokens: int, num_frames: int) -> None:
        spec = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=4,
            head_size=num_frames,
            window_frames=window,
            block_pool_size=4,
        )
        num_blocks = spec.max_admission_blocks_per_request(max_new_tokens, None)
        self.manager = SlidingWindowManager(spec, BlockPool(num_blocks), num_blocks)
        self.manager.on_free = self._poison
        self.manager.admit(0)
        self.window, self.num_frames = window, num_frames
        shape = (1, num_blocks * spec.frames_per_block, num_frames)
        self.cache = LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))

    def attended(
        self, first_token: int, num_tokens: int, make_segments: MakeSegments
    ) -> list[list[int]]:
        """Write the next tokens' frames and list, for each of them, the frames it reads."""
        table = self.manager.make_room(0, first_token, num_tokens)
        first, count = 4 * first_token, 4 * num_tokens
        slots = [slot for run in table.slot_runs(first, first + count) for slot in run]
        values = torch.eye(self.num_frames)[first : first + count, None]  # (frames, 1, D)
        self.cache.write(torch.tensor(slots), torch.zeros_like(values), values)
        layout = list(make_segments([Part(table, first, count)], self.window, self.cache.keys))
        queries = torch.randn(count, 1, self.num_frames)
        out = paged_attention(queries, self.cache, layout)
        assert not out.isnan().any()
        return [out[row, 0].nonzero().flatten().tolist() for row in range(count)]

    def _poison(self, blocks: range) -> None:
        per_block = self.manager.spec.frames_per_block
        slots = slice(blocks.start * per_block, blocks.stop * per_block)
        self.cache.keys[:, slots] = self.cache.values[:, slots] = torch.nan


@pytest.mark.parametrize(("window", "chunk_tokens"), [(749, 3), (750, 1), (750, 7), (751, 3)])
@IN_PLACE_OR_GATHERED
def test_each_frame_reads_exactly_its_window(
    window: int, chunk_tokens: int, make_segments: MakeSegments
) -> None:
    """Includes encoder frames 748..753 and 1498..1503, and every block edge up to 1520."""
    probe = Probe(window, block_size=16, max_new_tokens=chunk_tokens, num_frames=1540)
    for first_token in range(0, 380, chunk_tokens):
        for row, frames in enumerate(probe.attended(first_token, chunk_tokens, make_segments)):
            frame = 4 * first_token + row
            assert frames == list(range(max(0, frame - window + 1), frame + 1))


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 2, 3])
@IN_PLACE_OR_GATHERED
def test_small_windows_and_blocks_read_exactly_their_window(
    block_size: int, chunk_tokens: int, make_segments: MakeSegments
) -> None:
    probe = Probe(7, block_size=block_size, max_new_tokens=chunk_tokens, num_frames=200)
    for first_token in range(0, 45, chunk_tokens):
        for row, frames in enumerate(probe.attended(first_token, chunk_tokens, make_segments)):
            frame = 4 * first_token + row
            assert frames == list(range(max(0, frame - 6), frame + 1))


def test_the_window_mask_is_the_drawn_one() -> None:
    assert window_mask(4, 2, 3, CPU).int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    mask = window_mask(4, 2, 3, CPU, num_alternatives=1)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 0, 1]]


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("kernel", ["_attend_flash", "_attend_dense"])
def test_attention_over_two_runs_equals_dense_attention_over_one(
    kernel: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 9 rows, the first of them read nothing of the second run."""
    monkeypatch.setattr(attention, "_attend_flash", getattr(attention, kernel))
    torch.manual_seed(0)
    num_keys = 12
    keys, values = torch.randn(2, NUM_KV_HEADS, num_keys, HEAD_SIZE)
    queries = torch.randn(rows, NUM_KV_HEADS * GROUPS, HEAD_SIZE)
    mask = window_mask(num_keys - rows, rows, 100, CPU)
    moved = LayerCache(keys.roll(4, dims=1), values.roll(4, dims=1))  # frame f lies in slot f + 4
    out = paged_attention(queries, moved, [Segment(slice(0, rows), (range(4, 12), range(4)), mask)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, expected)


def test_sessions_in_one_batch_read_only_their_own_keys() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, NUM_KV_HEADS, 6, HEAD_SIZE)
    queries = torch.randn(2, NUM_KV_HEADS * GROUPS, HEAD_SIZE)
    segments = [
        Segment(slice(0, 1), (range(3),), None),
        Segment(slice(1, 2), (range(3, 6),), None),
    ]
    out = paged_attention(queries, LayerCache(keys, values), segments)
    others_changed = keys.clone()
    others_changed[:, 3:] = torch.nan
    alone = paged_attention(queries[:1], LayerCache(others_changed, values), segments[:1])
    torch.testing.assert_close(out[:1], alone)


def test_gathered_windows_give_what_windows_read_in_place_do() -> None:
    """Sessions of ages 0 to 1,000, some with several rows, some with alternatives, some wrapped."""
    torch.manual_seed(0)
    window, block_size, most_rows = 11, 2, 7
    spec = KVCacheSpec(
        block_size=block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        window_frames=window,
        block_pool_size=1,
    )
    rows = [(1, 0)] * 5 + [(4, 0)] * 4 + [(4, 3)] * 3 + [(1, 0)]
    firsts = [0, 3, 50, 999, 1_000, 0, 7, 8, 1_000, 2, 13, 500, 9]
    num_blocks = spec.max_admission_blocks_per_request(most_rows, None)
    manager = SlidingWindowManager(spec, BlockPool(len(rows) * num_blocks), num_blocks)
    shape = (NUM_KV_HEADS, len(rows) * num_blocks * block_size, HEAD_SIZE)
    cache = LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    parts = []
    for session_id, (first, (num_frames, num_alternatives)) in enumerate(
        zip(firsts, rows, strict=True)
    ):
        manager.admit(session_id)
        for position in range(first):
            manager.make_room(session_id, position, 1)
        table = manager.make_room(session_id, first, num_frames + num_alternatives)
        part = Part(table, first, num_frames, num_alternatives)
        parts.append(part)
        slots = [s for run in table.slot_runs(part.first_key(window), part.end) for s in run]
        for x in (cache.keys, cache.values):
            x[:, slots] = torch.randn(NUM_KV_HEADS, len(slots), HEAD_SIZE)
    queries = torch.randn(sum(map(sum, rows)), NUM_KV_HEADS * GROUPS, HEAD_SIZE)
    in_place = paged_attention(queries, cache, list(segments(parts, window, cache.keys)))
    gathered = list(gathered_segments(parts, window, cache.keys))
    assert len(gathered) == 4
    torch.testing.assert_close(paged_attention(queries, cache, gathered), in_place)
    assert not in_place.isnan().any()
