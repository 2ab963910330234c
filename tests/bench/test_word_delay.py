"""When a word of known end counts as there."""

from __future__ import annotations

from voxlite.bench.deltas import Arrival, TimedWord
from voxlite.bench.word_delay import arrived_ms

WORDS = [TimedWord("four", 400), TimedWord("two", 500)]


def test_a_word_is_there_with_its_last_letter() -> None:
    arrivals = [Arrival(" fo", 500), Arrival("ur t", 580), Arrival("wo", 660)]
    assert arrived_ms(arrivals, WORDS) == [580, 660]
    assert arrived_ms([Arrival(" four two", 700)], WORDS) == [700, 700]


def test_other_words_have_no_times() -> None:
    assert arrived_ms([Arrival(" four too", 700)], WORDS) is None
    assert arrived_ms([], WORDS) is None
