"""The bridge between the event loop and the engine's thread.

In: calls from the event loop. Out: the engine's events, on the event loop. Loading runs on a thread
of its own, so that the server answers meanwhile. It knows nothing of sockets or protocols.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config import ModelConfig, SessionOptions
from engine.engine import EngineStats
from engine.errors import EngineFailure, Overloaded, VoxliteError
from engine.events import Event

logger = logging.getLogger(__name__)

# With work to do, a step takes well under a second; the largest model on a small CPU, several.
_MAX_STEP_S = 120.0


class EngineSession(Protocol):
    """What the server uses of `engine.session.Session`."""

    session_id: int

    @property
    def num_buffered_samples(self) -> int: ...
    def append(self, samples: NDArray[np.float32], timeout_s: float = 0.0) -> None: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...
    def configure(self, options: SessionOptions) -> None: ...
    def close(self) -> None: ...


class TokenBytes(Protocol):
    """What the server uses of the engine's tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TranscriptionEngine(Protocol):
    """What the server uses of `engine.engine.Engine`."""

    @property
    def tokenizer(self) -> TokenBytes: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def default_delay_ms(self) -> int: ...
    @property
    def legal_delays_ms(self) -> tuple[int, ...]: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def open(self, options: SessionOptions, on_event: Callable[[Event], None]) -> EngineSession: ...


class EngineStatus(Enum):
    """LOADING becomes READY or FAILED; READY becomes FAILED or STOPPED."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class NotLoaded(Overloaded):
    """Report that the model is still being loaded."""

    code = "loading"


class AsyncEngine:
    """The engine, as the event loop sees it."""

    def __init__(self, load: Callable[[], TranscriptionEngine]) -> None:
        """Take what loads the engine; nothing is loaded before `start`."""
        self._load = load
        self._engine: TranscriptionEngine | None = None
        self._loading: asyncio.Task[None] | None = None
        self._error: VoxliteError | None = None
        self._is_stopped = False

    @property
    def status(self) -> EngineStatus:
        if self._is_stopped:
            return EngineStatus.STOPPED
        if self._failure() is not None:
            return EngineStatus.FAILED
        return EngineStatus.LOADING if self._engine is None else EngineStatus.READY

    @property
    def reason(self) -> str:
        """A sentence about the status."""
        failure = self._failure()
        if failure is not None:
            return f"the engine has failed: {failure}"
        if self._engine is None:
            return "the model is being loaded; try again in a moment"
        return "the engine has stopped" if self._is_stopped else "ready"

    def start(self, on_failure: Callable[[VoxliteError], None]) -> None:
        """Begin to load. `on_failure` is called if that isn't possible."""
        self._loading = asyncio.get_running_loop().create_task(self._run_load(on_failure))

    async def _run_load(self, on_failure: Callable[[VoxliteError], None]) -> None:
        try:
            engine = await asyncio.to_thread(self._load)
        except VoxliteError as err:
            self._error = err
            on_failure(err)
            return
        except Exception as err:
            logger.exception("the model can't be loaded")
            self._error = EngineFailure(repr(err))
            on_failure(self._error)
            return
        engine.start()
        self._engine = engine

    async def loaded(self) -> None:
        """Wait until the model is loaded or can't be."""
        if self._loading is not None:
            await asyncio.shield(self._loading)

    async def stop(self) -> None:
        """End all sessions and the engine."""
        await self.loaded()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        self._is_stopped = True

    @property
    def ready(self) -> TranscriptionEngine:
        """The engine.

        Raises:
            NotLoaded: it is still being loaded.
            EngineFailure: it has failed or stopped.
        """
        match self.status:
            case EngineStatus.LOADING:
                raise NotLoaded(self.reason)
            case EngineStatus.FAILED | EngineStatus.STOPPED:
                raise EngineFailure(self.reason)
        assert self._engine is not None
        return self._engine

    def open(self, options: SessionOptions, on_event: Callable[[Event], None]) -> EngineSession:
        """Open a session whose events come on the event loop.

        Raises:
            InvalidInput, Overloaded, EngineFailure: as `Engine.open`, and NotLoaded.
        """
        loop = asyncio.get_running_loop()

        def pass_on(event: Event) -> None:
            # The loop may be gone at the very end, when nobody is there to hear of it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(on_event, event)

        return self.ready.open(options, pass_on)

    def stats(self) -> EngineStats | None:
        """Return a snapshot, None before the engine is loaded."""
        return None if self._engine is None else self._engine.stats()

    def _failure(self) -> VoxliteError | None:
        if self._error is not None or self._engine is None:
            return self._error
        stats = self._engine.stats()
        if stats.failure is None and (stats.step_age_s or 0.0) > _MAX_STEP_S:
            return EngineFailure(f"a step has been running for {stats.step_age_s:.0f} s")
        return stats.failure
