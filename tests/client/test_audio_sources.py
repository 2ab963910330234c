import asyncio
import io
import sys
import time
from collections.abc import AsyncIterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from voxlite.client.audio_sources import (
    AudioSourceError,
    Microphone,
    cut,
    paced,
    read_file,
    read_stream,
    unpaced,
)


async def take_all(chunks: AsyncIterable[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_any_file_becomes_mono_pcm16_at_16_khz(
    tmp_path: Path, rate_hz: int, num_channels: int
) -> None:
    times_s = np.arange(rate_hz) / rate_hz
    sine = 0.5 * np.sin(2 * np.pi * 440 * times_s)
    soundfile.write(tmp_path / "a.wav", np.stack([sine] * num_channels, axis=1), rate_hz)
    samples = np.frombuffer(read_file(tmp_path / "a.wav"), "<i2") / 32_767
    assert abs(len(samples) - 16_000) <= 1
    middle = np.arange(4_000, 12_000)
    expected = 0.5 * np.sin(2 * np.pi * 440 * middle / 16_000)
    np.testing.assert_allclose(samples[middle], expected, atol=2e-3)


def test_a_file_that_is_not_audio_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("not audio")
    with pytest.raises(AudioSourceError, match=r"a\.txt"):
        read_file(tmp_path / "a.txt")
    with pytest.raises(AudioSourceError, match=r"missing\.wav: no such file"):
        read_file(tmp_path / "missing.wav")


def test_chunks_join_to_the_whole() -> None:
    pcm = bytes(range(256)) * 40
    assert [len(chunk) for chunk in cut(pcm)] == [4096, 4096, 2048]
    assert b"".join(asyncio.run(take_all(unpaced(cut(pcm))))) == pcm


def test_paced_audio_takes_as_long_as_speech() -> None:
    started_s = time.monotonic()
    chunks = asyncio.run(take_all(paced([bytes(3_200)] * 3)))
    assert time.monotonic() - started_s >= 0.3
    assert len(chunks) == 3


def test_a_stream_is_read_to_its_end() -> None:
    pcm = bytes(range(256)) * 40
    assert b"".join(asyncio.run(take_all(read_stream(io.BytesIO(pcm))))) == pcm


class FakeSoundDevice(SimpleNamespace):
    """The part of sounddevice that is used: each stream calls back twice with its number."""

    class PortAudioError(Exception):
        pass

    class RawInputStream:
        def __init__(self, callback: Any, device: Any, **kwargs: Any) -> None:
            if device == "nonesuch":
                raise FakeSoundDevice.PortAudioError("no such device")
            assert (kwargs["samplerate"], kwargs["channels"]) == (16_000, 1)
            self._callback = callback

        def __enter__(self) -> None:
            for number in (1, 2):
                self._callback(memoryview(bytes([number])), 1, None, None)

        def __exit__(self, *_: object) -> None:
            pass


def test_the_microphone_gives_its_blocks_until_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def record() -> list[bytes]:
        microphone = Microphone()
        taken = []
        async for chunk in microphone.chunks():
            taken.append(chunk)
            microphone.stop()
        return taken

    monkeypatch.setitem(sys.modules, "sounddevice", FakeSoundDevice())
    assert asyncio.run(record()) == [b"\x01", b"\x02"]


def test_an_unknown_microphone_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def record() -> list[bytes]:
        return await take_all(Microphone("nonesuch").chunks())

    monkeypatch.setitem(sys.modules, "sounddevice", FakeSoundDevice())
    with pytest.raises(AudioSourceError, match="no such device"):
        asyncio.run(record())


def test_a_missing_sounddevice_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_microphone() -> None:
        Microphone()

    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(AudioSourceError, match="pip install"):
        asyncio.run(open_microphone())
