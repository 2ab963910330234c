"""A realtime transcription engine for Voxtral-Realtime checkpoints, on PyTorch's own operators."""

from voxlite.engine.config import EngineConfig, SessionOptions
from voxlite.engine.engine import Engine
from voxlite.engine.errors import (
    CheckpointError,
    EngineFailure,
    InvalidInput,
    Overloaded,
    SessionClosed,
    VoxliteError,
)
from voxlite.engine.events import Event, SessionEnded, TextDelta, Usage, UtteranceDone, Word
from voxlite.engine.session import Session
from voxlite.engine.stats import EngineStats, StepStats

__all__ = [
    "CheckpointError",
    "Engine",
    "EngineConfig",
    "EngineFailure",
    "EngineStats",
    "Event",
    "InvalidInput",
    "Overloaded",
    "Session",
    "SessionClosed",
    "SessionEnded",
    "SessionOptions",
    "StepStats",
    "TextDelta",
    "Usage",
    "UtteranceDone",
    "VoxliteError",
    "Word",
]
