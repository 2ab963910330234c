"""Sizes, windows and block tables of the KV cache."""

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


def test_a_length_limit_below_the_window_lowers_the_reservation() -> None:
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
        table.slot_runs(oldest_frame, 4 * token + 4)  # asserts that all of them are held
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
            most = max(most, manager.make_room(0, token, num_new_tokens).num_blocks)
    assert most == bound


def test_a_ring_of_blocks_lies_in_two_runs_where_it_wraps() -> None:
    table = BlockTable(range(40, 45), frames_per_block=2, first_block=3, end_block=7)
    assert table.block_runs(3, 7) == [range(43, 45), range(40, 42)]
    assert table.slot_runs(7, 13) == [range(87, 90), range(80, 83)]


def test_freed_blocks_are_told_to_on_free_once_each() -> None:
    freed: list[int] = []
    spec = encoder_spec(window_frames=30, block_size=2)
    manager = manager_of(spec)
    manager.on_free = freed.extend
    manager.admit(0)
    for token in range(50):
        manager.make_room(0, token, 1)
    manager.release(0)
    assert len(freed) == 25  # 50 tokens in blocks of 2, each block used once


def test_reset_starts_again_and_keeps_the_reservation() -> None:
    manager = manager_of(encoder_spec(window_frames=30))
    manager.admit(0)
    for token in range(100):
        manager.make_room(0, token, 1)
    manager.reset(0)
    assert manager.pool.num_held_blocks == 0
    assert manager.make_room(0, 0, 1).block_runs(0, 1) == [range(1)]
    manager.check_integrity()


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
    assert encoder.pool.num_free_blocks == one_session
    caches.release(0)
    caches.admit(1)
