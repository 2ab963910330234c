"""A server for other projects' clients, and speech with the text that it should give them.

With the bundled model the text is that of its sample; without it, a tiny random checkpoint hears
something in speech-like sounds, and what `voxlite transcribe` writes is what clients must get.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from tests.server.fake_voice import LoudnessModel
from tests.server.harness import LiveServer, serve
from tests.speechlike import speechlike
from tests.word_lists import num_differing, words
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.errors import CheckpointError
from voxlite.server.bundled import bundled_model
from voxlite.server.session.voice_activity import SileroModel

KEY = "sk-of-a-test"
MODEL = "voxlite-demo"
RATE_HZ = 24_000
SILENCE_S = 1.5
LONGEST_TEST_S = 120


@dataclass(frozen=True)
class Speech:
    """A file, its PCM16 at the rate of OpenAI's clients (24 kHz), and its text at both rates."""

    path: Path
    path_24_khz: Path
    pcm: bytes
    pcm_16_khz: bytes
    text: str
    text_24_khz: str
    is_real: bool

    @property
    def pcm_with_silence(self) -> bytes:
        return self.pcm + bytes(2 * round(SILENCE_S * RATE_HZ))

    def assert_turns(self, turns: list[str]) -> None:
        """Check texts of turns that the server's detector cut.

        The bundled model is small: where a turn begins may cost it one word.
        """
        assert turns
        if self.is_real:
            assert num_differing(words(" ".join(turns)), words(self.text)) <= 1, turns
        else:
            assert all(isinstance(turn, str) for turn in turns) and any(turns)


@pytest.fixture(scope="session")
def model_folder(tiny_checkpoint: Path) -> Path:
    try:
        return bundled_model()
    except CheckpointError:
        return tiny_checkpoint


@pytest.fixture(scope="session")
def speech(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Speech:
    folder = tmp_path_factory.mktemp("speech")
    is_real = (model_folder / "sample.wav").exists()
    if is_real:
        samples, rate_hz = soundfile.read(model_folder / "sample.wav", dtype="float32")
        samples = soxr.resample(samples, rate_hz, 16_000)
    else:
        samples = speechlike(5.0, seed=3)
    for name, rate_hz in (("16.wav", 16_000), ("24.wav", RATE_HZ)):
        resampled = soxr.resample(samples, 16_000, rate_hz).clip(-1, 1)
        soundfile.write(folder / name, (resampled * 32_767).astype(np.int16), rate_hz)
    texts = [
        transcribe(model_folder, folder / "16.wav"),
        transcribe(model_folder, folder / "24.wav"),
    ]
    if is_real:
        assert words(texts[0]) == words((model_folder / "sample.txt").read_text())
    return Speech(
        path=folder / "16.wav",
        path_24_khz=folder / "24.wav",
        pcm=soundfile.read(folder / "24.wav", dtype="int16")[0].tobytes(),
        pcm_16_khz=soundfile.read(folder / "16.wav", dtype="int16")[0].tobytes(),
        text=texts[0],
        text_24_khz=texts[1],
        is_real=is_real,
    )


def transcribe(model_folder: Path, path: Path) -> str:
    """Return what `voxlite transcribe` writes."""
    command = ["-m", "voxlite.server.cli", "transcribe", str(path), "--model", str(model_folder)]
    done = subprocess.run(
        [sys.executable, *command, "--format", "json"],
        capture_output=True,
        check=True,
        timeout=LONGEST_TEST_S,
    )
    text: str = json.loads(done.stdout)["text"]
    return text.strip()


@pytest.fixture(scope="session")
def live(model_folder: Path, speech: Speech) -> Iterator[LiveServer]:
    voice_model: Any = SileroModel() if speech.is_real else LoudnessModel()
    engine = Engine(EngineConfig(model=str(model_folder)))
    settings = {"api_key": (KEY,), "served_model_name": (MODEL,)}
    with serve(engine, voice_model=voice_model, **settings) as live:
        yield live


@pytest.fixture
def base_url(live: LiveServer) -> str:
    return f"{live.url}/v1"


@pytest.fixture
def realtime_url(live: LiveServer) -> str:
    return f"{live.url.replace('http', 'ws')}/v1/realtime"
