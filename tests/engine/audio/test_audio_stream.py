"""Padding, cutting and buffering of one utterance's samples."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.config import AudioConfig

AUDIO = AudioConfig()
LEFT, STEP, SPAN, LOOK_BACK, LOOK_AHEAD = 32, 1_280, 1_520, 200, 40
RIGHT = 17


def ramp(num_samples: int) -> NDArray[np.float32]:
    """Samples that each say where they stand, from 1 on."""
    return np.arange(1, num_samples + 1, dtype=np.float32)


def finished(samples: NDArray[np.float32], num_right_pad_tokens: int = RIGHT) -> AudioStream:
    stream = AudioStream(AUDIO, num_right_pad_tokens)
    stream.append(samples)
    stream.finish()
    return stream


@pytest.mark.parametrize("num_right_pad_tokens", [12, 17, 41])
@pytest.mark.parametrize(
    ("num_samples", "num_audio_tokens"),
    [(0, 0), (1, 1), (1_279, 1), (1_280, 1), (1_281, 2), (2_560, 2), (2_561, 3), (256_000, 200)],
)
def test_tokens_are_left_padding_audio_and_right_padding(
    num_samples: int, num_audio_tokens: int, num_right_pad_tokens: int
) -> None:
    stream = finished(ramp(num_samples), num_right_pad_tokens)
    num_tokens = 32 + num_audio_tokens + num_right_pad_tokens
    assert (stream.num_tokens, stream.num_ready_tokens) == (num_tokens, num_tokens)


@pytest.mark.parametrize("num_samples", [0, 1, 40, 1_279, 1_280, 1_281, 5_000])
def test_each_token_holds_the_samples_around_it(num_samples: int) -> None:
    samples = ramp(num_samples)
    stream = finished(samples)
    signal = np.zeros(LOOK_BACK + stream.num_tokens * STEP + LOOK_AHEAD, np.float32)
    signal[LOOK_BACK + LEFT * STEP :][:num_samples] = samples
    expected = [signal[k * STEP : k * STEP + SPAN] for k in range(stream.num_tokens)]
    np.testing.assert_array_equal(stream.take(stream.num_tokens), expected)


@pytest.mark.parametrize(
    ("num_samples", "num_audio_tokens"),
    [(0, -1), (39, -1), (40, 0), (1_319, 0), (1_320, 1), (2_599, 1), (2_600, 2)],
)
def test_a_token_is_ready_once_its_look_ahead_is_here(
    num_samples: int, num_audio_tokens: int
) -> None:
    stream = AudioStream(AUDIO, RIGHT)
    stream.append(ramp(num_samples))
    assert stream.num_ready_tokens == LEFT + num_audio_tokens


def test_taking_in_pieces_equals_taking_at_once() -> None:
    whole, pieces = finished(ramp(9_999)), finished(ramp(9_999))
    taken = [pieces.take(n) for n in (1, 30, 2, 7)]
    np.testing.assert_array_equal(np.concatenate(taken), whole.take(40))


def test_taken_samples_survive_what_comes_later() -> None:
    stream = AudioStream(AUDIO, RIGHT)
    stream.append(ramp(40))
    taken = stream.take(LEFT)
    before = taken.copy()
    stream.append(ramp(5_000))
    np.testing.assert_array_equal(taken, before)


def test_the_callers_array_may_be_reused_after_append() -> None:
    stream, array = AudioStream(AUDIO, RIGHT), ramp(2_000)
    stream.append(array)
    array.fill(-1)
    assert stream.take(LEFT + 1).min() == 0


def test_memory_stays_bounded_over_a_long_stream() -> None:
    stream, chunk = AudioStream(AUDIO, RIGHT), np.ones(1_000, np.float32)
    stream.append(chunk)
    stream.take(stream.num_ready_tokens)
    tracemalloc.start()
    try:
        for _ in range(9_600):  # ten minutes
            stream.append(chunk)
            if stream.num_ready_tokens:
                stream.take(stream.num_ready_tokens)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000  # of 38,400,000 fed
