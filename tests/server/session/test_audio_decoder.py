"""Bytes to samples: every encoding, every cut, every rate."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
import soxr

from voxlite.engine.errors import InvalidInput
from voxlite.server.session.audio_decoder import AudioDecoder
from voxlite.server.session.session_config import RATES_HZ, AudioFormat, Encoding


def speech_like(num_samples: int) -> np.ndarray:
    time_s = np.arange(num_samples) / 16_000
    return (0.4 * np.sin(2 * np.pi * 300 * time_s) * np.sin(2 * np.pi * 3 * time_s)).astype("f4")


def decoded(audio_format: AudioFormat, data: bytes, num_bytes: int) -> np.ndarray:
    decoder = AudioDecoder(audio_format)
    pieces = [decoder.push(data[i : i + num_bytes]) for i in range(0, len(data), num_bytes)]
    return np.concatenate([*pieces, decoder.flush()])


@pytest.mark.parametrize(
    ("encoding", "dtype", "scale"),
    [
        (Encoding.PCM_S16LE, "<i2", 2**15),
        (Encoding.PCM_S32LE, "<i4", 2**31),
        (Encoding.PCM_F16LE, "<f2", 1),
        (Encoding.PCM_F32LE, "<f4", 1),
    ],
)
@pytest.mark.parametrize("num_bytes", [1, 3, 1000, 10**6])
def test_pcm(encoding: Encoding, dtype: str, scale: int, num_bytes: int) -> None:
    samples = speech_like(2000).astype(np.float64)
    data = (samples * scale).astype(dtype).tobytes()
    result = decoded(AudioFormat(encoding, 16_000), data, num_bytes)
    np.testing.assert_allclose(result, samples, atol=1e-3)
    np.testing.assert_array_equal(result, decoded(AudioFormat(encoding, 16_000), data, len(data)))


@pytest.mark.parametrize(
    ("encoding", "subtype"), [(Encoding.MULAW, "ULAW"), (Encoding.ALAW, "ALAW")]
)
def test_every_g711_code_is_decoded_as_libsndfile_does(encoding: Encoding, subtype: str) -> None:
    codes = bytes(range(256))
    expected, _ = soundfile.read(
        io.BytesIO(codes), samplerate=8000, channels=1, subtype=subtype, format="RAW",
        dtype="float32",
    )  # fmt: skip
    decoder = AudioDecoder(AudioFormat(encoding, 16_000))
    np.testing.assert_array_equal(decoder.push(codes), expected)


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_every_rate_is_resampled_the_same_however_it_is_cut(rate_hz: int) -> None:
    samples = soxr.resample(speech_like(8000), 16_000, rate_hz).astype(np.float32)
    data = (samples * 32768).astype("<i2").tobytes()
    audio_format = AudioFormat(Encoding.PCM_S16LE, rate_hz)
    whole = decoded(audio_format, data, len(data))
    for num_bytes in (1001, 4800):
        np.testing.assert_array_equal(decoded(audio_format, data, num_bytes), whole)
    assert abs(len(whole) - round(len(samples) * 16_000 / rate_hz)) <= 1
    np.testing.assert_allclose(whole[200:7800], speech_like(8000)[200:7800], atol=5e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_and_nothing_is_taken(bad: float) -> None:
    decoder = AudioDecoder(AudioFormat(Encoding.PCM_F32LE, 16_000))
    with pytest.raises(InvalidInput, match="sample 1"):
        decoder.push(np.array([0, bad], "<f4").tobytes())
    assert decoder.push(np.array([0.5], "<f4").tobytes()).tolist() == [0.5]


def test_skipping_keeps_where_samples_begin() -> None:
    decoder = AudioDecoder(AudioFormat(Encoding.PCM_S16LE, 16_000))
    clip = np.arange(100, dtype="<i2").tobytes()
    decoder.push(clip[:51])
    decoder.skip(clip[51:122])
    rest = decoder.push(clip[122:])
    np.testing.assert_array_equal(rest, np.arange(61, 100) / np.float32(32768))


def test_a_stream_goes_on_after_a_flush() -> None:
    decoder = AudioDecoder(AudioFormat(Encoding.PCM_S16LE, 24_000))
    second = np.zeros(24_000, "<i2").tobytes()
    for _ in range(3):
        assert len(decoder.push(second)) + len(decoder.flush()) == 16_000
    assert len(decoder.flush()) == 0
