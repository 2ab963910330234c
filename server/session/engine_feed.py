"""Hand audio to the engine no faster than it is taken: back-pressure without polling."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.errors import Overloaded
from voxlite.server.async_engine import EngineSession
from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ


class EngineFeed:
    """The way into one session of the engine, for one task at a time."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._progress = asyncio.Event()
        self._deadline_s: float | None = None
        self.num_samples = 0

    def set_deadline(self, wait_s: float) -> None:
        """Let what follows wait for room until so many seconds from now; before this, for ever."""
        self._deadline_s = asyncio.get_running_loop().time() + wait_s

    def note_progress(self) -> None:
        """Wake what waits: the session has said something, so there may be room."""
        self._progress.set()

    async def append(self, samples: NDArray[np.float32]) -> None:
        """Hand in samples, a second at a time.

        Raises:
            Overloaded: the deadline has passed; the rest was not taken.
            SessionClosed: the session has ended.
        """
        for start in range(0, len(samples), SAMPLE_RATE_HZ):
            await self._append_piece(samples[start : start + SAMPLE_RATE_HZ])

    async def _append_piece(self, samples: NDArray[np.float32]) -> None:
        while True:
            try:
                self._session.append(samples)
            except Overloaded:
                if not await self.wait_for_progress():
                    raise
            else:
                self.num_samples += len(samples)
                return

    async def wait_for_progress(self) -> bool:
        """Wait until `note_progress` is called; return False once the deadline has passed."""
        self._progress.clear()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await self._progress.wait()
        except TimeoutError:
            return False
        return True
