"""When a delta could have come, and when it did: the arithmetic of the load test.

In: the words of a reference transcript with their times, and the deltas of a session with their
arrivals. Out: two numbers of milliseconds per delta. It knows nothing of sockets.

The model writes `[STREAMING_WORD]` at the position that speaks of a word's end, then the word's
text, one token (80 ms) a position; each token with text is one delta. So the k-th delta of a word
speaks of the audio position `word end + k x 80 ms`, and for a delay of 160 ms:

    audio ms       0    80   160  240  320  400  480
    spoken          four|
    token speaks of     80   160  240
                        WORD " fo" "ur"
    needs audio to           240  320  400              (spoken of + delay + 2.5 ms)

A token needs all audio up to `spoken of + delay` and 2.5 ms more: the window of the last mel frame
reaches that far past the token's end. Audio comes in chunks: a token can be computed once the chunk
that holds its last sample has been sent, which with chunks of 80 ms is up to 80 ms later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Final, NamedTuple

TOKEN_MS: Final = 80
# Half a window of 400 samples less one hop of 160, at 16 samples to the millisecond.
LOOKAHEAD_MS: Final = (400 // 2 - 160) / 16
_GOLDEN: Final = 0.618034


class TimedWord(NamedTuple):
    """A word of the reference, without white space, and where it ends in the audio."""

    text: str
    end_ms: float


class Arrival(NamedTuple):
    """Text of one delta, and when it came, counted from the moment that the audio began."""

    text: str
    at_ms: float


class DeltaTiming(NamedTuple):
    """How late one delta was.

    `latency_ms`: from the moment that the audio it speaks of was spoken, so a server that needs no
    time at all still has the delay in it. `lag_ms`: from the moment that its last sample was sent,
    so that for such a server it is 0.
    """

    latency_ms: float
    lag_ms: float


class Percentiles(NamedTuple):
    """Of a set of milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all values don't exceed.

    percentile([1, 2, 3, 4], 0.5) is 2: half of them are 2 or less.
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return the percentiles, or None where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p95, p99, max_ = (percentile(ordered, share) for share in (0.5, 0.95, 0.99, 1.0))
    return Percentiles(p50, p95, p99, max_)


def sent_ms(audio_ms: float, chunk_ms: float, total_ms: float) -> float:
    """Return when the audio up to a position has been sent, by the clock of the audio.

    A chunk is sent when its last sample has been spoken; the end of the audio is sent with the last
    chunk, and what lies beyond it (the padding that a commit stands for) with the commit.
    """
    if audio_ms >= total_ms:
        return total_ms
    return min(math.ceil(audio_ms / chunk_ms) * chunk_ms, total_ms)


def start_ms(index: int, num_sessions: int, ramp_ms: float, chunk_ms: float) -> float:
    """Return when a session begins: spread over the ramp, and over the phases of a chunk.

    The golden ratio keeps sessions from sending at the same moments, whatever their number.
    """
    return ramp_ms * index / num_sessions + chunk_ms * (index * _GOLDEN % 1)


def spoken_of_ms(arrivals: Sequence[Arrival], words: Sequence[TimedWord]) -> list[float | None]:
    """Return the audio position that each delta speaks of; None where no word fits.

    A delta that begins with white space begins a word. Words are matched in order, so that a word
    that was heard differently leaves the others where they are.
    """
    heard: list[list[int]] = []
    for index, arrival in enumerate(arrivals):
        if not heard or arrival.text[:1].isspace():
            heard.append([])
        heard[-1].append(index)
    texts = ["".join(arrivals[index].text for index in word).strip() for word in heard]
    matcher = SequenceMatcher(None, texts, [word.text for word in words], autojunk=False)
    positions: list[float | None] = [None] * len(arrivals)
    for first_heard, first_word, count in matcher.get_matching_blocks():
        for offset in range(count):
            end_ms = words[first_word + offset].end_ms
            for number, index in enumerate(heard[first_heard + offset], 1):
                positions[index] = end_ms + number * TOKEN_MS
    return positions


def time_deltas(
    arrivals: Sequence[Arrival],
    words: Sequence[TimedWord],
    *,
    delay_ms: int,
    chunk_ms: float,
    total_ms: float,
) -> list[DeltaTiming]:
    """Return how late each delta was that the reference has a place for."""
    timings = []
    for arrival, position_ms in zip(arrivals, spoken_of_ms(arrivals, words), strict=True):
        if position_ms is None:
            continue
        needed_ms = sent_ms(position_ms + delay_ms + LOOKAHEAD_MS, chunk_ms, total_ms)
        timings.append(DeltaTiming(arrival.at_ms - position_ms, arrival.at_ms - needed_ms))
    return timings
