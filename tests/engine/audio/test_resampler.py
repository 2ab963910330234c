"""Resampling with carried state: any cut gives the same samples, of the right length and pitch."""

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from voxlite.engine.audio.resampler import MAX_RATE_HZ, MIN_RATE_HZ, Resampler
from voxlite.engine.errors import InvalidInput

RATES_HZ = [8_000, 24_000, 44_100, 48_000]
Samples = NDArray[np.float32]


def tone(rate_hz: int, num_samples: int, hertz: float = 440.0) -> Samples:
    times_s = np.arange(num_samples) / rate_hz
    return (0.5 * np.sin(2 * np.pi * hertz * times_s)).astype(np.float32)


def noise(num_samples: int) -> Samples:
    return np.random.default_rng(3).uniform(-1, 1, num_samples).astype(np.float32)


def resampled(rate_hz: int, chunks: Iterable[Samples]) -> Samples:
    resampler = Resampler(rate_hz)
    return np.concatenate([*[resampler.push(chunk) for chunk in chunks], resampler.flush()])


def cut(samples: Samples, size: int) -> list[Samples]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@pytest.mark.parametrize("chunk_samples", [1, 7, 160, 4_800, 10_007])
@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_output_does_not_depend_on_chunking(rate_hz: int, chunk_samples: int) -> None:
    samples = noise(12_345)
    whole = resampled(rate_hz, [samples])
    np.testing.assert_array_equal(resampled(rate_hz, cut(samples, chunk_samples)), whole)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 3, 799, 800, 44_100, 47_999, 100_001])
@pytest.mark.parametrize("rate_hz", [*RATES_HZ, 11_025, 16_000, 22_050])
def test_output_lasts_as_long_as_the_input(rate_hz: int, num_samples: int) -> None:
    expected = round(num_samples * 16_000 / rate_hz)
    assert abs(len(resampled(rate_hz, cut(noise(num_samples), 5_000))) - expected) <= 1


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_a_tone_keeps_its_pitch_level_and_place(rate_hz: int) -> None:
    actual = resampled(rate_hz, cut(tone(rate_hz, rate_hz), 1_000))
    expected = tone(16_000, len(actual))
    middle = slice(2_000, 14_000)
    np.testing.assert_allclose(actual[middle], expected[middle], atol=1e-3)


@pytest.mark.parametrize("rate_hz", [24_000, 44_100, 48_000])
def test_what_lies_above_8_khz_does_not_fold_back(rate_hz: int) -> None:
    actual = resampled(rate_hz, [tone(rate_hz, rate_hz, hertz=11_000)])
    assert np.abs(actual[2_000:14_000]).max() < 1e-3


def test_16_khz_passes_through_unchanged() -> None:
    samples = noise(1_000)
    np.testing.assert_array_equal(resampled(16_000, cut(samples, 77)), samples)


@pytest.mark.parametrize("rate_hz", [MIN_RATE_HZ, MAX_RATE_HZ])
def test_the_extreme_rates_work(rate_hz: int) -> None:
    assert abs(len(resampled(rate_hz, [noise(rate_hz)])) - 16_000) <= 1


@pytest.mark.parametrize("rate_hz", [-16_000, 0, 1, MIN_RATE_HZ - 1, MAX_RATE_HZ + 1, 10**12])
def test_impossible_rates_are_refused_with_the_limits(rate_hz: int) -> None:
    with pytest.raises(InvalidInput, match=rf"{rate_hz} Hz: {MIN_RATE_HZ} to {MAX_RATE_HZ}"):
        Resampler(rate_hz)
