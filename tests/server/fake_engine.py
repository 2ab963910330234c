"""An engine without a model: its text tells which audio it was given, in which order.

Each token of 80 ms is heard as a level, in steps of 1/32: level 7 is the word " w7". Level 0 is
padding, and so are a token in which the level changes and a level that was just written. Tokens,
prompt, padding and usage are counted as the real engine counts them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from voxlite.engine.config import (
    LEGAL_DELAYS_MS,
    STREAMING_PAD_ID,
    AudioConfig,
    SessionOptions,
    cdiv,
)
from voxlite.engine.errors import (
    EngineFailure,
    InvalidInput,
    Overloaded,
    SessionClosed,
    VoxliteError,
)
from voxlite.engine.events import Event, SessionEnded, TextDelta, Usage, UtteranceDone, Word
from voxlite.engine.inbox import (
    AppendSamples,
    Close,
    Discard,
    EngineCommand,
    Flush,
    InboxBudget,
    SetOptions,
)
from voxlite.engine.session import Session
from voxlite.engine.stats import EngineStats

AUDIO = AudioConfig()
LEVEL = 1 / 32
FIRST_TEXT_ID = 1000
FAILING_LEVEL = 30


def tone(*levels: int, num_tokens: int = 1) -> np.ndarray:
    """Return audio that the fake hears as these levels, each for `num_tokens` tokens."""
    return np.repeat(np.array(levels, np.float32) * LEVEL, num_tokens * AUDIO.samples_per_token)


def pcm16(samples: np.ndarray) -> bytes:
    return (samples * 32768).clip(-32768, 32767).round().astype("<i2").tobytes()


def _level(heard: np.ndarray) -> int | None:
    """Return the level of a token's samples, None if it isn't one level throughout."""
    if not len(heard):
        return 0
    level = round(float(heard.mean()) / LEVEL)
    return level if np.abs(heard - level * LEVEL).max() < 0.4 * LEVEL else None


class _FakeSession:
    """What the engine's thread knows of one session."""

    def __init__(self, options: SessionOptions, on_event: Callable, budget: InboxBudget) -> None:
        self.options = options
        self.on_event = on_event
        self.budget = budget
        self.num_samples = 0
        self.num_utterances = 0
        self.begin()

    def begin(self) -> None:
        self.audio = np.zeros(0, np.float32)  # from the first token that isn't written
        self.first_sample = self.num_samples
        self.num_written = 0
        self.last_level = 0
        self.delay_ms = self.options.delay_ms or AUDIO.default_delay_ms


class FakeEngine:
    """Implements what the server uses of `engine.engine.Engine`."""

    default_delay_ms = AUDIO.default_delay_ms
    legal_delays_ms = LEGAL_DELAYS_MS
    model_config: Any = SimpleNamespace(audio=AUDIO)

    def __init__(self, max_sessions: int = 4, max_buffered_s: float = 60.0) -> None:
        self.tokenizer = self
        self.max_sessions = max_sessions
        self.max_buffered_s = max_buffered_s
        self.running = threading.Event()  # cleared: the engine's thread hangs in a step
        self.running.set()
        self.delays_ms: list[int] = []
        self.num_steps = self.num_samples_in = self.num_tokens_out = self.num_discarded = 0
        self.failure: EngineFailure | None = None
        self._sessions: dict[int, _FakeSession] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._seats = threading.Semaphore(max_sessions)
        self._ids = count()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def num_taken_seats(self) -> int:
        return self.max_sessions - self._seats._value

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.running.set()
        self._inbox.put(None)
        self._thread.join()

    def token_bytes(self, token_id: int) -> bytes:
        return f" w{token_id - FIRST_TEXT_ID}".encode() if token_id >= FIRST_TEXT_ID else b""

    def stats(self) -> EngineStats:
        return EngineStats(
            num_sessions=len(self._sessions),
            max_sessions=self.max_sessions,
            num_steps=self.num_steps,
            num_samples_in=self.num_samples_in,
            num_tokens_out=self.num_tokens_out,
            num_passes=self.num_tokens_out,
            num_drafted_tokens=0,
            num_free_encoder_blocks=self.max_sessions - len(self._sessions),
            num_free_decoder_blocks=self.max_sessions - len(self._sessions),
            num_given_up_blocks=0,
            step_age_s=None,
            failure=self.failure,
        )

    def _check_options(self, options: SessionOptions) -> None:
        if options.delay_ms is not None and options.delay_ms not in LEGAL_DELAYS_MS:
            raise InvalidInput(f"delay of {options.delay_ms} ms")

    def open(self, options: SessionOptions, on_event: Callable[[Event], None]) -> Session:
        self._check_options(options)
        if not self._seats.acquire(blocking=False):
            raise Overloaded(f"all {self.max_sessions} sessions are in use; try again later")
        budget = InboxBudget(int(self.max_buffered_s * AUDIO.sampling_rate_hz))
        id_ = next(self._ids)
        self._inbox.put((id_, _FakeSession(options, on_event, budget)))
        return Session(
            id_, budget, lambda command: self._inbox.put((id_, command)), self._check_options
        )

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            self.running.wait()
            self._apply(*message)
        for id_ in list(self._sessions):
            self._end(id_, None)

    def _apply(self, id_: int, item: _FakeSession | EngineCommand) -> None:
        if isinstance(item, _FakeSession):
            self._sessions[id_] = item
            return
        session = self._sessions.get(id_)
        if session is None:
            return
        if not isinstance(item, Close):
            session.budget.release(len(item.samples) if isinstance(item, AppendSamples) else 0)
        match item:
            case AppendSamples(samples):
                session.num_samples += len(samples)
                self.num_samples_in += len(samples)
                session.audio = np.concatenate((session.audio, samples))
                self._write(id_, session, is_flushed=False)
            case Flush(ends_session):
                self._write(id_, session, is_flushed=True)
                self._finish_utterance(id_, session)
                if ends_session:
                    self._end(id_, None)
            case Discard():
                self.num_discarded += 1
                self._finish_utterance(id_, session)
            case SetOptions(options):
                session.options = options
                if session.num_samples == session.first_sample:
                    session.begin()
            case Close():
                self._end(id_, None)

    def _write(self, id_: int, session: _FakeSession, *, is_flushed: bool) -> None:
        num_samples = session.num_samples - session.first_sample
        if not num_samples:
            return
        if session.num_written == 0:
            self.delays_ms.append(session.delay_ms)
        num_delay = session.delay_ms // AUDIO.token_ms
        num_whole = num_samples // AUDIO.samples_per_token
        num_tokens = cdiv(num_samples, AUDIO.samples_per_token)
        until = num_tokens + AUDIO.num_buffer_tokens if is_flushed else num_whole - num_delay
        while session.num_written < until and id_ in self._sessions:
            self._write_token(id_, session)

    def _write_token(self, id_: int, session: _FakeSession) -> None:
        start = session.num_written * AUDIO.samples_per_token
        heard = session.audio[: AUDIO.samples_per_token]
        session.audio = session.audio[AUDIO.samples_per_token :]
        level = _level(heard)
        if level == FAILING_LEVEL:
            return self._end(id_, EngineFailure("the step failed"))
        session.num_written += 1
        self.num_tokens_out += 1
        self.num_steps += 1
        is_word = level is not None and level > 0 and level != session.last_level
        session.last_level = session.last_level if level is None else level
        token_id = FIRST_TEXT_ID + level if is_word else STREAMING_PAD_ID
        text = f" w{level}" if is_word else ""
        end_s = (session.first_sample + start) / AUDIO.sampling_rate_hz + AUDIO.token_s
        word = Word(text=text, start_s=end_s - AUDIO.token_s, end_s=end_s)
        session.on_event(
            TextDelta(
                session_id=id_,
                utterance_id=session.num_utterances,
                token_ids=(token_id,),
                text=text,
                logprobs=(-0.25,) if session.options.logprobs else None,
                words=(word,) if is_word else (),
            )
        )

    def _finish_utterance(self, id_: int, session: _FakeSession) -> None:
        if id_ not in self._sessions:
            return
        num_delay = session.delay_ms // AUDIO.token_ms
        has_audio = session.num_samples > session.first_sample
        usage = Usage(
            prompt_tokens=AUDIO.num_prompt_tokens(num_delay) if has_audio else 0,
            completion_tokens=session.num_written,
        )
        session.on_event(
            UtteranceDone(
                session_id=id_,
                utterance_id=session.num_utterances,
                usage=usage,
                start_s=session.first_sample / AUDIO.sampling_rate_hz,
                end_s=session.num_samples / AUDIO.sampling_rate_hz,
            )
        )
        session.num_utterances += 1
        session.begin()

    def _end(self, id_: int, error: VoxliteError | None) -> None:
        session = self._sessions.pop(id_)
        session.budget.close()
        self._seats.release()
        session.on_event(SessionEnded(session_id=id_, error=error))


__all__ = ["FakeEngine", "SessionClosed", "pcm16", "tone"]
