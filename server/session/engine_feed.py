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
        self.num_samples = 0

    def note_progress(self) -> None:
        """Wake what waits: the session has said something, so there may be room."""
        self._progress.set()

    async def append(self, samples: NDArray[np.float32], deadline_s: float | None) -> None:
        """Hand in samples, a second at a time.

        Args:
            deadline_s: the event loop's time until which to wait for room; None waits for ever.

        Raises:
            Overloaded: the deadline has passed; the rest was not taken.
            SessionClosed: the session has ended.
        """
        for start in range(0, len(samples), SAMPLE_RATE_HZ):
            await self._append_piece(samples[start : start + SAMPLE_RATE_HZ], deadline_s)

    async def _append_piece(self, samples: NDArray[np.float32], deadline_s: float | None) -> None:
        while True:
            try:
                self._session.append(samples)
            except Overloaded:
                if not await self.wait_for_progress(deadline_s):
                    raise
            else:
                self.num_samples += len(samples)
                return

    async def wait_for_progress(self, deadline_s: float | None) -> bool:
        """Wait until `note_progress` is called; return False once the deadline has passed."""
        self._progress.clear()
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._progress.wait()
        except TimeoutError:
            return False
        return True
