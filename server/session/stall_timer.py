"""Notice that a client has stopped sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class StallTimer:
    """Run a coroutine once nothing has restarted the timer for as long as it was set to.

    `on_stall` is called as the time runs out; the coroutine that it returns runs as a task.
    """

    def __init__(self, on_stall: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def restart(self, wait_s: float) -> None:
        """Wait anew, for so long."""
        self.cancel()
        self._timer = self._loop.call_later(wait_s, self._start)

    def cancel(self) -> None:
        """Wait no longer. A run that has begun goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._task = self._loop.create_task(self._on_stall())
