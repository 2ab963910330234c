"""A session's configuration as OpenAI writes it: parts that both versions of the protocol share.

In: the parts of an update, and what is in force. Out: what will be in force, and its JSON. A field
that an update leaves out stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final, Literal

from pydantic import Field

from voxlite.server.protocol.messages import Fault, ProtocolError
from voxlite.server.protocol.wire import LOGPROBS, WireModel, check_model, validate, with_delay
from voxlite.server.session.session_config import (
    Eagerness,
    SemanticVad,
    ServerOffer,
    ServerVad,
    SessionConfig,
    TurnDetection,
)
from voxlite.server.wording import shorten

# An extension: words with their times in deltas and in the completed text.
WORDS: Final = "item.input_audio_transcription.words"

_Milliseconds = Annotated[int, Field(ge=0, le=60_000)]


class TurnDetectionUpdate(WireModel):
    """`create_response` and `interrupt_response` mean nothing without a conversation."""

    type: Literal["server_vad", "semantic_vad"] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    prefix_padding_ms: _Milliseconds | None = None
    silence_duration_ms: _Milliseconds | None = None
    idle_timeout_ms: Annotated[int, Field(ge=1_000, le=600_000)] | None = None
    eagerness: Literal["low", "medium", "high", "auto"] | None = None


class TranscriptionUpdate(WireModel):
    """Languages, prompts and keywords can't condition this model: they come back as null."""

    model: str | None = None
    delay: str | int | None = None


def merged_turn_detection(
    update: object, current: TurnDetection | None, path: str
) -> TurnDetection | None:
    """Apply a client's turn_detection: fields that it leaves out stay, of the same type.

    Raises:
        ProtocolError: a value is impossible; nothing has changed.
    """
    if update is None:
        return None
    asked = validate(TurnDetectionUpdate, update, path)
    kind = asked.type or ("semantic_vad" if isinstance(current, SemanticVad) else "server_vad")
    if kind == "semantic_vad":
        base = current if isinstance(current, SemanticVad) else SemanticVad()
        return SemanticVad(eagerness=Eagerness(asked.eagerness)) if asked.eagerness else base
    vad = current if isinstance(current, ServerVad) else ServerVad()
    return ServerVad(
        threshold=vad.threshold if asked.threshold is None else asked.threshold,
        prefix_padding_ms=_chosen(asked.prefix_padding_ms, vad.prefix_padding_ms),
        silence_duration_ms=_chosen(asked.silence_duration_ms, vad.silence_duration_ms),
        idle_timeout_ms=(
            asked.idle_timeout_ms
            if "idle_timeout_ms" in asked.model_fields_set
            else vad.idle_timeout_ms
        ),
    )


def _chosen(asked: int | None, current: int) -> int:
    return current if asked is None else asked


def merged_transcription(
    update: object, config: SessionConfig, offer: ServerOffer, path: str
) -> SessionConfig:
    """Apply a client's transcription settings; null stands for the server's defaults.

    Raises:
        ProtocolError: the model isn't served, or the delay isn't legal.
    """
    if update is None:
        default = offer.initial_config(config.audio_format)
        return replace(config, model=None, delay=default.delay)
    asked = validate(TranscriptionUpdate, update, path)
    if asked.model:
        check_model(asked.model, offer, f"{path}.model")
        config = replace(config, model=asked.model)
    if asked.delay is not None:
        config = with_delay(config, asked.delay, offer, f"{path}.delay")
    return config


def merged_include(include: Sequence[str] | None, config: SessionConfig) -> SessionConfig:
    """Apply a client's list of extras.

    Raises:
        ProtocolError: an extra isn't known.
    """
    include = include or ()
    for name in include:
        if name not in (LOGPROBS, WORDS):
            raise ProtocolError(
                Fault.INVALID_VALUE,
                f"include {shorten(name)!r}: one of {LOGPROBS}, {WORDS}",
                "include",
            )
    return replace(config, has_logprobs=LOGPROBS in include, has_words=WORDS in include)


def transcription_json(config: SessionConfig, offer: ServerOffer) -> dict[str, object]:
    """Write what is in force; nothing but the delay conditions this model."""
    return {
        "model": config.model or offer.model_names[0],
        "language": None,
        "prompt": None,
        "delay": config.delay,
    }


def include_json(config: SessionConfig) -> list[str]:
    """Write which extras the client has asked for."""
    return [LOGPROBS] * config.has_logprobs + [WORDS] * config.has_words


def turn_detection_json(turn_detection: TurnDetection | None) -> dict[str, object] | None:
    """Write the turn detection that is in force."""
    match turn_detection:
        case None:
            return None
        case ServerVad():
            return {
                "type": "server_vad",
                "threshold": turn_detection.threshold,
                "prefix_padding_ms": turn_detection.prefix_padding_ms,
                "silence_duration_ms": turn_detection.silence_duration_ms,
                "idle_timeout_ms": turn_detection.idle_timeout_ms,
            }
        case SemanticVad():
            return {"type": "semantic_vad", "eagerness": turn_detection.eagerness.value}
