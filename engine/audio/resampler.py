"""Resample a stream to the model's rate, with state carried from chunk to chunk (soxr)."""

from __future__ import annotations

from typing import Final

import numpy as np
import soxr
from numpy.typing import NDArray

from voxlite.engine.errors import InvalidInput

MIN_RATE_HZ: Final = 1_000
MAX_RATE_HZ: Final = 768_000


class Resampler:
    """Resample mono float32 audio; the result doesn't depend on how the input was cut."""

    def __init__(self, input_rate_hz: int, output_rate_hz: int = 16_000) -> None:
        """Make a resampler; equal rates pass samples through.

        Raises:
            InvalidInput: the input rate is out of range.
        """
        if not MIN_RATE_HZ <= input_rate_hz <= MAX_RATE_HZ:
            raise InvalidInput(
                f"sampling rate of {input_rate_hz} Hz: {MIN_RATE_HZ} to {MAX_RATE_HZ} is possible"
            )
        self._stream = (
            None
            if input_rate_hz == output_rate_hz
            else soxr.ResampleStream(input_rate_hz, output_rate_hz, 1, dtype="float32")
        )

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take samples (n,) and return those (m,) at the output rate that are ready."""
        return self._run(samples, last=False)

    def flush(self) -> NDArray[np.float32]:
        """Return the rest after the last chunk. Nothing may be pushed afterwards."""
        return self._run(np.zeros(0, np.float32), last=True)

    def _run(self, samples: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        if self._stream is None:
            return samples
        resampled: NDArray[np.float32] = self._stream.resample_chunk(samples, last=last)
        return resampled
