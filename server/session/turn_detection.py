"""Find the turns in a stream: when speech starts, when it has ended.

In: speech probabilities, one per window of 32 ms, and how long the model has been writing padding.
Out: events with positions in samples. Bookkeeping only: no audio, no model, no clock.

    probability   .1 .1 .9 .8 .9 .3 .2 .1 .1 .1 .1 ...
                       |<- speech ->|
            started ---'            |<- silence ->|--- stopped
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ
from voxlite.server.session.session_config import Eagerness, SemanticVad, ServerVad, TurnDetection
from voxlite.server.session.voice_activity import WINDOW_SAMPLES

# Speech goes on until the probability falls this far below the threshold that starts it.
_HYSTERESIS: Final = 0.15
# What semantic_vad has in common with server_vad.
_SEMANTIC_BASE: Final = ServerVad()
# After a silence of `silence_duration_ms`, how much padding the model must have written last ...
_PADDING_MS: Final = {
    Eagerness.LOW: 1_920,
    Eagerness.MEDIUM: 960,
    Eagerness.AUTO: 960,
    Eagerness.HIGH: 480,
}
# ... and after how long a silence a turn ends anyway (OpenAI's documented waits).
_MAX_SILENCE_MS: Final = {
    Eagerness.LOW: 8_000,
    Eagerness.MEDIUM: 4_000,
    Eagerness.AUTO: 4_000,
    Eagerness.HIGH: 2_000,
}


@dataclass(frozen=True, slots=True)
class Started:
    """Speech started; `position` includes the padding before it."""

    position: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Speech has ended; `position` includes the silence that told so."""

    position: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Nobody spoke from `start` to `end`."""

    start: int
    end: int


TurnEvent = Started | Stopped | TimedOut


class TurnDetector:
    """Follow one stream from turn to turn."""

    def __init__(self, config: TurnDetection, position: int, is_speaking: bool = False) -> None:
        """Start at a position.

        Args:
            is_speaking: a turn is open already, to be ended by the next silence.
        """
        self._vad = config if isinstance(config, ServerVad) else _SEMANTIC_BASE
        self._eagerness = config.eagerness if isinstance(config, SemanticVad) else None
        self._position = position
        self._first_possible = position
        self._last_speech = position
        self._idle_since = position
        self.is_speaking = is_speaking

    @property
    def position(self) -> int:
        return self._position

    @property
    def prefix_samples(self) -> int:
        """Samples before speech that belong to it."""
        return _samples(self._vad.prefix_padding_ms)

    @property
    def max_silence_s(self) -> float:
        """The longest silence that a turn can have at its end."""
        if self._eagerness is None:
            return self._vad.silence_duration_ms / 1000
        return _MAX_SILENCE_MS[self._eagerness] / 1000

    def push(self, probability: float, padding_ms: int) -> TurnEvent | None:
        """Take the next window's probability.

        Args:
            padding_ms: how long the model has been writing nothing but padding.
        """
        window_start = self._position
        self._position += WINDOW_SAMPLES
        if self.is_speaking:
            return self._push_speaking(probability, padding_ms)
        return self._push_silent(probability, window_start)

    def _push_speaking(self, probability: float, padding_ms: int) -> Stopped | None:
        if probability >= self._vad.threshold - _HYSTERESIS:
            self._last_speech = self._position
            return None
        silence = self._position - self._last_speech
        if not self._is_over(silence, padding_ms):
            return None
        self.is_speaking = False
        self._first_possible = self._idle_since = self._position
        return Stopped(self._position)

    def _is_over(self, silence: int, padding_ms: int) -> bool:
        if silence < _samples(self._vad.silence_duration_ms):
            return False
        if self._eagerness is None:
            return True
        is_padding = padding_ms >= _PADDING_MS[self._eagerness]
        return is_padding or silence >= _samples(_MAX_SILENCE_MS[self._eagerness])

    def _push_silent(self, probability: float, window_start: int) -> Started | TimedOut | None:
        if probability >= self._vad.threshold:
            self.is_speaking = True
            self._last_speech = self._position
            return Started(max(self._first_possible, window_start - self.prefix_samples))
        timeout_ms = self._vad.idle_timeout_ms
        if timeout_ms is None or self._position - self._idle_since < _samples(timeout_ms):
            return None
        timed_out = TimedOut(self._idle_since, self._position)
        self._idle_since = self._position
        return timed_out


def _samples(duration_ms: int) -> int:
    return duration_ms * SAMPLE_RATE_HZ // 1000
