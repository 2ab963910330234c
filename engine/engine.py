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
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import psutil
import torch

from voxlite.engine.active_session import ActiveSession
from voxlite.engine.block_pool import BlockPool
from voxlite.engine.checkpoint import find_checkpoint
from voxlite.engine.config import (
    LEGAL_DELAYS_MS,
    EngineConfig,
    ModelConfig,
    SessionOptions,
    read_model_config,
)
from voxlite.engine.drafting import ROWS_PER_DRAFT
from voxlite.engine.errors import (
    CheckpointError,
    EngineFailure,
    InvalidInput,
    Overloaded,
    SessionClosed,
    VoxliteError,
)
from voxlite.engine.events import Event, SessionEnded
from voxlite.engine.inbox import Append, Close, Command, InboxBudget
from voxlite.engine.kv_cache_manager import KVCacheManager, SlidingWindowManager, make_kv_cache_spec
from voxlite.engine.model.checkpoint_files import CheckpointFiles
from voxlite.engine.model.int8_cache import Int8Cache
from voxlite.engine.model.malloc import keep_freed_memory
from voxlite.engine.model.weights import TensorSource
from voxlite.engine.model_runner import DecodeJob, EncodeJob, ModelRunner, Pick
from voxlite.engine.own_thread import on_own_thread
from voxlite.engine.prefix_cache import PrefixCache
from voxlite.engine.scheduler import DecodePlan, EncodePlan, Scheduler
from voxlite.engine.session import Session
from voxlite.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_GIB = 2**30
# Below this, handing a layer to a second core costs more than it saves, and far more (20 x seen)
# where that core is busy with something else.
_SMALL_MODEL_BYTES = 64 * 2**20
_Message = tuple[int, Command | ActiveSession]
Job = TypeVar("Job", EncodeJob, DecodeJob)
Result = TypeVar("Result")


class StepStats(NamedTuple):
    """One step, as told to `on_step`."""

    duration_s: float
    num_encoded_tokens: int
    num_decoded_sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counters run since the start; `step_age_s` is None between steps.

    Of the drafted tokens, num_tokens_out - num_passes were right.
    """

    num_sessions: int
    max_sessions: int
    num_steps: int
    num_samples_in: int
    num_tokens_out: int
    num_passes: int  # of a session through the decoder, each for one token or, drafting, several
    num_drafted_tokens: int
    num_free_encoder_blocks: int
    num_free_decoder_blocks: int
    step_age_s: float | None
    failure: EngineFailure | None


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
        device = _device(config.device)
        if config.quantization == "int8" and device.type != "cpu":
            raise InvalidInput("quantization 'int8' is for CPUs: use --device cpu, or none")
        folder = find_checkpoint(config.model)
        self.tokenizer = Tokenizer(folder / "tekken.json")
        self.model_config: ModelConfig = read_model_config(folder, self.tokenizer.audio_config)
        if self.tokenizer.vocab_size < self.model_config.vocab_size:
            raise CheckpointError(
                f"{folder / 'tekken.json'} has {self.tokenizer.vocab_size} tokens, the model "
                f"{self.model_config.vocab_size}"
            )
        self.default_delay_ms = self.model_config.audio.default_delay_ms
        if config.default_delay_ms is not None:
            self.default_delay_ms = config.default_delay_ms
        self.check_options(SessionOptions(delay_ms=self.default_delay_ms))
        self._runner = on_own_thread(lambda: self._load_model(folder, device, weights, pick))
        self._kv_cache = self._make_kv_cache()
        keep_freed_memory()  # now that what loading took for a while is given back
        if device.type == "cpu" and self._runner.weight_bytes < _SMALL_MODEL_BYTES:
            torch.set_num_threads(1)
        self._prefix = PrefixCache(self._runner, self.model_config.audio)
        self._scheduler = Scheduler(
            max_encode_tokens=config.max_encode_tokens,
            max_batched_tokens=max(config.max_encode_tokens, config.max_num_seqs),
            num_draft_tokens=_num_draft_tokens(config, self._runner),
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
            folder,
            "int8" if config.quantization == "int8" else self._runner.dtype,
            device,
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
                self._num_samples_in += len(item.samples) if isinstance(item, Append) else 0

    def _encode(self, plans: Sequence[EncodePlan]) -> int:
        """Encode the planned tokens. Return how many."""
        jobs = []
        for session, num_tokens in plans:
            with self._isolated(session):
                jobs.append((session, self._encode_job(session, num_tokens)))
        for session, result in self._run(jobs, self._runner.encode):
            session.store(result)
        return sum(plan.num_tokens for plan in plans)

    def _encode_job(self, session: ActiveSession, num_tokens: int) -> EncodeJob:
        utterance = session.utterance
        assert utterance is not None
        encoder, session_id = self._kv_cache.encoder, session.session_id
        first_token = utterance.audio.num_taken_tokens
        spans = utterance.audio.take(num_tokens)
        num_shared = self._prefix.num_tokens
        if first_token == 0 and num_tokens > num_shared:
            session.store(self._prefix.encode(encoder.make_room(session_id, 0, num_shared)))
            first_token, spans = num_shared, spans[num_shared:]
        table = encoder.make_room(session_id, first_token, len(spans))
        return EncodeJob(
            spans=spans,
            conv_state=utterance.conv_state,
            first_token=first_token,
            table=table,
        )

    def _decode(self, plans: Sequence[DecodePlan]) -> int:
        """Decode the next tokens of each session. Return how many sessions."""
        jobs = []
        for session, num_drafts in plans:
            with self._isolated(session):
                jobs.append((session, self._decode_job(session, num_drafts)))
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

    def _decode_job(self, session: ActiveSession, num_drafts: int) -> DecodeJob:
        utterance = session.utterance
        assert utterance is not None
        decoder, session_id = self._kv_cache.decoder, session.session_id
        first = num_skipped = 0
        if utterance.position > 0:
            first = utterance.position
        elif self._prefix.is_encoded:
            first = num_skipped = self._prefix.num_tokens
            shared = decoder.make_room(session_id, 0, num_skipped)
            self._prefix.decode(shared, utterance.delay_ms)
        token_ids = utterance.input_ids[num_skipped:]
        return DecodeJob(
            adapter=utterance.adapter[num_skipped:][: len(token_ids) + num_drafts],
            token_ids=token_ids,
            num_drafts=num_drafts,
            delay_ms=utterance.delay_ms,
            first_position=first,
            table=decoder.make_room(
                session_id, first, len(token_ids) + ROWS_PER_DRAFT * num_drafts
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

    def _load_model(
        self,
        folder: Path,
        device: torch.device,
        weights: TensorSource | None,
        pick: Pick | None,
    ) -> ModelRunner:
        config = self._config
        load = partial(
            ModelRunner,
            config=self.model_config,
            dtype=_dtype(config.dtype),
            device=device,
            is_int8=config.quantization == "int8",
            pick=pick,
        )
        if weights is not None:
            return load(weights)
        files = CheckpointFiles(folder, is_mistral_format=self.model_config.is_mistral_format)
        # A small model is quantized in no time.
        is_kept = config.quantization == "int8" and files.num_bytes >= _SMALL_MODEL_BYTES
        runner = load(files, int8_cache=Int8Cache.of(files.fingerprint) if is_kept else None)
        files.finish()
        return runner

    def _make_kv_cache(self) -> KVCacheManager:
        """Size both pools for as many sessions as fit, and make the cache's tensors."""
        config, model, runner = self._config, self.model_config, self._runner
        encoder = make_kv_cache_spec(model.encoder, config.block_size, model.block_pool_size)
        decoder = make_kv_cache_spec(model.decoder, config.block_size)
        encoder_blocks = encoder.max_admission_blocks_per_request(config.max_encode_tokens, None)
        decoder_blocks = decoder.max_admission_blocks_per_request(
            model.audio.num_prompt_tokens(LEGAL_DELAYS_MS[-1] // model.audio.token_ms), None
        )
        session_bytes = encoder_blocks * runner.block_bytes(
            model.encoder, encoder
        ) + decoder_blocks * runner.block_bytes(model.decoder, decoder)
        self.max_sessions = self._num_sessions_that_fit(session_bytes)
        num_encoder_blocks = self.max_sessions * encoder_blocks
        num_decoder_blocks = self.max_sessions * decoder_blocks
        runner.make_caches((encoder, num_encoder_blocks), (decoder, num_decoder_blocks))
        managers = []
        for spec, num_blocks, blocks_per_session, cache in (
            (encoder, num_encoder_blocks, encoder_blocks, runner.encoder_cache),
            (decoder, num_decoder_blocks, decoder_blocks, runner.decoder_cache),
        ):
            manager = SlidingWindowManager(spec, BlockPool(num_blocks), blocks_per_session)
            if config.poison_freed_blocks:
                cache.fill(range(num_blocks), torch.nan)
                manager.on_free = partial(cache.fill, value=torch.nan)
            managers.append(manager)
        return KVCacheManager(*managers)

    def _num_sessions_that_fit(self, session_bytes: int) -> int:
        config = self._config
        if config.kv_cache_gib is not None:
            budget_bytes = config.kv_cache_gib * _GIB
        else:
            budget_bytes = _memory_bytes(self._runner.device) * 0.9 - self._runner.weight_bytes
        num_sessions = min(config.max_num_seqs, int(budget_bytes // session_bytes))
        if num_sessions < 1:
            raise InvalidInput(
                f"{budget_bytes / _GIB:.2f} GiB for the KV cache: one session of this model needs "
                f"{session_bytes / _GIB:.2f} GiB; raise --kv-cache-gib"
            )
        return num_sessions


def _num_draft_tokens(config: EngineConfig, runner: ModelRunner) -> int:
    """Return how many positions to draft: three give two to three tokens a pass in speech.

    On a CPU rows are nearly free up to a tile of a linear layer's: seven rows in int8, which are
    three drafts, and five in bfloat16, which are two. In float32 they aren't.
    """
    if config.num_draft_tokens is not None:
        return config.num_draft_tokens
    if config.quantization == "int8" or runner.device.type != "cpu":
        return 3
    return 2 if runner.dtype is torch.bfloat16 else 0


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise InvalidInput("device 'cuda': PyTorch finds no CUDA device on this machine")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _dtype(name: str) -> torch.dtype | None:
    """Return the dtype, or None for the checkpoint's own."""
    if name == "auto":
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
