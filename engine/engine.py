"""The engine: sessions in, text events out, one step at a time on a thread of its own.

In: calls from any thread on `Engine` and `Session`, which only send commands. Out: events, handed
to each session's `on_event` on the engine thread. The engine thread alone owns sessions, block
pools and tensors. It knows nothing of asyncio, sockets or files.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

import torch

from voxlite.engine.active_session import ActiveSession
from voxlite.engine.config import LEGAL_DELAYS_MS, EngineConfig, SessionOptions
from voxlite.engine.drafting import ROWS_PER_DRAFT, default_num_draft_tokens
from voxlite.engine.errors import EngineFailure, Overloaded, SessionClosed, VoxliteError
from voxlite.engine.events import Event, SessionEnded
from voxlite.engine.inbox import AppendSamples, Close, EngineCommand, InboxBudget
from voxlite.engine.kv_cache_manager import KVCacheManager
from voxlite.engine.loading import load_model, set_up_process
from voxlite.engine.memory import make_kv_cache
from voxlite.engine.model.weights import TensorSource
from voxlite.engine.model_runner import DecodeJob, EncodeJob, ModelRunner, Pick
from voxlite.engine.prefix_cache import PrefixCache
from voxlite.engine.scheduler import DecodePlan, EncodePlan, Scheduler
from voxlite.engine.session import Session
from voxlite.engine.stats import EngineStats, StepStats

logger = logging.getLogger(__name__)

_Message = tuple[int, EngineCommand | ActiveSession]
Job = TypeVar("Job", EncodeJob, DecodeJob)
Result = TypeVar("Result")


class Engine:
    """Transcribe many sessions at once.

    Example:
        events = SimpleQueue()
        with Engine(EngineConfig(model=folder)) as engine:
            session = engine.open(SessionOptions(), on_event=events.put)
            session.append(samples)
            session.finish()
            while not isinstance(event := events.get(), SessionEnded):
                print(event)
    """

    def __init__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepStats], None] | None = None,
        *,
        weights: TensorSource | None = None,
        pick: Pick | None = None,
    ) -> None:
        """Load the model and make the KV cache.

        Args:
            on_step: called on the engine thread after each step that did something.
            weights: what a benchmark takes instead of the files of the model's folder.
            pick: what a benchmark takes instead of the most probable token.

        Raises:
            CheckpointError: the model can't be loaded.
            InvalidInput: the configuration asks for what isn't possible here.
        """
        self._config = config
        self._on_step = on_step
        model = load_model(config, weights, pick)
        self.tokenizer, self.model_config = model.tokenizer, model.config
        self.default_delay_ms = model.default_delay_ms
        self._runner = model.runner
        self.max_sessions, self._kv_cache = make_kv_cache(config, model.config, model.runner)
        set_up_process(model.runner)
        self._prefix = PrefixCache(self._runner, self._kv_cache, self.model_config.audio)
        num_draft_tokens = config.num_draft_tokens
        if num_draft_tokens is None:
            num_draft_tokens = default_num_draft_tokens(
                is_int8=config.quantization == "int8",
                is_cpu=self._runner.device.type == "cpu",
                is_bfloat16=self._runner.dtype is torch.bfloat16,
            )
        self._scheduler = Scheduler(
            max_encode_tokens=config.max_encode_tokens,
            max_batched_tokens=max(config.max_encode_tokens, config.max_num_seqs),
            num_draft_tokens=num_draft_tokens,
        )
        self._sessions: dict[int, ActiveSession] = {}
        self._session_ids = count()
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._seats = threading.Semaphore(self.max_sessions)
        self._lifecycle = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._failure: EngineFailure | None = None
        self._step_started_s: float | None = None
        self._num_steps = self._num_samples_in = self._num_tokens_out = 0
        self._num_passes = self._num_drafted_tokens = 0
        logger.info(
            "model %s: %s on %s, %d sessions at once",
            model.folder,
            "int8" if config.quantization == "int8" else self._runner.dtype,
            self._runner.device,
            self.max_sessions,
        )

    @property
    def runner(self) -> ModelRunner:
        """The model; for measuring it while the engine thread doesn't run."""
        return self._runner

    @property
    def kv_cache(self) -> KVCacheManager:
        """The bookkeeping of the KV cache; see `runner`."""
        return self._kv_cache

    @property
    def legal_delays_ms(self) -> tuple[int, ...]:
        return LEGAL_DELAYS_MS

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the engine thread. Without it, `step` drives the engine on the caller's."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all sessions, with `SessionClosed` as their error, and the engine thread."""
        with self._lifecycle:
            self._is_stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all()

    def check_options(self, options: SessionOptions) -> None:
        """Raise InvalidInput if a session can't have these options."""
        if options.delay_ms is not None:
            self.model_config.audio.num_delay_tokens(options.delay_ms)

    def open(self, options: SessionOptions, on_event: Callable[[Event], None]) -> Session:
        """Admit a session. Its blocks are its own from here on: it never waits for another's.

        Args:
            on_event: called on the engine thread with each event; it must not block.

        Raises:
            InvalidInput: the delay isn't a legal one.
            Overloaded: all seats are taken.
            EngineFailure: the engine has stopped.
        """
        self.check_options(options)
        max_samples = self._config.max_buffered_seconds * self.model_config.audio.sampling_rate_hz
        budget = InboxBudget(int(max_samples))
        if not self._seats.acquire(blocking=False):
            raise Overloaded(f"all {self.max_sessions} sessions are in use; try again later")
        session_id = next(self._session_ids)
        active = ActiveSession(
            session_id=session_id,
            audio_config=self.model_config.audio,
            options=options,
            default_delay_ms=self.default_delay_ms,
            on_event=on_event,
            budget=budget,
            token_bytes=self.tokenizer.token_bytes,
            new_conv_state=self._runner.initial_conv_state,
            new_adapter_queue=self._runner.no_adapter_rows,
        )
        with self._lifecycle:
            if self._is_stopping:
                self._seats.release()
                raise self._failure or EngineFailure("the engine has stopped")
            self._inbox.put((session_id, active))
        return Session(
            session_id,
            budget,
            lambda command: self._inbox.put((session_id, command)),
            self.check_options,
        )

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        started_s = self._step_started_s
        return EngineStats(
            num_sessions=len(self._sessions),
            max_sessions=self.max_sessions,
            num_steps=self._num_steps,
            num_samples_in=self._num_samples_in,
            num_tokens_out=self._num_tokens_out,
            num_passes=self._num_passes,
            num_drafted_tokens=self._num_drafted_tokens,
            num_free_encoder_blocks=self._kv_cache.encoder.pool.num_free_blocks,
            num_free_decoder_blocks=self._kv_cache.decoder.pool.num_free_blocks,
            num_given_up_blocks=self._kv_cache.decoder.num_given_up_blocks,
            step_age_s=None if started_s is None else monotonic() - started_s,
            failure=self._failure,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for. Call it between steps."""
        self._kv_cache.check_integrity()
        assert set(self._kv_cache.encoder.tables) == set(self._sessions)

    def step(self) -> bool:
        """Run one step over all sessions. Return whether there was anything to do.

        To be called by one thread only: the engine's own, once started.
        """
        self._step_started_s = monotonic()
        self._take_commands()
        encoded = self._encode(self._scheduler.to_encode(self._sessions.values()))
        decoded = self._decode(self._scheduler.to_decode(self._sessions.values()))
        self._end_finished()
        self._count_step(encoded, decoded)
        return encoded + decoded > 0

    def _take_commands(self) -> None:
        """Apply everything in the inbox, then let each session take up what it can use."""
        with suppress(queue.Empty):
            while True:
                self._apply(self._inbox.get_nowait())
        for session in list(self._sessions.values()):
            with self._isolated(session):
                if session.feed(self._config.max_encode_tokens):
                    self._kv_cache.reset(session.session_id)

    def _apply(self, message: _Message | None) -> None:
        if message is None:  # sent only to wake the thread
            return
        session_id, item = message
        if isinstance(item, ActiveSession):
            self._sessions[session_id] = item
            # Seats are counted from the pools' size: there is room for whoever has one.
            self._kv_cache.admit(session_id)
            logger.info("session %d opened, %d now", session_id, len(self._sessions))
        elif (session := self._sessions.get(session_id)) is not None:
            if isinstance(item, Close):
                self._end(session, None)
            else:
                session.receive(item)
                self._num_samples_in += len(item.samples) if isinstance(item, AppendSamples) else 0

    def _encode(self, plans: Sequence[EncodePlan]) -> int:
        """Encode the planned tokens. Return how many."""
        jobs = []
        for session, num_tokens in plans:
            with self._isolated(session):
                num_shared = self._start_encoder(session, num_tokens)
                jobs.append((session, self._encode_job(session, num_tokens - num_shared)))
        for session, result in self._run(jobs, self._runner.encode):
            session.store(result)
        return sum(plan.num_tokens for plan in plans)

    def _start_encoder(self, session: ActiveSession, num_tokens: int) -> int:
        """Begin an utterance with the start that all share. Return how many tokens that gives.

        Args:
            num_tokens: how many it is to encode; with no more than the prefix, none are shared.
        """
        audio, num_shared = session.current.audio, self._prefix.num_tokens
        if audio.num_taken_tokens > 0 or num_tokens <= num_shared:
            return 0
        audio.take(num_shared)
        session.store(self._prefix.encode(session.session_id))
        return num_shared

    def _encode_job(self, session: ActiveSession, num_tokens: int) -> EncodeJob:
        utterance = session.current
        first_token = utterance.audio.num_taken_tokens
        return EncodeJob(
            spans=utterance.audio.take(num_tokens),
            conv_state=utterance.conv_state,
            first_token=first_token,
            table=self._kv_cache.encoder.make_room(session.session_id, first_token, num_tokens),
        )

    def _decode(self, plans: Sequence[DecodePlan]) -> int:
        """Decode the next tokens of each session. Return how many sessions."""
        jobs = []
        for session, num_drafts in plans:
            with self._isolated(session):
                num_shared = self._start_decoder(session)
                jobs.append((session, self._decode_job(session, num_shared, num_drafts)))
        self._num_drafted_tokens += sum(job.num_drafts for _, job in jobs)
        drafted = {session.session_id: num_drafts for session, num_drafts in plans}
        for session, results in self._run(jobs, self._runner.decode):
            with self._isolated(session):
                self._num_passes += 1
                session.count_drafts(drafted[session.session_id], len(results) - 1)
                for result in results:
                    self._num_tokens_out += 1
                    if session.advance(result):
                        self._kv_cache.reset(session.session_id)
        return len(jobs)

    def _start_decoder(self, session: ActiveSession) -> int:
        """Begin an utterance with the start that all share. Return how many tokens that gives."""
        utterance = session.current
        if utterance.position > 0 or not self._prefix.is_encoded:
            return 0
        self._prefix.decode(session.session_id, utterance.delay_ms)
        return self._prefix.num_tokens

    def _decode_job(self, session: ActiveSession, num_shared: int, num_drafts: int) -> DecodeJob:
        """Return the job of the input positions after the `num_shared` ones in the cache."""
        utterance = session.current
        first = utterance.position + num_shared
        token_ids = utterance.input_ids[num_shared:]
        return DecodeJob(
            adapter=utterance.adapter[num_shared:][: len(token_ids) + num_drafts],
            token_ids=token_ids,
            num_drafts=num_drafts,
            delay_ms=utterance.delay_ms,
            first_position=first,
            table=self._kv_cache.decoder.make_room(
                session.session_id, first, len(token_ids) + ROWS_PER_DRAFT * num_drafts
            ),
            logprob=utterance.wants_logprobs,
        )

    def _run(
        self,
        jobs: Sequence[tuple[ActiveSession, Job]],
        run: Callable[[Sequence[Job]], list[Result]],
    ) -> list[tuple[ActiveSession, Result]]:
        """Run jobs as one batch, or, where that fails, alone, so that only the culprit ends."""
        if not jobs:
            return []
        # Attention takes neighbours with as many rows together.
        jobs = sorted(jobs, key=lambda job: job[1].num_rows)
        try:
            results = run([job for _, job in jobs])
            return [(session, result) for (session, _), result in zip(jobs, results, strict=True)]
        except Exception as err:
            if len(jobs) == 1:
                self._fail(jobs[0][0], err)
                return []
            logger.warning("a batch of %d failed (%s): running each alone", len(jobs), err)
            return [done for job in jobs for done in self._run([job], run)]

    @contextmanager
    def _isolated(self, session: ActiveSession) -> Iterator[None]:
        """End this session alone if what is done for it fails."""
        try:
            yield
        except Exception as err:
            self._fail(session, err)

    def _fail(self, session: ActiveSession, error: Exception) -> None:
        logger.error("session %d failed", session.session_id, exc_info=error)
        failure = error if isinstance(error, VoxliteError) else EngineFailure(repr(error))
        self._end(session, failure)

    def _end_finished(self) -> None:
        for session in [s for s in self._sessions.values() if s.is_done]:
            self._end(session, None)

    def _end(self, session: ActiveSession, error: VoxliteError | None) -> None:
        """Give back all that a session holds, then say that it has ended."""
        del self._sessions[session.session_id]
        session.budget.close()
        self._kv_cache.release(session.session_id)
        self._seats.release()
        logger.info("session %d ended, %d left", session.session_id, len(self._sessions))
        try:
            session.on_event(SessionEnded(session_id=session.session_id, error=error))
        except Exception:
            logger.exception("session %d: its on_event failed", session.session_id)

    def _count_step(self, num_encoded_tokens: int, num_decoded_sessions: int) -> None:
        assert self._step_started_s is not None
        duration_s = monotonic() - self._step_started_s
        self._step_started_s = None
        if num_encoded_tokens + num_decoded_sessions == 0:
            return
        self._num_steps += 1
        if self._on_step is not None:
            self._on_step(StepStats(duration_s, num_encoded_tokens, num_decoded_sessions))

    def _run_thread(self) -> None:
        try:
            while not self._is_stopping:
                # Looked at again, since the step may have taken the message that `stop` wakes with.
                if not self.step() and not self._is_stopping:
                    self._apply(self._inbox.get())
        except BaseException as err:  # whatever it is, no session may wait for ever
            logger.exception("the engine has failed")
            self._failure = EngineFailure(repr(err))
        finally:
            with self._lifecycle:
                self._is_stopping = True
            self._end_all()

    def _end_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._apply(self._inbox.get_nowait())
        error = self._failure or SessionClosed("the engine was stopped")
        for session in list(self._sessions.values()):
            self._end(session, error)
