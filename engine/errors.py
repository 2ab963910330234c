"""Every error that leaves the engine, by who can do something about it.

    VoxliteError
    |- InvalidInput      the client sent something that can't be used; the session goes on
    |- Overloaded        no capacity now (sessions or buffered audio); try again later
    |- SessionClosed     a call on a session that has ended
    |- CheckpointError   the operator's model folder can't be used
    `- EngineFailure     a fault of ours; the session, or the engine, has ended

Each class has a stable `code` for the wire. Messages name the value and the limit.
"""

from __future__ import annotations


class VoxliteError(Exception):
    """Base of all errors raised or reported by the engine."""

    code = "error"


class InvalidInput(VoxliteError):
    """Report input that can't be used: the value and what would be accepted."""

    code = "invalid_input"


class Overloaded(VoxliteError):
    """Report a capacity that is used up: which one and its limit."""

    code = "overloaded"


class SessionClosed(VoxliteError):
    """Report a call on a session that has been finished, closed or has failed."""

    code = "session_closed"


class CheckpointError(VoxliteError):
    """Report a checkpoint that can't be loaded: the file, and the tensor where there is one."""

    code = "checkpoint_error"


class EngineFailure(VoxliteError):
    """Report a fault inside the engine."""

    code = "engine_failure"
