"""One client's transcription, whatever protocol it speaks: audio and commands in, events out.

In: commands, and the engine's events, all on the event loop. Out: session events, through `emit`.
It knows nothing of sockets or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.config import SessionOptions
from voxlite.engine.errors import EngineFailure, Overloaded, VoxliteError
from voxlite.engine.events import Event, SessionEnded, TextDelta, UtteranceDone
from voxlite.server.async_engine import AsyncEngine
from voxlite.server.errors import fault_of
from voxlite.server.protocol.messages import Cleared, SessionEvent
from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ, AudioDecoder
from voxlite.server.session.held_audio import AudioPiece
from voxlite.server.session.items import Items
from voxlite.server.session.session_config import SessionConfig
from voxlite.server.session.stall_timer import StallTimer
from voxlite.server.session.turns import Turns
from voxlite.server.session.utterances import Utterances
from voxlite.server.session.voice_activity import VoiceModel

logger = logging.getLogger(__name__)

# A client that falls silent by sending nothing has ended its turn this much later than one that
# goes on sending silence.
_STALL_S: Final = 1.0

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionServices:
    """What all sessions share."""

    engine: AsyncEngine
    voice_model: VoiceModel
    voice_executor: Executor
    max_append_wait_s: float


class TranscriptionSession:
    """Transcribe one stream of audio, cut into utterances by the client or by its turns."""

    def __init__(
        self,
        services: SessionServices,
        config: SessionConfig,
        emit: Callable[[SessionEvent], None],
        on_end: Callable[[VoxliteError | None], None],
    ) -> None:
        """Open a session of the engine.

        Args:
            emit: called with each event.
            on_end: called once when the engine has ended the session, with what went wrong.

        Raises:
            InvalidInput, Overloaded, EngineFailure: as `AsyncEngine.open`.
        """
        self._services = services
        self._emit = emit
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._engine_session = services.engine.open(_options(config), self._take_event)
        engine = services.engine.ready
        self._items = Items(new_id, engine.tokenizer.token_bytes)
        self._utterances = Utterances(self._engine_session, self._items, config, emit)
        self._turns = Turns(
            self._utterances,
            emit,
            services.voice_model,
            services.voice_executor,
            engine.model_config.audio.token_ms,
        )
        self._decoder = AudioDecoder(config.audio_format)
        self._position = 0  # samples at 16 kHz that the client has appended
        self._turns.listen(config.turn_detection, self._position)
        self._stall_timer = StallTimer(lambda: self._end_stalled_turn(self._position))
        # One command at a time; the engine's events come in between.
        self._lock = asyncio.Lock()
        self._has_news = asyncio.Event()
        self._has_ended = False
        self.last_activity_s = self._loop.time()

    @property
    def config(self) -> SessionConfig:
        return self._utterances.config

    @property
    def engine_session_id(self) -> int:
        return self._engine_session.session_id

    @property
    def lag_s(self) -> float:
        """Audio that the engine was given and hasn't taken up yet."""
        return self._engine_session.num_buffered_samples / SAMPLE_RATE_HZ

    @property
    def is_waiting_for_text(self) -> bool:
        """Whether text of committed audio is still to come."""
        return self._items.are_waiting_for_text and not self._has_ended

    async def append(self, data: bytes) -> None:
        """Take audio, waiting while the engine has no room for more.

        Raises:
            InvalidInput: it isn't finite; the part from there on was refused.
            Overloaded: there was no room for it in time; so was the rest. It says how much.
        """
        async with self._lock:
            deadline_s = self._deadline_s()
            if data:
                self.last_activity_s = self._loop.time()
            piece_bytes = self._decoder.bytes_per_second
            for start in range(0, len(data), piece_bytes):
                piece = data[start : start + piece_bytes]
                try:
                    await self._take_audio(self._decoder.push(piece), deadline_s)
                except VoxliteError as err:
                    self._decoder.skip(data[start + piece_bytes :])
                    if not isinstance(err, Overloaded):
                        raise
                    lost_s, all_s = (n / piece_bytes for n in (len(data) - start, len(data)))
                    lost = f"{lost_s:.2f} of {all_s:.2f} s were not taken"
                    raise Overloaded(f"{lost}: {err}") from err
                if start + piece_bytes < len(data):
                    await asyncio.sleep(0)  # a long append must not hold up the others
            self._watch_for_stall()

    async def commit(self) -> None:
        """End the utterance. Without audio since the last one, its text is empty.

        Raises:
            Overloaded: too many utterances are waiting for their text.
        """
        async with self._lock:
            deadline_s = self._deadline_s()
            await self._utterances.wait_for_fewer(deadline_s)
            await self._take_audio(self._decoder.flush(), deadline_s)
            await self._turns.release(deadline_s)
            self._utterances.commit(self._position)
            self._listen_for_turns()

    async def finish(self) -> None:
        """End the last utterance, if there is one, and wait for all text."""
        await self.drain(is_forced=not self._items.has_been_committed)

    async def drain(self, is_forced: bool = False) -> None:
        """End the open utterance, if there is one, and wait for all text."""
        if self._items.open is not None or is_forced:
            await self.commit()
        await self.wait_for_text()

    async def wait_for_text(self) -> None:
        """Wait for all text of what has been committed."""
        while self._items.num_committed > 0 and not self._has_ended:
            self._has_news.clear()
            await self._has_news.wait()

    async def clear(self) -> None:
        """Forget the audio that isn't committed."""
        async with self._lock:
            self._decoder.flush()
            self._utterances.discard()
            self._listen_for_turns()
            self._emit(Cleared())

    async def configure(self, config: SessionConfig) -> None:
        """Change the configuration. The delay and log probabilities hold from the next item on."""
        async with self._lock:
            deadline_s = self._deadline_s()
            if _options(config) != _options(self.config):
                self._engine_session.configure(_options(config))
            if config.audio_format != self.config.audio_format:
                await self._take_audio(self._decoder.flush(), deadline_s)
                self._decoder = AudioDecoder(config.audio_format)
            if config.turn_detection != self.config.turn_detection:
                await self._turns.release(deadline_s)
                self._turns.listen(config.turn_detection, self._position)
            self._utterances.config = config

    def close(self) -> None:
        """End now; no event comes after this."""
        self._has_ended = True
        self._has_news.set()
        self._stall_timer.cancel()
        self._engine_session.close()

    def _deadline_s(self) -> float:
        """Return the event loop's time until which a command that begins now may wait for room."""
        return self._loop.time() + self._services.max_append_wait_s

    async def _take_audio(self, samples: Samples, deadline_s: float) -> None:
        if len(samples) == 0:
            return
        if not self._turns.are_detected:
            await self._utterances.feed(AudioPiece(self._position, samples), deadline_s)
            self._position += len(samples)
            return
        self._position += len(samples)
        try:
            await self._turns.push(samples, deadline_s)
        except VoxliteError:
            # Audio was lost, and turn events with it: listen anew from here on.
            self._listen_for_turns()
            raise

    def _listen_for_turns(self) -> None:
        self._turns.listen(self.config.turn_detection, self._position)

    def _watch_for_stall(self) -> None:
        self._stall_timer.cancel()
        if self._turns.is_speaking and not self._has_ended:
            self._stall_timer.restart(self._turns.max_silence_s + _STALL_S)

    async def _end_stalled_turn(self, position: int) -> None:
        """End the open turn, unless audio has come since the timer ran out at `position`."""
        async with self._lock:
            if not self._turns.is_speaking or self._position != position:
                return
            try:
                await self._turns.release(self._deadline_s())
                self._turns.end(position)
                self._listen_for_turns()
            except VoxliteError as err:
                logger.warning("session %d: turn not ended: %s", self.engine_session_id, err)

    def _take_event(self, event: Event) -> None:
        """Take what the engine says, on the event loop."""
        if self._has_ended:
            return
        try:
            self._handle(event)
        except Exception:
            # A fault of ours in one session's bookkeeping ends that session alone.
            logger.exception("session %d failed", self.engine_session_id)
            self.close()
            self._on_end(EngineFailure("internal error; the log has more"))
        self._has_news.set()
        self._utterances.engine_feed.note_progress()

    def _handle(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.last_activity_s = self._loop.time()
                self._emit_all(self._items.take_delta(event))
            case UtteranceDone():
                self._emit_all(self._items.take_done(event))
            case SessionEnded(error=error):
                self._has_ended = True
                if error is not None:
                    self._emit_all(self._items.fail(fault_of(error), str(error)))
                self._on_end(error)

    def _emit_all(self, events: Iterable[SessionEvent]) -> None:
        for event in events:
            self._emit(event)


def new_id(prefix: str) -> str:
    """Make an identifier that wasn't given before."""
    return f"{prefix}_{secrets.token_hex(10)}"


def _options(config: SessionConfig) -> SessionOptions:
    return SessionOptions(delay_ms=config.delay_ms, logprobs=config.has_logprobs)
