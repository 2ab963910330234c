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
from voxlite.server.protocol.messages import (
    Cleared,
    IdleTimeout,
    SessionEvent,
    SpeechStarted,
    SpeechStopped,
)
from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ, AudioDecoder
from voxlite.server.session.engine_feed import EngineFeed
from voxlite.server.session.held_audio import AudioPiece
from voxlite.server.session.items import Item, Items
from voxlite.server.session.session_config import SessionConfig, TurnDetection
from voxlite.server.session.turn_detection import Started, Stopped, TimedOut, TurnDetector
from voxlite.server.session.turn_gate import Step, TurnGate
from voxlite.server.session.voice_activity import VoiceModel

logger = logging.getLogger(__name__)

_MAX_WAITING_ITEMS: Final = 256
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
        self.config = config
        self._services = services
        self._emit = emit
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._engine_session = services.engine.open(_options(config), self._take_event)
        engine = services.engine.ready
        self._items = Items(new_id, engine.tokenizer.token_bytes)
        self._token_ms = engine.model_config.audio.token_ms
        self._decoder = AudioDecoder(config.audio_format)
        self._position = 0  # samples at 16 kHz that the client has appended
        self._gate = self._new_gate(config.turn_detection)
        self._engine_feed = EngineFeed(self._engine_session)
        # One command at a time; the engine's events come in between.
        self._lock = asyncio.Lock()
        self._has_news = asyncio.Event()
        self._has_ended = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stall_task: asyncio.Task[None] | None = None
        self.last_activity_s = self._loop.time()

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
            await self._wait_for_fewer_items(deadline_s)
            await self._take_audio(self._decoder.flush(), deadline_s)
            if self._gate is not None:
                await self._feed(self._gate.release(), deadline_s)
            self._commit_item()
            self._gate = self._new_gate(self.config.turn_detection)

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
            if self._items.open is not None:
                self._engine_session.discard()
                self._items.clear()
            self._gate = self._new_gate(self.config.turn_detection)
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
                await self._replace_gate(config, deadline_s)
            self.config = config

    def close(self) -> None:
        """End now; no event comes after this."""
        self._has_ended = True
        self._has_news.set()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._engine_session.close()

    def _deadline_s(self) -> float:
        """Return the event loop's time until which a command that begins now may wait for room."""
        return self._loop.time() + self._services.max_append_wait_s

    async def _replace_gate(self, config: SessionConfig, deadline_s: float) -> None:
        old, self._gate = self._gate, None
        if old is not None:
            await self._feed(old.release(), deadline_s)
        self._gate = self._new_gate(config.turn_detection)

    def _new_gate(self, turn_detection: TurnDetection | None) -> TurnGate | None:
        """Listen for turns from here on; what is open is a turn that the next silence ends."""
        if turn_detection is None:
            return None
        is_speaking = self._items.open is not None
        return TurnGate(
            TurnDetector(turn_detection, self._position, is_speaking),
            self._services.voice_model.new_stream(),
            self._services.voice_executor,
        )

    async def _take_audio(self, samples: Samples, deadline_s: float) -> None:
        if len(samples) == 0:
            return
        if self._gate is None:
            await self._feed(AudioPiece(self._position, samples), deadline_s)
            self._position += len(samples)
            return
        self._position += len(samples)
        try:
            for step in await self._gate.push(samples, self._padding_ms()):
                await self._take_step(step, deadline_s)
        except VoxliteError:
            # Audio was lost, and turn events with it: listen anew from here on.
            self._gate = self._new_gate(self.config.turn_detection)
            raise

    def _padding_ms(self) -> int:
        item = self._items.open
        return 0 if item is None else item.num_padding_tokens * self._token_ms

    async def _take_step(self, step: Step, deadline_s: float) -> None:
        match step:
            case Started(position):
                item = self._begin_item(position)
                self._emit(SpeechStarted(item_id=item.item_id, start_ms=_ms(position)))
            case AudioPiece():
                await self._feed(step, deadline_s)
            case Stopped(position):
                self._end_turn(position)
            case TimedOut(start, end):
                item = self._begin_item(end)
                self._emit(IdleTimeout(item_id=item.item_id, start_ms=_ms(start), end_ms=_ms(end)))
                self._commit_item()

    def _end_turn(self, position: int) -> None:
        item = self._items.open or self._begin_item(position)
        self._emit(SpeechStopped(item_id=item.item_id, end_ms=_ms(position)))
        self._commit_item()

    def _watch_for_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self._gate is not None and self._gate.is_speaking and not self._has_ended:
            wait_s = self._gate.max_silence_s + _STALL_S
            self._stall_timer = self._loop.call_later(wait_s, self._start_ending_stalled_turn)

    def _start_ending_stalled_turn(self) -> None:
        self._stall_task = self._loop.create_task(self._end_stalled_turn(self._position))

    async def _end_stalled_turn(self, position: int) -> None:
        async with self._lock:
            gate = self._gate
            if gate is None or not gate.is_speaking or self._position != position:
                return
            deadline_s = self._deadline_s()
            try:
                await self._feed(gate.release(), deadline_s)
                self._end_turn(position)
                self._gate = self._new_gate(self.config.turn_detection)
            except VoxliteError as err:
                logger.warning("session %d: turn not ended: %s", self.engine_session_id, err)

    def _begin_item(self, position: int) -> Item:
        clock_shift_s = (position - self._engine_feed.num_samples) / SAMPLE_RATE_HZ
        return self._items.begin(clock_shift_s, self.config)

    def _commit_item(self) -> None:
        if self._items.open is None:
            self._begin_item(self._position)
        self._engine_session.commit()
        self._emit_all(self._items.commit())

    async def _wait_for_fewer_items(self, deadline_s: float) -> None:
        while (num_items := self._items.num_committed) >= _MAX_WAITING_ITEMS:
            if not await self._engine_feed.wait_for_progress(deadline_s):
                raise Overloaded(
                    f"{num_items} utterances are waiting for their text, the most at once"
                )

    async def _feed(self, audio: AudioPiece, deadline_s: float) -> None:
        """Give the engine samples of the open item, which begins here if there is none."""
        if len(audio.samples) == 0:
            return
        item = self._items.open or self._begin_item(audio.position)
        item.has_audio = True
        await self._engine_feed.append(audio.samples, deadline_s)

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
        self._engine_feed.note_progress()

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


def _ms(position: int) -> int:
    return position * 1000 // SAMPLE_RATE_HZ
