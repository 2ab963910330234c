"""Where audio comes from: a file, standard input, a microphone.

Out: chunks of raw PCM16, little endian, mono, 16 kHz: what the server takes. `paced` makes a source
as slow as speech. Knows nothing of the server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

SAMPLE_RATE_HZ: Final = 16_000
BYTES_PER_SECOND: Final = 2 * SAMPLE_RATE_HZ
# 128 ms, as vLLM's example sends.
CHUNK_BYTES: Final = 4096
_MICROPHONE_BLOCK_SAMPLES: Final = SAMPLE_RATE_HZ * 80 // 1000
# Audio that may wait for a connection that doesn't keep up.
_MAX_WAITING_S: Final = 60
_READ_PIECE_SAMPLES: Final = 65_536


class AudioSourceError(Exception):
    """Report audio that can't be had, in a sentence for the user."""


def read_file(path: Path | str) -> bytes:
    """Return the whole of an audio file: any format, rate and channels that libsndfile reads.

    Raises:
        AudioSourceError: it can't be read as audio.
    """
    if not Path(path).exists():
        raise AudioSourceError(f"{path}: no such file")
    try:
        with soundfile.SoundFile(path) as file:
            return b"".join(_pcm16_pieces(file))
    except (soundfile.SoundFileError, OSError) as err:
        raise AudioSourceError(f"{path}: {err}") from err


def _pcm16_pieces(file: soundfile.SoundFile) -> Iterator[bytes]:
    resampler = soxr.ResampleStream(file.samplerate, SAMPLE_RATE_HZ, 1, dtype="float32")
    pieces = file.blocks(_READ_PIECE_SAMPLES, dtype="float32", always_2d=True)
    for piece in pieces:
        mono = piece.mean(axis=1, dtype=np.float32)
        yield _pcm16(resampler.resample_chunk(mono))
    yield _pcm16(resampler.resample_chunk(np.zeros(0, np.float32), last=True))


def _pcm16(samples: NDArray[np.float32]) -> bytes:
    scaled: NDArray[np.int16] = (samples.clip(-1, 1) * 32_767).astype("<i2")
    return scaled.tobytes()


def cut(pcm: bytes, chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """Cut audio into chunks; the last one may be shorter."""
    return [pcm[start : start + chunk_bytes] for start in range(0, len(pcm), chunk_bytes)]


async def unpaced(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks as fast as they are taken."""
    for chunk in chunks:
        yield chunk


async def paced(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield each chunk at the moment when a speaker would have come to its end."""
    started_s = time.monotonic()
    spoken_bytes = 0
    for chunk in chunks:
        spoken_bytes += len(chunk)
        due_s = started_s + spoken_bytes / BYTES_PER_SECOND
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        yield chunk


async def read_stream(stream: BinaryIO) -> AsyncIterator[bytes]:
    """Yield raw PCM16, mono, 16 kHz from a pipe as it arrives, for example standard input."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)

    def read() -> None:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            try:
                asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()
            except RuntimeError:
                return  # The loop has been closed: nobody listens any more.
            if not chunk:
                return

    # A daemon: a read that never returns must not keep the program alive.
    threading.Thread(target=read, name="audio-reader", daemon=True).start()
    while chunk := await queue.get():
        yield chunk


class Microphone:
    """The microphone, from the first chunk taken until `stop` is called."""

    def __init__(self, device: str | int | None = None) -> None:
        """Find the microphone.

        Args:
            device: a name or number of `python -m sounddevice`, None for the system's choice.

        Raises:
            AudioSourceError: sounddevice, or PortAudio under it, isn't installed.
        """
        self._device = device
        self._sounddevice = _import_sounddevice()
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._has_overflowed = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield chunks of 80 ms until `stop`.

        Raises:
            AudioSourceError: there is no such microphone, it can't be opened, or a minute of
                audio is waiting because nobody takes it.
        """
        with self._open():
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
        if self._has_overflowed:
            raise AudioSourceError(f"{_MAX_WAITING_S} s of audio wait: the server is too slow")

    def stop(self) -> None:
        """End the audio. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._chunks.put_nowait, None)

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            stream = self._sounddevice.RawInputStream(
                samplerate=SAMPLE_RATE_HZ,
                blocksize=_MICROPHONE_BLOCK_SAMPLES,
                channels=1,
                dtype="int16",
                device=self._device,
                callback=self._on_audio,
            )
        except (self._sounddevice.PortAudioError, ValueError) as err:
            raise AudioSourceError(f"no microphone: {err}") from err
        with stream:
            yield

    def _on_audio(self, data: Any, num_samples: int, time: Any, status: Any) -> None:
        """Take a chunk, on PortAudio's thread."""
        self._loop.call_soon_threadsafe(self._put, bytes(data))

    def _put(self, chunk: bytes) -> None:
        if self._chunks.qsize() * len(chunk) > _MAX_WAITING_S * BYTES_PER_SECOND:
            if not self._has_overflowed:
                self._has_overflowed = True
                self._chunks.put_nowait(None)
        else:
            self._chunks.put_nowait(chunk)


def _import_sounddevice() -> Any:
    try:
        import sounddevice
    except ImportError as err:
        raise AudioSourceError("the microphone needs sounddevice: pip install sounddevice") from err
    except OSError as err:  # PortAudio's library is missing.
        raise AudioSourceError(
            f"the microphone needs PortAudio ({err}); on Debian: apt-get install libportaudio2"
        ) from err
    return sounddevice
