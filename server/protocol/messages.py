"""What every protocol is translated from and to: a client's commands, a session's events, faults.

A protocol module turns JSON text into one of `Command` and each of `SessionEvent` into JSON text.
Times are on the client's clock: the audio it has appended since the session began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from voxlite.engine.events import Usage, Word
from voxlite.server.session.session_config import SessionConfig


@dataclass(frozen=True, slots=True)
class Append:
    """More audio, in the session's format."""

    audio: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """The utterance ends here: write its last words."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget the audio that isn't committed, and its text."""


@dataclass(frozen=True, slots=True)
class Configure:
    """A new configuration. `is_acknowledged`: the client is told that it is in force."""

    config: SessionConfig
    is_acknowledged: bool = True


@dataclass(frozen=True, slots=True)
class Finish:
    """The audio has ended: commit what there is, write all text, then close."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """A message that asks for nothing here."""


Command = Append | Commit | Clear | Configure | Finish | Nothing


class Fault(Enum):
    """Every reason for an error event. The value is the code on the wire, unless a protocol has
    its own; the number is the HTTP status that says the same."""

    INVALID_JSON = ("invalid_json", 400)
    NOT_AN_OBJECT = ("invalid_message", 400)
    INVALID_EVENT = ("invalid_event", 400)
    UNKNOWN_EVENT = ("unknown_event", 400)
    MISSING_FIELD = ("missing_required_parameter", 400)
    INVALID_VALUE = ("invalid_value", 400)
    MODEL_NOT_FOUND = ("model_not_found", 404)
    MODEL_NOT_VALIDATED = ("model_not_validated", 400)
    INVALID_AUDIO = ("invalid_audio", 400)
    MESSAGE_TOO_LARGE = ("message_too_large", 413)
    BUFFER_FULL = ("buffer_full", 429)
    OVERLOADED = ("overloaded", 503)
    LOADING = ("loading", 503)
    IDLE_TIMEOUT = ("idle_timeout", 408)
    SESSION_EXPIRED = ("session_expired", 408)
    ENGINE_FAILURE = ("engine_failure", 500)

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def http_status(self) -> int:
        return self.value[1]

    @property
    def is_ours(self) -> bool:
        """Whether the server, not the client, can do something about it."""
        return self.http_status >= 500


class ProtocolError(Exception):
    """Report a message that can't be carried out. The session goes on as it was.

    `event_id` is the client's name for its message, filled in where that is known.
    """

    def __init__(self, fault: Fault, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.param = param
        self.event_id: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A text token, its bytes, and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCreated:
    """The first event. `created_s` is Unix time."""

    session_id: str
    created_s: int
    config: SessionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUpdated:
    """The configuration that is in force now."""

    session_id: str
    created_s: int
    config: SessionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStarted:
    """Speech was heard. The time includes the padding before it."""

    item_id: str
    start_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStopped:
    """Speech has ended. The time includes the silence that told so."""

    item_id: str
    end_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimeout:
    """Nobody spoke for as long as the client had set; an empty utterance follows."""

    item_id: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """An utterance has ended; its text may still be coming."""

    item_id: str
    previous_item_id: str | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The audio that wasn't committed is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAdded:
    """An utterance is about to have text."""

    item_id: str
    previous_item_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDone:
    """An utterance has all its audio."""

    item_id: str
    previous_item_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """More text of an utterance, never empty. `is_first`: only white space came before it."""

    item_id: str
    text: str
    is_first: bool
    logprobs: tuple[TokenLogprob, ...] | None
    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The whole text of an utterance."""

    item_id: str
    text: str
    usage: Usage
    duration_s: float
    logprobs: tuple[TokenLogprob, ...] | None
    words: tuple[Word, ...]
    config: SessionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An utterance whose text won't be completed."""

    item_id: str
    fault: Fault
    message: str


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """Something the client asked for can't be, or the session ends. `event_id` is the client's."""

    fault: Fault
    message: str
    param: str | None = None
    event_id: str | None = None


SessionEvent = (
    SessionCreated
    | SessionUpdated
    | SpeechStarted
    | SpeechStopped
    | IdleTimeout
    | Committed
    | Cleared
    | ItemAdded
    | ItemDone
    | Delta
    | Completed
    | Failed
    | ErrorEvent
)

# Makes identifiers: `new_id("event")` is "event_" and something that wasn't given before.
NewId = Callable[[str], str]


class WireProtocol(Protocol):
    """One client's protocol. Neither method does any I/O."""

    def receive(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        """Understand a message (a parsed JSON object), given the configuration in force.

        Raises:
            ProtocolError: it can't be understood or carried out; nothing has changed.
        """
        ...

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event as messages: none where the protocol has no word for it."""
        ...
