"""Cut a session's audio into turns: where somebody speaks, an utterance begins, and ends with it.

In: samples. Out: utterances begun, fed and ended, and what the client is told of them. Without turn
detection it does nothing: the client then says where utterances end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from voxlite.server.protocol.messages import (
    IdleTimeout,
    SessionEvent,
    SpeechStarted,
    SpeechStopped,
)
from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ
from voxlite.server.session.held_audio import AudioPiece
from voxlite.server.session.session_config import TurnDetection
from voxlite.server.session.turn_detection import Started, Stopped, TimedOut, TurnDetector
from voxlite.server.session.turn_gate import Step, TurnGate
from voxlite.server.session.utterances import Utterances
from voxlite.server.session.voice_activity import VoiceModel

Samples = NDArray[np.float32]


class Turns:
    """One session's turns, while its client wants them detected."""

    def __init__(
        self,
        utterances: Utterances,
        emit: Callable[[SessionEvent], None],
        voice_model: VoiceModel,
        voice_executor: Executor,
        token_ms: int,
    ) -> None:
        self._utterances = utterances
        self._emit = emit
        self._voice_model = voice_model
        self._voice_executor = voice_executor
        self._token_ms = token_ms
        self._gate: TurnGate | None = None

    @property
    def are_detected(self) -> bool:
        return self._gate is not None

    @property
    def is_speaking(self) -> bool:
        """Whether a turn is open that a silence will end."""
        return self._gate is not None and self._gate.is_speaking

    @property
    def max_silence_s(self) -> float:
        """The longest silence that a turn can have at its end."""
        assert self._gate is not None
        return self._gate.max_silence_s

    def listen(self, detection: TurnDetection | None, position: int) -> None:
        """Listen for turns from here on; what is open is a turn that the next silence ends."""
        self._gate = None
        if detection is not None:
            is_speaking = self._utterances.open is not None
            self._gate = TurnGate(
                TurnDetector(detection, position, is_speaking),
                self._voice_model.new_stream(),
                self._voice_executor,
            )

    async def push(self, samples: Samples, deadline_s: float) -> None:
        """Take samples.

        Raises:
            VoxliteError: the engine didn't take them; turn events may be lost with them.
        """
        assert self._gate is not None
        for step in await self._gate.push(samples, self._padding_ms()):
            await self._take_step(step, deadline_s)

    async def release(self, deadline_s: float) -> None:
        """Feed all that is held back, whether it is speech or not."""
        if self._gate is not None:
            await self._utterances.feed(self._gate.release(), deadline_s)

    def end(self, position: int) -> None:
        """End the open turn, or an empty one."""
        item = self._utterances.open or self._utterances.begin(position)
        self._emit(SpeechStopped(item_id=item.item_id, end_ms=_ms(position)))
        self._utterances.commit(position)

    def _padding_ms(self) -> int:
        item = self._utterances.open
        return 0 if item is None else item.num_padding_tokens * self._token_ms

    async def _take_step(self, step: Step, deadline_s: float) -> None:
        match step:
            case Started(position):
                item = self._utterances.begin(position)
                self._emit(SpeechStarted(item_id=item.item_id, start_ms=_ms(position)))
            case AudioPiece():
                await self._utterances.feed(step, deadline_s)
            case Stopped(position):
                self.end(position)
            case TimedOut(start, end):
                item = self._utterances.begin(end)
                self._emit(IdleTimeout(item_id=item.item_id, start_ms=_ms(start), end_ms=_ms(end)))
                self._utterances.commit(end)


def _ms(position: int) -> int:
    return position * 1000 // SAMPLE_RATE_HZ
