"""Let through the audio of turns, and hold back the silence between them.

In: samples. Out: what to do with them, in order. The voice model runs off the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from voxlite.server.session.held_audio import AudioPiece, HeldAudio
from voxlite.server.session.turn_detection import Started, Stopped, TimedOut, TurnDetector
from voxlite.server.session.voice_activity import VoiceStream

Samples = NDArray[np.float32]
Step = Started | AudioPiece | Stopped | TimedOut


class TurnGate:
    """One stream's turns. What it holds is at most the padding before speech."""

    def __init__(self, detector: TurnDetector, voice: VoiceStream, executor: Executor) -> None:
        self._detector = detector
        self._voice = voice
        self._executor = executor
        self._held = HeldAudio(detector.position)

    @property
    def is_speaking(self) -> bool:
        return self._detector.is_speaking

    @property
    def max_silence_s(self) -> float:
        return self._detector.max_silence_s

    async def push(self, samples: Samples, padding_ms: int) -> list[Step]:
        """Take samples.

        Args:
            padding_ms: how long the model has been writing nothing but padding.
        """
        self._held.push(samples)
        loop = asyncio.get_running_loop()
        probabilities = await loop.run_in_executor(self._executor, self._voice.push, samples)
        return list(self._steps(probabilities, padding_ms))

    def release(self) -> AudioPiece:
        """Let through all that is held, whether it is speech or not."""
        return self._held.take_until(self._held.end)

    def _steps(self, probabilities: list[float], padding_ms: int) -> Iterator[Step]:
        detector, held = self._detector, self._held
        for probability in probabilities:
            event = detector.push(probability, padding_ms)
            match event:
                case Started(position):
                    held.take_until(position)
                    yield Started(held.start)
                case Stopped(position):
                    yield held.take_until(position)
                    yield event
                case TimedOut():
                    yield event
        if detector.is_speaking:
            yield held.take_until(detector.position)
        else:
            held.take_until(detector.position - detector.prefix_samples)
