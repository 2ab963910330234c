"""What clients' threads put in and the engine's thread takes out: commands, and a bound on them.

In: commands of any session, from any thread. Out: the same, in order, on the engine thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic
from typing import Final

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.config import SessionOptions
from voxlite.engine.errors import Overloaded, SessionClosed


@dataclass(frozen=True, slots=True)
class AppendSamples:
    """More samples, (n,) float32 at 16 kHz."""

    samples: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Flush:
    """The utterance ends here, and with `ends_session` the session after it."""

    ends_session: bool


@dataclass(frozen=True, slots=True)
class Discard:
    """The utterance ends here and is dropped: its audio isn't computed any further.

    `num_samples` of its audio were still queued; `ActiveSession.receive` drops them and counts.
    """

    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class SetOptions:
    """Options for the utterances that start after this."""

    options: SessionOptions


@dataclass(frozen=True, slots=True)
class Close:
    """The session ends now; what it still had to say is dropped."""


EngineCommand = AppendSamples | Flush | Discard | SetOptions | Close

# A bound on memory where appends are tiny: audio in chunks of 10 ms may wait for 100 s.
_MAX_COMMANDS: Final = 10_000


class InboxBudget:
    """Bound what a session has handed in and the engine hasn't taken up: samples and commands."""

    def __init__(self, max_samples: int) -> None:
        self.max_samples = max_samples
        self._num_samples = 0
        self._num_commands = 0
        self._is_closed = False
        self._room = threading.Condition()

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def acquire(self, num_samples: int, num_commands: int, timeout_s: float = 0.0) -> None:
        """Take room for commands with so many samples, waiting for it up to `timeout_s`.

        Raises:
            Overloaded: there is no room.
            SessionClosed: the session ended, before or while waiting.
        """
        deadline = monotonic() + timeout_s
        with self._room:
            while True:
                if self._is_closed:
                    raise SessionClosed("the session has ended")
                has_room = (
                    self._num_samples + num_samples <= self.max_samples
                    and self._num_commands + num_commands <= _MAX_COMMANDS
                )
                if has_room:
                    self._num_samples += num_samples
                    self._num_commands += num_commands
                    return
                remaining_s = deadline - monotonic()
                if remaining_s <= 0:
                    raise Overloaded(
                        f"no room for {num_samples} samples: {self._num_samples} of at most "
                        f"{self.max_samples} are waiting, in {self._num_commands} of at most "
                        f"{_MAX_COMMANDS} appends, commits and changes"
                    )
                self._room.wait(min(remaining_s, threading.TIMEOUT_MAX))

    def release(self, num_samples: int) -> None:
        """Give back the room of one command, waking those who wait for it."""
        with self._room:
            self._num_samples -= num_samples
            self._num_commands -= 1
            self._room.notify_all()

    def close(self) -> None:
        """Refuse all further room, waking those who wait for it."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()
