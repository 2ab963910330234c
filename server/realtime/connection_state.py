"""The states of a connection, and the ways in which it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from voxlite.server.protocol.messages import ErrorEvent


class CloseCode(Enum):
    """The codes of RFC 6455 that the server closes with."""

    NORMAL = 1000
    POLICY = 1008
    INTERNAL_ERROR = 1011
    SERVICE_RESTART = 1012
    TRY_AGAIN_LATER = 1013


class State(Enum):
    """Where a connection stands."""

    OPENING = "opening"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


TRANSITIONS: Final = {
    State.OPENING: (State.OPEN, State.CLOSED),
    State.OPEN: (State.DRAINING, State.CLOSED),
    State.DRAINING: (State.CLOSED,),
    State.CLOSED: (),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a connection ends, and how: `is_reachable` clients get the rest and a close frame."""

    code: CloseCode
    error: ErrorEvent | None = None
    is_drained: bool = False
    is_reachable: bool = True


CLIENT_IS_GONE: Final = Ending(CloseCode.NORMAL, is_reachable=False)
