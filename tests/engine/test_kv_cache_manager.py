"""Sizes, windows and block tables of the KV cache."""

import logging
import random
from array import array
from dataclasses import replace

import pytest

from voxlite.engine.block_pool import BlockPool
from voxlite.engine.config import TransformerConfig, cdiv
from voxlite.engine.errors import Overloaded
from voxlite.engine.kv_cache_manager import (
    BlockTable,
    KVCacheManager,
    KVCacheSpec,
    SlidingWindowManager,
    make_kv_cache_spec,
)

ENCODER_4B = TransformerConfig(
    dim=1280,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_size=64,
    hidden_dim=5120,
    window=750,
    norm_eps=1e-5,
    rope_theta=1e6,
)
DECODER_4B = replace(
    ENCODER_4B, dim=3072, num_layers=26, num_kv_heads=8, head_size=128, hidden_dim=9216, window=8192
)


def manager_of(spec: KVCacheSpec, num_new_tokens: int = 1) -> SlidingWindowManager:
    blocks = spec.max_admission_blocks_per_request(num_new_tokens, None)
    return SlidingWindowManager(spec, BlockPool(2 * blocks), blocks)


def encoder_spec(window_frames: int, block_size: int = 16) -> KVCacheSpec:
    return KVCacheSpec(
        block_size=block_size,
        num_kv_heads=4,
        head_size=8,
        window_frames=window_frames,
        block_pool_size=4,
    )


def test_the_4b_encoder_spec_is_in_pooled_units() -> None:
    spec = make_kv_cache_spec(ENCODER_4B, block_size=16, block_pool_size=4)
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (16, 128, 64)
    assert spec.sliding_window == cdiv(750, 4) == 188
    assert spec.window_frames == 750
    assert (
        spec.max_admission_blocks_per_request(max_num_batched_tokens=1, max_model_len=131072) == 13
    )
    bf16_bytes, entries = 2, spec.block_size
    assert spec.elements_per_block * bf16_bytes * 32 / entries == 2**20  # 1 MiB per entry


def test_the_4b_decoder_spec_counts_tokens() -> None:
    spec = make_kv_cache_spec(DECODER_4B, block_size=16)
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (16, 8, 128)
    assert (spec.sliding_window, spec.past_tokens) == (8192, 8191)
    assert spec.max_admission_blocks_per_request(1, None) == 513
    assert spec.elements_per_block * 2 * 26 / spec.block_size == 104 * 1024  # 104 KiB per entry


def test_a_length_limit_below_the_window_lowers_the_bound() -> None:
    spec = make_kv_cache_spec(DECODER_4B, block_size=16)
    assert spec.max_admission_blocks_per_request(1, max_model_len=100) == 7


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window_frames", [1, 2, 5, 30, 749, 750, 751])
def test_every_key_in_the_window_is_resident(window_frames: int, block_size: int) -> None:
    manager = manager_of(encoder_spec(window_frames, block_size))
    manager.admit(0)
    for token in range(600):
        table = manager.make_room(0, token, 1)
        oldest_frame = max(0, 4 * token - (window_frames - 1))
        table.check_held(oldest_frame, 4 * token + 4)
        manager.check_integrity()


@pytest.mark.parametrize("num_new_tokens", [1, 3, 48])
@pytest.mark.parametrize("window_frames", [30, 750])
def test_a_block_is_freed_as_soon_as_nothing_in_it_is_needed(
    window_frames: int, num_new_tokens: int
) -> None:
    spec = encoder_spec(window_frames)
    manager = manager_of(spec, num_new_tokens)
    manager.admit(0)
    for token in range(0, 600, num_new_tokens):
        table = manager.make_room(0, token, num_new_tokens)
        oldest_token = max(0, 4 * token - (window_frames - 1)) // 4
        assert table.first_block == oldest_token // spec.block_size


@pytest.mark.parametrize(
    ("window_frames", "past_tokens", "first_free_at"),
    [(749, 187, 203), (750, 188, 204), (751, 188, 204)],
)
def test_windows_around_750_free_their_first_block_at_the_right_token(
    window_frames: int, past_tokens: int, first_free_at: int
) -> None:
    """The first block holds tokens 0..15, the last of which is read until 15 + past_tokens."""
    spec = encoder_spec(window_frames)
    assert spec.past_tokens == past_tokens
    manager = manager_of(spec)
    manager.admit(0)
    freed_at = next(
        token for token in range(1000) if manager.make_room(0, token, 1).first_block == 1
    )
    assert freed_at == first_free_at == 15 + past_tokens + 1


@pytest.mark.parametrize("num_new_tokens", [1, 2, 7, 16, 48])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_admission_bound_is_reached_and_never_exceeded(
    num_new_tokens: int, block_size: int
) -> None:
    spec = encoder_spec(window_frames=121, block_size=block_size)
    bound = spec.max_admission_blocks_per_request(num_new_tokens, None)
    most = 0
    for first in range(1, block_size + 1):  # every alignment
        manager = manager_of(spec, num_new_tokens)
        manager.admit(0)
        manager.make_room(0, 0, min(first, num_new_tokens))
        for token in range(min(first, num_new_tokens), 300, num_new_tokens):
            most = max(most, len(manager.make_room(0, token, num_new_tokens).blocks))
    assert most == bound


def test_a_frames_slot_is_found_through_the_block_table() -> None:
    table = BlockTable(2, first_block=3, blocks=array("q", [41, 7, 88, 12]))
    assert table.slots(7, 13).tolist() == [83, 14, 15, 176, 177, 24]


@pytest.mark.parametrize("frames", [(5, 8), (13, 15)], ids=["before", "behind"])
def test_frames_that_are_not_held_have_no_slots(frames: tuple[int, int]) -> None:
    table = BlockTable(2, first_block=3, blocks=array("q", [41, 7, 88, 12]))
    with pytest.raises(AssertionError):
        table.slots(*frames)


def test_freed_blocks_are_told_to_on_free_once_each() -> None:
    freed: list[int] = []
    manager = manager_of(encoder_spec(window_frames=30, block_size=2))
    manager.on_free = freed.append
    manager.admit(0)
    for token in range(50):
        manager.make_room(0, token, 1)
    manager.release(0)
    assert len(freed) == 25  # 50 tokens in blocks of 2, each block used once


def test_reset_starts_again_and_stays_admitted() -> None:
    manager = manager_of(encoder_spec(window_frames=30))
    manager.admit(0)
    for token in range(100):
        manager.make_room(0, token, 1)
    manager.reset(0)
    assert manager.pool.num_held_blocks == 0
    table = manager.make_room(0, 0, 1)
    assert (table.first_block, len(table.blocks)) == (0, 1)
    manager.check_integrity()


def test_a_released_session_has_no_table() -> None:
    """FAULTS 7: nothing of a session that is gone comes back to life."""
    manager = manager_of(encoder_spec(window_frames=30))
    manager.admit(0)
    manager.release(0)
    for late in (lambda: manager.make_room(0, 0, 1), lambda: manager.release(0)):
        with pytest.raises(KeyError):
            late()
    assert manager.pool.num_held_blocks == 0


def test_release_gives_everything_back() -> None:
    manager = manager_of(encoder_spec(window_frames=30))
    for round_ in range(50):
        manager.admit(round_)
        manager.make_room(round_, 0, 1)
        manager.release(round_)
        manager.check_integrity()
    assert manager.pool.num_free_blocks == manager.pool.num_blocks


def test_admission_takes_both_stacks_or_neither() -> None:
    encoder = manager_of(encoder_spec(window_frames=30))  # room for two
    one_session = encoder.blocks_per_session
    decoder = SlidingWindowManager(encoder.spec, BlockPool(one_session), one_session)
    caches = KVCacheManager(encoder, decoder)
    caches.admit(0)
    with pytest.raises(Overloaded):
        caches.admit(1)
    caches.check_integrity()
    assert list(encoder.tables) == list(decoder.tables) == [0]
    caches.release(0)
    caches.admit(1)


# Shared starts


def decoder_manager(num_blocks: int, guaranteed: int) -> SlidingWindowManager:
    """Blocks of 4 tokens, and a window of 40: up to 11 blocks a session."""
    spec = KVCacheSpec(
        block_size=4, num_kv_heads=1, head_size=8, window_frames=40, block_pool_size=1
    )
    return SlidingWindowManager(spec, BlockPool(num_blocks), guaranteed)


def test_whole_blocks_of_a_start_are_held_once_and_the_rest_by_each() -> None:
    manager = decoder_manager(num_blocks=20, guaranteed=4)
    prefix = manager.prefix(480, 10)
    tables = []
    for session_id in range(3):
        manager.admit(session_id)
        tables.append(manager.start_behind(session_id, prefix, 10))
        manager.check_integrity()
    assert all(table.blocks[:2] == prefix.blocks[:2] for table in tables)
    assert len({block for table in tables for block in table.blocks[2:]} | {prefix.blocks[2]}) == 4
    assert manager.pool.num_held_blocks == 3 + 3
    assert [manager.pool.ref_count(block) for block in prefix.blocks] == [4, 4, 1]


def test_a_start_is_made_once_for_each_key_and_kept() -> None:
    manager = decoder_manager(num_blocks=20, guaranteed=4)
    first, other = manager.prefix(480, 10), manager.prefix(960, 10)
    assert manager.prefix(480, 10) is first is not other
    manager.admit(0)
    manager.start_behind(0, first, 10)
    manager.release(0)
    manager.check_integrity()
    assert manager.pool.num_held_blocks == manager.num_prefix_blocks == 6


def test_shared_blocks_leave_the_window_and_are_never_told_free() -> None:
    freed: list[int] = []
    manager = decoder_manager(num_blocks=20, guaranteed=4)
    manager.on_free = freed.append
    prefix = manager.prefix(480, 8)
    manager.admit(0)
    manager.start_behind(0, prefix, 8)
    for position in range(8, 100):
        manager.make_room(0, position, 1)
        manager.check_integrity()
    assert manager.tables[0].num_shared == 0
    assert freed and not set(freed) & set(prefix.blocks)
    assert [manager.pool.ref_count(block) for block in prefix.blocks] == [1, 1]


def test_room_in_a_shared_block_is_refused() -> None:
    manager = decoder_manager(num_blocks=20, guaranteed=4)
    manager.admit(0)
    manager.start_behind(0, manager.prefix(480, 8), 8)
    with pytest.raises(AssertionError):
        manager.make_room(0, 7, 1)


@pytest.mark.parametrize("fault", ["counted too often", "held by two", "on the free list"])
def test_wrong_reference_counts_are_found(fault: str) -> None:
    manager = decoder_manager(num_blocks=20, guaranteed=4)
    for session_id in range(2):
        manager.admit(session_id)
        manager.make_room(session_id, 0, 8)
    first, second = (manager.tables[session_id].blocks for session_id in range(2))
    if fault == "counted too often":
        manager.pool.share(first[0])
    elif fault == "held by two":
        manager.pool.share(first[0])
        manager.pool.free(second[0])
        second[0] = first[0]
    else:
        manager.pool.free(first[0])
    with pytest.raises(AssertionError):
        manager.check_integrity()


# Shortage


def run_round(manager: SlidingWindowManager, positions: dict[int, int]) -> None:
    for session_id in positions:
        manager.make_room(session_id, positions[session_id], 1)
        positions[session_id] += 1
    manager.check_integrity()


def test_a_session_that_cannot_be_guaranteed_its_blocks_is_refused_in_numbers() -> None:
    manager = decoder_manager(num_blocks=11, guaranteed=4)
    manager.prefix(480, 8)
    manager.admit(0)
    manager.admit(1)
    with pytest.raises(Overloaded, match=r"2 sessions are guaranteed 4 KV-cache blocks each, of 9"):
        manager.admit(2)
    assert list(manager.tables) == [0, 1]
    manager.release(0)
    manager.admit(2)


def test_the_session_that_holds_most_gives_up_its_oldest_block() -> None:
    manager = decoder_manager(num_blocks=12, guaranteed=4)
    for session_id in range(2):
        manager.admit(session_id)
    manager.make_room(0, 0, 36)  # 9 of 12 blocks
    manager.make_room(1, 0, 12)  # the other 3
    oldest = manager.tables[0].blocks[0]
    table = manager.make_room(1, 12, 1)
    assert table.blocks[-1] == oldest
    assert (manager.tables[0].first_block, manager.tables[0].num_given_up) == (1, 1)
    assert (table.num_given_up, manager.num_given_up_blocks) == (0, 1)


def test_nobody_falls_below_what_it_is_guaranteed_and_all_get_on() -> None:
    """FAULTS 4 and 5: three sessions of up to 11 blocks in a pool of 14, each guaranteed 4."""
    manager = decoder_manager(num_blocks=14, guaranteed=4)
    positions = {}
    for session_id in range(3):
        manager.admit(session_id)
        positions[session_id] = 0
        for _ in range(100):
            run_round(manager, positions)
            for session_id, position in positions.items():
                table = manager.tables[session_id]
                held = position - table.first_frame
                assert held >= min(position, 3 * 4 + 1)  # 4 blocks, whatever their edge
    assert manager.num_given_up_blocks > 0
    assert manager.pool.num_free_blocks == 0


def test_windows_grow_again_when_others_leave() -> None:
    manager = decoder_manager(num_blocks=12, guaranteed=4)
    positions = {}
    for session_id in range(3):
        manager.admit(session_id)
        positions[session_id] = 0
    for _ in range(100):
        run_round(manager, positions)
    assert [len(table.blocks) for table in manager.tables.values()] == [4, 4, 4]
    for session_id in (1, 2):
        manager.release(session_id)
        del positions[session_id]
    for _ in range(40):
        run_round(manager, positions)
    table = manager.tables[0]
    assert table.first_block == manager.spec.first_needed_token(positions[0] - 1) // 4


def test_giving_up_is_logged_once_a_session(caplog: pytest.LogCaptureFixture) -> None:
    manager = decoder_manager(num_blocks=8, guaranteed=4)
    positions = {0: 0, 1: 0}
    manager.admit(0)
    manager.admit(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            run_round(manager, positions)
    assert manager.num_given_up_blocks > 10
    warnings = sorted(record.getMessage() for record in caplog.records)
    assert [text.split(" reads")[0] for text in warnings] == ["session 0", "session 1"]
    assert "now 12 tokens: all 8 KV-cache blocks are in use" in warnings[0]


def test_the_same_arrivals_give_the_same_blocks() -> None:
    def trace() -> list[tuple[int, int, list[int]]]:
        manager, choices = decoder_manager(num_blocks=30, guaranteed=5), random.Random(0)
        positions: dict[int, int] = {}
        tables = []
        for step in range(2000):
            if choices.random() < 0.1:
                try:
                    manager.admit(step)
                    manager.start_behind(step, manager.prefix(480, 6), 6)
                    positions[step] = 6
                except Overloaded:
                    gone = choices.choice(list(positions))
                    manager.release(gone)
                    del positions[gone]
            run_round(manager, positions)
            for session_id, table in manager.tables.items():
                tables.append((session_id, table.first_block, list(table.blocks)))
        assert manager.num_given_up_blocks > 100
        return tables

    assert trace() == trace()
