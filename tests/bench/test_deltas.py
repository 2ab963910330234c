"""The arithmetic of the load test."""

from __future__ import annotations

import pytest

from voxlite.bench.deltas import (
    Arrival,
    TimedWord,
    percentile,
    percentiles,
    sent_ms,
    spoken_of_ms,
    start_ms,
    time_deltas,
)
from voxlite.bench.load_test import looped

WORDS = [TimedWord("four", 80), TimedWord("two", 480), TimedWord("nine", 960)]


def test_percentile_is_a_value_that_was_measured() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.95) == 4
    assert percentile([7], 0.01) == 7
    assert percentiles([]) is None


@pytest.mark.parametrize(
    ("audio_ms", "expected_ms"), [(0, 0), (1, 80), (80, 80), (82.5, 160), (240, 200), (900, 200)]
)
def test_audio_is_sent_with_the_chunk_that_ends_after_it(
    audio_ms: float, expected_ms: float
) -> None:
    assert sent_ms(audio_ms, chunk_ms=80, total_ms=200) == expected_ms


def test_tokens_of_a_word_follow_its_end() -> None:
    arrivals = [Arrival(" fo", 0), Arrival("ur", 0), Arrival(" two", 0)]
    assert spoken_of_ms(arrivals, WORDS) == [160, 240, 560]


def test_a_word_heard_differently_leaves_the_others_in_place() -> None:
    arrivals = [Arrival(" four", 0), Arrival(" too", 0), Arrival(" nine", 0)]
    assert spoken_of_ms(arrivals, WORDS) == [160, None, 1040]


def test_a_server_that_needs_no_time_has_no_lag() -> None:
    # Speaks of 160, needs audio to 160 + 160 + 2.5, sent with the chunk that ends at 400.
    [timing] = time_deltas([Arrival(" four", 400)], WORDS, delay_ms=160, chunk_ms=80, total_ms=1000)
    assert timing.lag_ms == 0
    assert timing.latency_ms == 240


def test_starts_are_in_order_and_in_different_phases_of_a_chunk() -> None:
    starts = [start_ms(index, 8, ramp_ms=640, chunk_ms=80) for index in range(8)]
    assert starts[0] == 0
    assert len({round(start % 80) for start in starts}) == 8


def test_audio_is_looped_with_pauses_and_cut() -> None:
    second = bytes([1, 1]) * 16_000
    audio = looped(second, pause_ms=500, seconds=2)
    assert len(audio) == 4 * 16_000
    assert audio == second + bytes(16_000) + second[:16_000]
