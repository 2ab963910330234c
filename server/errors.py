"""How a failure reaches a client: the one table from the engine's errors to faults on the wire."""

from __future__ import annotations

from voxlite.engine.errors import (
    CheckpointError,
    InvalidInput,
    Overloaded,
    SessionClosed,
    VoxliteError,
)
from voxlite.server.async_engine import NotLoaded
from voxlite.server.protocol.messages import Fault

# The first class that fits counts.
_FAULTS: tuple[tuple[type[VoxliteError], Fault], ...] = (
    (InvalidInput, Fault.INVALID_VALUE),
    (NotLoaded, Fault.LOADING),
    (Overloaded, Fault.OVERLOADED),
    (SessionClosed, Fault.ENGINE_FAILURE),
    (CheckpointError, Fault.ENGINE_FAILURE),
    (VoxliteError, Fault.ENGINE_FAILURE),
)


def fault_of(error: VoxliteError) -> Fault:
    """Return what an error is called on the wire."""
    return next(fault for class_, fault in _FAULTS if isinstance(error, class_))
