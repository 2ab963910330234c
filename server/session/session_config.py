"""What a client may choose for its session, whichever protocol it speaks.

Immutable: an update makes a new `SessionConfig`, or, where it is refused, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from voxlite.engine.errors import InvalidInput

# OpenAI's names for the delay; any legal number of milliseconds is accepted too.
DELAY_NAMES_MS: Final = {"minimal": 240, "low": 480, "medium": 960, "high": 1200, "xhigh": 2400}
RATES_HZ: Final = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
G711_RATE_HZ: Final = 8_000


class Encoding(Enum):
    """How a sample is written; the values are Mistral's names."""

    PCM_S16LE = "pcm_s16le"
    PCM_S32LE = "pcm_s32le"
    PCM_F16LE = "pcm_f16le"
    PCM_F32LE = "pcm_f32le"
    MULAW = "pcm_mulaw"
    ALAW = "pcm_alaw"


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of the audio that a client appends."""

    encoding: Encoding
    rate_hz: int

    def __post_init__(self) -> None:
        if self.rate_hz not in RATES_HZ:
            raise InvalidInput(
                f"sampling rate of {self.rate_hz} Hz: one of {', '.join(map(str, RATES_HZ))}"
            )


PCM_16_KHZ: Final = AudioFormat(Encoding.PCM_S16LE, 16_000)
PCM_24_KHZ: Final = AudioFormat(Encoding.PCM_S16LE, 24_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerVad:
    """Turns end after a silence. `idle_timeout_ms` without speech gives an empty turn."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None


class Eagerness(Enum):
    """How soon a turn that seems complete is ended."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticVad:
    """Turns end when the model has gone on writing padding, or after a longer silence."""

    eagerness: Eagerness = Eagerness.AUTO


TurnDetection = ServerVad | SemanticVad


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What is in force. `delay` is as the client wrote it; `model` is None until it named one."""

    model: str | None = None
    audio_format: AudioFormat = PCM_16_KHZ
    delay: str | int
    turn_detection: TurnDetection | None = None
    has_logprobs: bool = False
    has_words: bool = False
    has_segments: bool = False

    @property
    def delay_ms(self) -> int:
        return self.delay if isinstance(self.delay, int) else DELAY_NAMES_MS[self.delay]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOffer:
    """What this server lets clients choose from. The first model name is the default."""

    model_names: tuple[str, ...]
    default_delay_ms: int
    legal_delays_ms: tuple[int, ...]
    max_session_s: float | None = None

    def initial_config(self, audio_format: AudioFormat) -> SessionConfig:
        """Return the configuration of a session whose client has asked for nothing yet."""
        names = {delay_ms: name for name, delay_ms in DELAY_NAMES_MS.items()}
        delay = names.get(self.default_delay_ms, self.default_delay_ms)
        return SessionConfig(audio_format=audio_format, delay=delay)

    def with_delay(self, config: SessionConfig, delay: str | int) -> SessionConfig:
        """Change the delay.

        Raises:
            InvalidInput: it is neither a known name nor a legal number of milliseconds.
        """
        delay_ms = DELAY_NAMES_MS.get(delay) if isinstance(delay, str) else delay
        if delay_ms not in self.legal_delays_ms:
            raise InvalidInput(
                f"delay {str(delay)[:32]!r}: one of {', '.join(DELAY_NAMES_MS)}, or one of "
                f"{', '.join(map(str, self.legal_delays_ms))} ms"
            )
        return replace(config, delay=delay)
