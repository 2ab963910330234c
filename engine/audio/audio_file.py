"""Read an audio file as the model wants it: mono float32 at 16 kHz, in pieces.

In: a path or an open binary file in any format that libsndfile reads, or raw PCM16. Out: pieces of
about a second, so that a file of any length needs little memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from voxlite.engine.audio.resampler import Resampler
from voxlite.engine.errors import InvalidInput

_PCM16_SCALE: Final = 32_768
_PIECE_SAMPLES: Final = 16_000
_RIFF_HEADER_BYTES: Final = 12
_CHUNK_HEADER_BYTES: Final = 8
_UNKNOWN_SIZE: Final = b"\xff" * 4


class AudioFile:
    """An open audio file: `num_samples` is an estimate at 16 kHz, None where the header lies."""

    def __init__(self, source: str | Path | BinaryIO) -> None:
        """Open a file.

        Raises:
            InvalidInput: it can't be opened or isn't audio.
        """
        if isinstance(source, str | Path):
            if Path(source).is_dir():
                raise InvalidInput("a folder, not an audio file")
            if not Path(source).exists():
                raise InvalidInput("no such file")
        try:
            self._file = _open(source)
        except soundfile.LibsndfileError as err:
            raise InvalidInput(f"not a readable audio file: {err.error_string}") from err
        except (OSError, TypeError) as err:
            raise InvalidInput(f"not a readable audio file: {err}") from err
        rate, frames = self._file.samplerate, self._file.frames
        self._resampler = Resampler(rate)
        # libsndfile reports a huge count for a stream whose header was never completed.
        is_plausible = 0 < frames < 2**40
        self.num_samples = round(frames * 16_000 / rate) if is_plausible else None

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """Yield mono pieces (n,) at 16 kHz until the end. Values that aren't finite become 0.

        Raises:
            InvalidInput: the data can't be decoded; pieces before it have been yielded. Or there
                was none at all.
        """
        is_empty = True
        with self._file:
            while len(piece := self._read()):
                is_empty = False
                finite = np.nan_to_num(piece, posinf=0.0, neginf=0.0)
                yield self._resampler.push(finite.mean(axis=1, dtype=np.float32))
        if is_empty:
            raise InvalidInput("no audio in this file")
        yield self._resampler.flush()

    def _read(self) -> NDArray[np.float32]:
        try:
            piece: NDArray[np.float32] = self._file.read(
                _PIECE_SAMPLES, dtype="float32", always_2d=True
            )
        except (soundfile.SoundFileError, RuntimeError) as err:
            raise InvalidInput(f"damaged audio: {err}") from err
        return piece


class _ForwardOnly(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read from start to end: SoundFile seeks after each read where it can.

    That fails in a FLAC stream of unknown length, and gains nothing elsewhere.
    """

    def seekable(self) -> bool:
        return False


def _open(source: str | Path | BinaryIO) -> soundfile.SoundFile:
    """Open a file with libsndfile, which takes a WAV whose size was never filled in for empty."""
    file = _ForwardOnly(source)
    if file.frames > 0 or file.format not in ("WAV", "WAVEX"):
        return file
    file.close()
    with TemporaryFile() as copy:
        if isinstance(source, str | Path):
            with open(source, "rb") as original:
                shutil.copyfileobj(original, copy)
        else:
            source.seek(0)
            shutil.copyfileobj(source, copy)
        _fill_in_size(copy)
        copy.seek(0)
        return _ForwardOnly(os.dup(copy.fileno()))  # which closes it


def _fill_in_size(wav: BinaryIO) -> None:
    """Mark the size of a WAV's data chunk as unknown if it says 0 although audio follows.

    Recorders and pipes write the header first and can't come back to fill it in. What follows an
    empty data chunk is either more chunks, which end where the file ends, or audio:

        "data" 0 | "LIST" 26 ... end of file        empty
        "data" 0 | samples, read as name and size   unfilled
    """
    end = wav.seek(0, os.SEEK_END)
    size_offset = None
    position = _RIFF_HEADER_BYTES
    while position + _CHUNK_HEADER_BYTES <= end:
        wav.seek(position)
        name, size = wav.read(4), int.from_bytes(wav.read(4), "little")
        if size_offset is not None and not (name.isascii() and name.decode().isprintable()):
            break
        if name == b"data":
            if size > 0:
                return
            size_offset = position + 4
        position += _CHUNK_HEADER_BYTES + size + size % 2
    if size_offset is not None and position != end:
        wav.seek(size_offset)
        wav.write(_UNKNOWN_SIZE)
        wav.flush()


def read_audio(source: str | Path | BinaryIO) -> Iterator[NDArray[np.float32]]:
    """Yield a file's audio as mono float32 pieces (n,) at 16 kHz.

    Raises:
        InvalidInput: it isn't audio (raised at once) or is damaged (raised on the way).
    """
    return AudioFile(source).pieces()


def read_pcm16(stream: BinaryIO) -> Iterator[NDArray[np.float32]]:
    """Yield raw PCM16 mono at 16 kHz as float32 pieces (n,); an odd last byte is dropped.

    Raises:
        InvalidInput: it is a WAV file.
    """
    rest = b""
    is_first = True
    while chunk := stream.read(4096):
        if is_first and chunk.startswith(b"RIFF"):
            raise InvalidInput("a WAV file where raw PCM16 is read; name the file instead")
        is_first = False
        chunk = rest + chunk
        whole = len(chunk) // 2 * 2
        rest = chunk[whole:]
        yield pcm16_to_float(chunk[:whole])


def pcm16_to_float(data: bytes) -> NDArray[np.float32]:
    """Turn little-endian PCM16, an even number of bytes, into float32 in [-1, 1)."""
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(_PCM16_SCALE)
