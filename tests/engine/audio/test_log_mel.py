"""The log-mel spectrogram: against a float64 DFT, and bit-equal for every way of feeding."""

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.oracle import Oracle
from tests.speechlike import speechlike
from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.audio.log_mel import LogMel
from voxlite.engine.config import AudioConfig

AUDIO = AudioConfig()
N_DELAY = 1
NUM_RIGHT_PAD_TOKENS = AUDIO.num_right_pad_tokens(N_DELAY)
# Single precision against double. A tone of full volume leaves rounding errors, relative to its own
# power, in bins that hold next to none.
TOLERANCE, TOLERANCE_OF_TONES = 2e-5, 2e-4
SILENCE = (1.5 - 8 + 4) / 4

Samples = NDArray[np.float32]


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


@pytest.fixture(scope="module")
def log_mel() -> LogMel:
    return LogMel(AUDIO)


def noise(num_samples: int) -> Samples:
    rng = np.random.default_rng(0)
    return (0.1 * rng.standard_normal(num_samples)).astype(np.float32)


def sweep(num_samples: int) -> Samples:
    """A tone of full volume that rises from 20 Hz to 7.9 kHz."""
    hertz = np.linspace(20, 7_900, num_samples)
    return np.sin(2 * np.pi * np.cumsum(hertz) / AUDIO.sampling_rate_hz).astype(np.float32)


def pulse(num_samples: int, position: int) -> Samples:
    samples = np.zeros(num_samples, np.float32)
    samples[position] = 1.0
    return samples


def cut(samples: Samples, sizes: Iterable[int]) -> Iterator[Samples]:
    """Cut samples into pieces of these sizes; what is left over comes last."""
    start = 0
    for size in sizes:
        if start >= len(samples):
            return
        yield samples[start : start + size]
        start += size
    yield samples[start:]


def spans_of(chunks: Iterable[Samples]) -> list[NDArray[np.float32]]:
    """Feed an utterance, taking tokens as soon as they are ready."""
    stream = AudioStream(AUDIO, NUM_RIGHT_PAD_TOKENS)
    taken = []
    for chunk in chain(chunks, [None]):
        if chunk is None:
            stream.finish()
        else:
            stream.append(chunk)
        if stream.num_ready_tokens:
            taken.append(stream.take(stream.num_ready_tokens))
    return taken


def streamed_mel(log_mel: LogMel, chunks: Iterable[Samples]) -> torch.Tensor:
    """Return (tokens, 8, 128), computed as the samples come."""
    return torch.cat([log_mel(spans) for spans in spans_of(chunks)])


def random_sizes(seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(0, 3_000))


PLANS = {
    "1 sample": lambda: repeat(1),
    "159": lambda: repeat(159),
    "160": lambda: repeat(160),
    "161": lambda: repeat(161),
    "1279": lambda: repeat(1279),
    "1281": lambda: repeat(1281),
    "random": lambda: random_sizes(seed=1),
}


@pytest.mark.parametrize("plan", PLANS)
def test_mel_is_bit_equal_for_every_feeding_plan(log_mel: LogMel, plan: str) -> None:
    samples = speechlike(0.41, seed=4)
    whole = streamed_mel(log_mel, [samples])
    assert torch.equal(streamed_mel(log_mel, cut(samples, PLANS[plan]())), whole)


@given(sizes=st.lists(st.integers(0, 4_000), max_size=8), num_samples=st.integers(0, 8_000))
def test_mel_is_bit_equal_for_any_feeding_plan(sizes: list[int], num_samples: int) -> None:
    log_mel, samples = LogMel(AUDIO), noise(num_samples)
    whole = streamed_mel(log_mel, [samples])
    assert torch.equal(streamed_mel(log_mel, cut(samples, sizes)), whole)


@pytest.mark.parametrize(
    ("samples", "tolerance"),
    [
        pytest.param(noise(9_000), TOLERANCE, id="noise"),
        pytest.param(sweep(9_000), TOLERANCE_OF_TONES, id="sweep"),
        pytest.param(pulse(9_000, 4_321), TOLERANCE, id="pulse"),
        pytest.param(pulse(9_000, 0), TOLERANCE, id="pulse at the first sample"),
        pytest.param(pulse(9_000, 8_999), TOLERANCE, id="pulse at the last sample"),
        pytest.param(np.zeros(9_000, np.float32), TOLERANCE, id="silence"),
        pytest.param(speechlike(0.6, seed=5), TOLERANCE, id="speechlike"),
        pytest.param(1e-4 * noise(9_000), TOLERANCE, id="noise around the floor"),
    ],
)
def test_every_mel_frame_matches_a_float64_dft(
    log_mel: LogMel, oracle: Oracle, samples: Samples, tolerance: float
) -> None:
    expected = oracle.log_mel(oracle.pad(samples, N_DELAY))
    actual = streamed_mel(log_mel, [samples]).flatten(0, 1).numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("lengths", [range(n, n + 100) for n in range(1, 2_600, 100)], ids=str)
def test_the_end_of_every_length_matches_a_float64_dft(
    log_mel: LogMel, oracle: Oracle, lengths: range
) -> None:
    """Lengths differ in the token that holds the last sample and in the one that looks back on it.

    Both are cut out of each utterance, with a margin of two mel frames on either side, and laid
    one after the other for the reference.
    """
    signal, step, margin = noise(2_600), AUDIO.samples_per_token, 2 * AUDIO.hop_samples
    audio = AudioConfig(num_left_pad_tokens=1)
    spans, segments = [], []
    for num_samples in lengths:
        stream = AudioStream(audio, num_right_pad_tokens=2)
        stream.append(signal[:num_samples])
        stream.finish()
        first = 1 + (num_samples - 1) // step
        spans.append(stream.take(stream.num_tokens)[first : first + 2])
        padded = np.zeros(step * stream.num_tokens)
        padded[step : step + num_samples] = signal[:num_samples]
        segments.append(padded[first * step - margin : (first + 2) * step + margin])
    expected = oracle.log_mel(np.concatenate(segments)).reshape(len(lengths), -1, 128)[:, 2:-2]
    actual = log_mel(np.concatenate(spans)).reshape(expected.shape).numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("position", [0, -1], ids=["first sample", "last sample"])
def test_a_click_at_either_end_is_heard(log_mel: LogMel, position: int) -> None:
    mel = streamed_mel(log_mel, [pulse(1_280, position)])
    assert mel.max() > SILENCE


def test_silence_lies_at_the_fixed_floor(log_mel: LogMel) -> None:
    mel = streamed_mel(log_mel, [np.zeros(1_280, np.float32)])
    torch.testing.assert_close(mel, torch.full_like(mel, SILENCE))


def test_loud_audio_does_not_change_the_frames_before_it(log_mel: LogMel) -> None:
    quiet, loud = 0.01 * noise(5 * 1_280), sweep(5 * 1_280)
    mel = streamed_mel(log_mel, [quiet, loud])
    num_untouched = AUDIO.num_left_pad_tokens + 4
    assert torch.equal(mel[:num_untouched], streamed_mel(log_mel, [quiet])[:num_untouched])


def test_mel_is_float32_on_the_cpu(log_mel: LogMel) -> None:
    mel = log_mel(np.zeros((3, 1_520), np.float32))
    assert (mel.shape, mel.dtype, mel.device.type) == ((3, 8, 128), torch.float32, "cpu")
