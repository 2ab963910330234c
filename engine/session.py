"""A client's handle on a session: checks what is handed in and sends it to the engine thread.

In: samples and requests, from any thread. Out: commands. It waits for room in the session's audio
budget at most, never for a step of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.config import SessionOptions
from voxlite.engine.errors import InvalidInput, SessionClosed
from voxlite.engine.inbox import (
    AppendSamples,
    Close,
    Discard,
    EngineCommand,
    Flush,
    InboxBudget,
    SetOptions,
)

# Long appends are cut, so that the engine takes up about as much as it can use and no more.
_PIECE_SAMPLES: Final = 16_000
# Full scale is 1. Far beyond it the spectrum's power would overflow float32.
_MAX_AMPLITUDE: Final = 1e6


class Session:
    """A client's handle on a session. Every method may be called from any thread."""

    def __init__(
        self,
        session_id: int,
        budget: InboxBudget,
        send: Callable[[EngineCommand], None],
        check_options: Callable[[SessionOptions], None],
    ) -> None:
        self.session_id = session_id
        self._budget = budget
        self._send = send
        self._check_options = check_options
        self._lock = threading.Lock()  # keeps the order of commands and the end of them consistent
        self._is_finished = False

    @property
    def num_buffered_samples(self) -> int:
        """Samples handed in and not yet taken up by the engine."""
        return self._budget.num_samples

    def append(self, samples: NDArray[np.float32], timeout_s: float = 0.0) -> None:
        """Hand in audio.

        Args:
            samples: (n,) float32 in [-1, 1], mono, 16 kHz.
            timeout_s: how long to wait for room where too much audio is waiting already.

        Raises:
            InvalidInput: wrong shape or dtype, or an impossible value; nothing was taken.
            Overloaded: no room; nothing was taken.
            SessionClosed: the session has been finished or has ended.
        """
        if not isinstance(samples, np.ndarray):
            raise InvalidInput(f"samples are a {type(samples).__name__}: an array is needed")
        if samples.ndim != 1 or samples.dtype != np.float32:
            raise InvalidInput(
                f"samples are {samples.shape} {samples.dtype}: (n,) float32 is needed"
            )
        is_usable = np.abs(samples) <= _MAX_AMPLITUDE  # False for NaN
        if not is_usable.all():
            first = int(np.argmin(is_usable))
            raise InvalidInput(
                f"sample {first} is {samples[first]}: finite numbers up to {_MAX_AMPLITUDE:g} are "
                f"possible, [-1, 1] is full scale"
            )
        if len(samples) > self._budget.max_samples:
            raise InvalidInput(
                f"{len(samples)} samples at once: at most {self._budget.max_samples} may wait"
            )
        self._check_open()
        starts = range(0, len(samples), _PIECE_SAMPLES)
        self._budget.acquire(len(samples), len(starts), timeout_s)
        with self._lock:
            self._check_open()
            for start in starts:
                self._send(AppendSamples(samples[start : start + _PIECE_SAMPLES].copy()))

    def commit(self) -> None:
        """End the utterance: its last words come, then `UtteranceDone`; the session goes on.

        Raises:
            Overloaded: too many commits are waiting.
            SessionClosed: the session has been finished or has ended.
        """
        self._send_budgeted(Flush(ends_session=False))

    def discard(self) -> None:
        """End the utterance without its last words: `UtteranceDone` comes at once.

        Its audio isn't computed any further, and counts on the session's clock. Text of utterances
        that were committed before still comes, and comes first.

        Raises:
            Overloaded: too many commits are waiting.
            SessionClosed: the session has been finished or has ended.
        """
        self._send_budgeted(Discard())

    def finish(self) -> None:
        """End the utterance as `commit` does, and the session after it."""
        with self._lock:
            self._check_open()
            self._is_finished = True
            self._send(Flush(ends_session=True))

    def configure(self, options: SessionOptions) -> None:
        """Change the options of the utterances that start after what was handed in so far.

        Raises:
            InvalidInput: the delay isn't a legal one; nothing changes.
            Overloaded: too many changes are waiting.
            SessionClosed: the session has been finished or has ended.
        """
        self._check_options(options)
        self._send_budgeted(SetOptions(options))

    def close(self) -> None:
        """End the session now; text still to come is dropped. May be called again."""
        with self._lock:
            self._is_finished = True
            self._send(Close())

    def _send_budgeted(self, command: EngineCommand) -> None:
        """Send a command without samples that takes its place in the budget."""
        with self._lock:
            self._check_open()
            self._budget.acquire(num_samples=0, num_commands=1)
            self._send(command)

    def _check_open(self) -> None:
        if self._is_finished or self._budget.is_closed:
            raise SessionClosed(f"session {self.session_id} has been finished or has ended")
