"""A realtime transcription engine for Voxtral-Realtime checkpoints, on PyTorch's own operators."""

from engine.config import EngineConfig, SessionOptions
from engine.engine import Engine, EngineStats, StepStats
from engine.errors import (
    CheckpointError,
    EngineFailure,
    InvalidInput,
    Overloaded,
    SessionClosed,
    VoxliteError,
)
from engine.events import Event, SessionEnded, TextDelta, Usage, UtteranceDone, Word
from engine.session import Session

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
