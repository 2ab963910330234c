"""How likely it is that somebody speaks: the Silero model, from the `silero-vad` package's file.

In: samples at 16 kHz. Out: one probability per window of 32 ms. It knows nothing of turns. A call
takes some 0.2 ms per window: run it off the event loop.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ

# From its import on the library would report to its makers, and keep a number of the machine's.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import onnxruntime  # type: ignore[import-untyped]

WINDOW_SAMPLES: Final = 512
_CONTEXT_SAMPLES: Final = 64
_STATE_SHAPE: Final = (2, 1, 128)

Samples = NDArray[np.float32]


class VoiceStream(Protocol):
    """One stream's speech probabilities."""

    def push(self, samples: Samples) -> list[float]:
        """Return the probability of each window that these samples complete."""
        ...


class VoiceModel(Protocol):
    """What makes streams; it is shared by them all."""

    def new_stream(self) -> VoiceStream: ...


class SileroModel:
    """The model's weights. They are read once and shared by all streams."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._model = onnxruntime.InferenceSession(
            _model_path(), options, providers=["CPUExecutionProvider"]
        )

    def new_stream(self) -> SileroStream:
        """Start a stream."""
        return SileroStream(self._model)


def _model_path() -> str:
    # The package is only looked up, not imported: importing it would load what isn't needed.
    spec = find_spec("silero_vad")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "data" / "silero_vad.onnx")


class SileroStream:
    """The model's state over one stream, and the samples of an unfinished window."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._state = np.zeros(_STATE_SHAPE, np.float32)
        self._context = np.zeros(_CONTEXT_SAMPLES, np.float32)
        self._rest = np.zeros(0, np.float32)
        self._rate = np.array(SAMPLE_RATE_HZ, np.int64)

    def push(self, samples: Samples) -> list[float]:
        """Return the probability of each window that these samples complete."""
        samples = np.concatenate((self._rest, samples))
        num_windows = len(samples) // WINDOW_SAMPLES
        self._rest = samples[num_windows * WINDOW_SAMPLES :].copy()
        windows = samples[: num_windows * WINDOW_SAMPLES].reshape(num_windows, WINDOW_SAMPLES)
        return [self._probability(window) for window in windows]

    def _probability(self, window: Samples) -> float:
        # Each window is heard after the end of the one before.
        heard = np.concatenate((self._context, window))[None]
        self._context = window[-_CONTEXT_SAMPLES:].copy()
        inputs = {"input": heard, "state": self._state, "sr": self._rate}
        probability, self._state = self._model.run(None, inputs)
        return float(probability[0, 0])
