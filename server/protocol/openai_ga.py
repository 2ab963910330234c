"""OpenAI's current realtime protocol, transcription sessions (`session.type = "transcription"`).

JSON messages in, commands out; session events in, JSON text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from voxlite.server.protocol.messages import (
    Command,
    Configure,
    Fault,
    ItemAdded,
    ItemDone,
    ProtocolError,
    SessionCreated,
    SessionEvent,
    SessionUpdated,
)
from voxlite.server.protocol.openai_common import OpenAIProtocol, item_json
from voxlite.server.protocol.openai_session import (
    include_json,
    merged_include,
    merged_transcription,
    merged_turn_detection,
    transcription_json,
    turn_detection_json,
)
from voxlite.server.protocol.wire import WireModel, validate
from voxlite.server.session.session_config import (
    G711_RATE_HZ,
    RATES_HZ,
    AudioFormat,
    Encoding,
    ServerOffer,
    SessionConfig,
)
from voxlite.server.wording import shorten

_DEFAULT_PCM_RATE_HZ: Final = 24_000
_ENCODINGS: Final = {
    "audio/pcm": Encoding.PCM_S16LE,
    "audio/pcmu": Encoding.MULAW,
    "audio/pcma": Encoding.ALAW,
}
_TYPES: Final = {encoding: type_ for type_, encoding in _ENCODINGS.items()}


class _Format(WireModel):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] | None = None
    rate: int | None = None


class _Input(WireModel):
    format: dict[str, Any] | None = None
    transcription: dict[str, Any] | None = None
    turn_detection: dict[str, Any] | None = None


class _Audio(WireModel):
    input: _Input | None = None


class _Session(WireModel):
    type: str | None = None
    include: list[str] | None = None
    audio: _Audio | None = None


class _Update(WireModel):
    session: _Session


class OpenAIGAProtocol(OpenAIProtocol):
    """Speak to clients of OpenAI's transcription sessions."""

    def _understand_update(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        session = validate(_Update, message).session
        if session.type not in (None, "transcription"):
            raise ProtocolError(
                Fault.INVALID_VALUE,
                f"session.type {shorten(session.type)!r}: this server has only 'transcription'",
                "session.type",
            )
        if "include" in session.model_fields_set:
            config = merged_include(session.include, config)
        if session.audio is not None and session.audio.input is not None:
            config = self._merged_input(session.audio.input, config)
        return Configure(config)

    def _merged_input(self, asked: _Input, config: SessionConfig) -> SessionConfig:
        path = "session.audio.input"
        if asked.format is not None:
            audio_format = merged_format(asked.format, config.audio_format, f"{path}.format")
            config = replace(config, audio_format=audio_format)
        if "transcription" in asked.model_fields_set:
            config = merged_transcription(
                asked.transcription, config, self._offer, f"{path}.transcription"
            )
        if "turn_detection" in asked.model_fields_set:
            turn_detection = merged_turn_detection(
                asked.turn_detection, config.turn_detection, f"{path}.turn_detection"
            )
            config = replace(config, turn_detection=turn_detection)
        return config

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event. See `WireProtocol`."""
        match event:
            case SessionUpdated():
                yield self._event("session.updated", session=session_json(event, self._offer))
            case ItemAdded():
                yield self._event(
                    "conversation.item.added",
                    previous_item_id=event.previous_item_id,
                    item=item_json(event.item_id, "in_progress"),
                )
            case ItemDone():
                yield self._event(
                    "conversation.item.done",
                    previous_item_id=event.previous_item_id,
                    item=item_json(event.item_id, "completed"),
                )
            case _:
                yield from super().send(event)


def session_json(event: SessionCreated | SessionUpdated, offer: ServerOffer) -> dict[str, object]:
    """Write the configuration in force. Noise reduction isn't done: null."""
    config = event.config
    session: dict[str, object] = {
        "id": f"sess_{event.session_id}",
        "object": "realtime.transcription_session",
        "type": "transcription",
        "include": include_json(config),
        "audio": {
            "input": {
                "format": _format_json(config.audio_format),
                "noise_reduction": None,
                "transcription": transcription_json(config, offer),
                "turn_detection": turn_detection_json(config.turn_detection),
            }
        },
    }
    if offer.max_session_s is not None:
        session["expires_at"] = event.created_s + round(offer.max_session_s)
    return session


def merged_format(update: object, current: AudioFormat, path: str) -> AudioFormat:
    """Apply a client's audio format: a rate that it leaves out stays, of the same type.

    Raises:
        ProtocolError: the type or the rate isn't known.
    """
    asked = validate(_Format, update, path)
    encoding = _ENCODINGS[asked.type] if asked.type else current.encoding
    if encoding is not Encoding.PCM_S16LE:
        rates_hz: tuple[int, ...] = (G711_RATE_HZ,)
        default_hz = G711_RATE_HZ
    else:
        rates_hz = RATES_HZ
        default_hz = current.rate_hz if current.encoding is encoding else _DEFAULT_PCM_RATE_HZ
    rate_hz = default_hz if asked.rate is None else asked.rate
    if rate_hz not in rates_hz:
        raise ProtocolError(
            Fault.INVALID_VALUE,
            f"{path}.rate {rate_hz}: one of {', '.join(map(str, rates_hz))}",
            f"{path}.rate",
        )
    return AudioFormat(encoding, rate_hz)


def _format_json(audio_format: AudioFormat) -> dict[str, object]:
    type_ = _TYPES[audio_format.encoding]
    if audio_format.encoding is not Encoding.PCM_S16LE:
        return {"type": type_}
    return {"type": type_, "rate": audio_format.rate_hz}
