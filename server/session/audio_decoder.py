"""Turn a client's bytes into what the engine takes: float32 samples at 16 kHz.

In: bytes in an `AudioFormat`, cut anywhere, in the middle of a sample too. Out: samples, the same
for every way of cutting.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.audio.resampler import Resampler
from voxlite.engine.errors import InvalidInput
from voxlite.server.session.session_config import AudioFormat, Encoding

SAMPLE_RATE_HZ: Final = 16_000

Samples = NDArray[np.float32]


def _mulaw_table() -> Samples:
    """G.711 u-law: inverted bits, sign, 3 bits of exponent, 4 of mantissa, a bias of 33."""
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (code >> 4) & 7, (code & 15).astype(np.int32)
    magnitude = (((2 * mantissa + 33) << exponent) - 33) * 4
    return (np.where(code & 0x80, -magnitude, magnitude) / 32_768).astype(np.float32)


def _alaw_table() -> Samples:
    """G.711 A-law: every other bit inverted, sign, 3 bits of exponent, 4 of mantissa."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = ((code >> 4) & 7).astype(np.int32), (code & 15).astype(np.int32)
    linear = 2 * mantissa + 1
    magnitude = np.where(exponent == 0, linear, (linear + 32) << np.maximum(exponent - 1, 0)) * 8
    return (np.where(code & 0x80, magnitude, -magnitude) / 32_768).astype(np.float32)


_G711_TABLES: Final = {Encoding.MULAW: _mulaw_table(), Encoding.ALAW: _alaw_table()}
# The type of a sample as it is written, and what a full-scale one is divided by.
_LINEAR: Final = {
    Encoding.PCM_S16LE: ("<i2", 2.0**15),
    Encoding.PCM_S32LE: ("<i4", 2.0**31),
    Encoding.PCM_F16LE: ("<f2", 1.0),
    Encoding.PCM_F32LE: ("<f4", 1.0),
}


class AudioDecoder:
    """Decode and resample one stream."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self.audio_format = audio_format
        self._rest = b""
        self._resampler = Resampler(audio_format.rate_hz, SAMPLE_RATE_HZ)
        self._is_flushed = True

    @property
    def bytes_per_second(self) -> int:
        return self.audio_format.rate_hz * self._bytes_per_sample

    @property
    def _bytes_per_sample(self) -> int:
        if self.audio_format.encoding in _G711_TABLES:
            return 1
        return np.dtype(_LINEAR[self.audio_format.encoding][0]).itemsize

    def push(self, data: bytes) -> Samples:
        """Decode bytes, keeping those of an unfinished sample for the next call.

        Raises:
            InvalidInput: a value isn't finite; nothing was taken.
        """
        data = self._rest + data
        num_whole_bytes = len(data) // self._bytes_per_sample * self._bytes_per_sample
        samples = self._decode(data[:num_whole_bytes])
        if not np.isfinite(samples).all():
            raise InvalidInput(f"sample {int(np.argmin(np.isfinite(samples)))} is not finite")
        self._rest = data[num_whole_bytes:]
        self._is_flushed = False
        return self._resampler.push(np.clip(samples, -1.0, 1.0))

    def skip(self, data: bytes) -> None:
        """Drop bytes, keeping only where the next sample begins."""
        data = self._rest + data
        self._rest = data[len(data) // self._bytes_per_sample * self._bytes_per_sample :]

    def flush(self) -> Samples:
        """Return what the resampler still holds. The stream goes on as a new one afterwards."""
        if self._is_flushed:
            return np.zeros(0, np.float32)
        rest = self._resampler.flush()
        self._resampler = Resampler(self.audio_format.rate_hz, SAMPLE_RATE_HZ)
        self._is_flushed = True
        return rest

    def _decode(self, data: bytes) -> Samples:
        encoding = self.audio_format.encoding
        if encoding in _G711_TABLES:
            decoded: Samples = _G711_TABLES[encoding][np.frombuffer(data, np.uint8)]
            return decoded
        dtype, full_scale = _LINEAR[encoding]
        return np.frombuffer(data, dtype).astype(np.float32) / np.float32(full_scale)
