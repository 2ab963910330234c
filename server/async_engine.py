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
from threading import Thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.config import ModelConfig, SessionOptions
from voxlite.engine.errors import EngineFailure, Overloaded, VoxliteError
from voxlite.engine.events import Event
from voxlite.engine.stats import EngineStats

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
    """LOADING becomes READY or FAILED; each becomes STOPPING, and that STOPPED."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"
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
        self._loading: asyncio.Future[None] | None = None
        self._error: VoxliteError | None = None
        self._is_stopping = False
        self._is_stopped = False

    @property
    def status(self) -> EngineStatus:
        if self._is_stopped:
            return EngineStatus.STOPPED
        if self._is_stopping:
            return EngineStatus.STOPPING
        if self._failure() is not None:
            return EngineStatus.FAILED
        return EngineStatus.LOADING if self._engine is None else EngineStatus.READY

    @property
    def reason(self) -> str:
        """A sentence about the status."""
        failure = self._failure()
        if failure is not None:
            return f"the engine has failed: {failure}"
        if self._is_stopped:
            return "the engine has stopped"
        if self._is_stopping:
            return "the server is being stopped"
        if self._engine is None:
            return "the model is being loaded; try again in a moment"
        return "ready"

    def start(self, on_failure: Callable[[VoxliteError], None]) -> None:
        """Begin to load. `on_failure` is called if that isn't possible."""
        loop = asyncio.get_running_loop()
        self._loading = loop.create_future()

        def load() -> None:
            result = self._try_to_load()
            # The loop is gone if the server has been stopped meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take_loaded, result, on_failure)

        # A daemon: a process that is to end doesn't wait for the minutes that a load may take.
        Thread(target=load, name="load", daemon=True).start()

    def _try_to_load(self) -> TranscriptionEngine | VoxliteError:
        try:
            return self._load()
        except VoxliteError as err:
            return err
        except Exception as err:
            logger.exception("the model can't be loaded")
            return EngineFailure(repr(err))

    def _take_loaded(
        self,
        result: TranscriptionEngine | VoxliteError,
        on_failure: Callable[[VoxliteError], None],
    ) -> None:
        assert self._loading is not None
        self._loading.set_result(None)
        if isinstance(result, VoxliteError):
            self._error = result
            on_failure(result)
        elif not self._is_stopping:
            result.start()
            self._engine = result

    async def loaded(self) -> None:
        """Wait until the model is loaded or can't be."""
        if self._loading is not None:
            await asyncio.shield(self._loading)

    def stop_accepting(self) -> None:
        """Open no more sessions."""
        self._is_stopping = True

    async def stop(self) -> None:
        """End all sessions and the engine. A model that is still being loaded is left alone."""
        self.stop_accepting()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        self._is_stopped = True

    @property
    def ready(self) -> TranscriptionEngine:
        """The engine.

        Raises:
            NotLoaded: it is still being loaded.
            Overloaded: the server is being stopped.
            EngineFailure: it has failed or stopped.
        """
        match self.status:
            case EngineStatus.LOADING:
                raise NotLoaded(self.reason)
            case EngineStatus.STOPPING:
                raise Overloaded(self.reason)
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
