"""Audio that has been received and not handed on yet, addressed by its position in the stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Samples, and where in the stream they begin."""

    position: int
    samples: Samples


class HeldAudio:
    """Samples [start, end) of a stream."""

    def __init__(self, position: int) -> None:
        self.start = position
        self._samples: Samples = np.zeros(0, np.float32)

    @property
    def end(self) -> int:
        return self.start + len(self._samples)

    def push(self, samples: Samples) -> None:
        """Add samples at the end."""
        self._samples = np.concatenate((self._samples, samples))

    def take_until(self, position: int) -> AudioPiece:
        """Remove and return the samples before a position."""
        num_taken = min(max(position - self.start, 0), len(self._samples))
        taken = AudioPiece(self.start, self._samples[:num_taken])
        self._samples = self._samples[num_taken:]
        self.start += num_taken
        return taken
