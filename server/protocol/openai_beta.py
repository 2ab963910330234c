"""OpenAI's beta realtime protocol: a flat session, `transcription_session.update` or
`session.update`, and `conversation.item.created`.

JSON messages in, commands out; session events in, JSON text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from voxlite.server.protocol.messages import (
    Command,
    Configure,
    ItemAdded,
    NewId,
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
from voxlite.server.protocol.wire import WireModel, event_type, validate
from voxlite.server.session.session_config import (
    G711_RATE_HZ,
    PCM_24_KHZ,
    AudioFormat,
    Encoding,
    ServerOffer,
    SessionConfig,
)

_FORMATS: Final = {
    "pcm16": PCM_24_KHZ,
    "g711_ulaw": AudioFormat(Encoding.MULAW, G711_RATE_HZ),
    "g711_alaw": AudioFormat(Encoding.ALAW, G711_RATE_HZ),
}
_NAMES: Final = {audio_format.encoding: name for name, audio_format in _FORMATS.items()}


class _Session(WireModel):
    modalities: list[str] | None = None  # text is all there is
    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | None = None
    input_audio_transcription: dict[str, Any] | None = None
    turn_detection: dict[str, Any] | None = None
    include: list[str] | None = None


class _Update(WireModel):
    session: _Session


class OpenAIBetaProtocol(OpenAIProtocol):
    """Speak to clients of OpenAI's beta. Updates are answered in the client's own terms."""

    def __init__(self, offer: ServerOffer, new_id: NewId) -> None:
        super().__init__(offer, new_id)
        self._updated_type = "transcription_session.updated"

    def _understand_update(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        asked = validate(_Update, message).session
        self._updated_type = f"{event_type(message)}d"
        if asked.input_audio_format is not None:
            config = replace(config, audio_format=_FORMATS[asked.input_audio_format])
        if "include" in asked.model_fields_set:
            config = merged_include(asked.include, config)
        if "input_audio_transcription" in asked.model_fields_set:
            config = merged_transcription(
                asked.input_audio_transcription,
                config,
                self._offer,
                "session.input_audio_transcription",
            )
        if "turn_detection" in asked.model_fields_set:
            turn_detection = merged_turn_detection(
                asked.turn_detection, config.turn_detection, "session.turn_detection"
            )
            config = replace(config, turn_detection=turn_detection)
        return Configure(config)

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event. See `WireProtocol`."""
        match event:
            case SessionUpdated():
                yield self._event(self._updated_type, session=session_json(event, self._offer))
            case ItemAdded():
                yield self._event(
                    "conversation.item.created",
                    previous_item_id=event.previous_item_id,
                    item=item_json(event.item_id, "completed"),
                )
            case _:
                yield from super().send(event)


def session_json(event: SessionCreated | SessionUpdated, offer: ServerOffer) -> dict[str, object]:
    """Write the configuration in force, flat."""
    return {
        "id": f"sess_{event.session_id}",
        "object": "realtime.transcription_session",
        **flat_json(event.config, offer),
        "turn_detection": turn_detection_json(event.config.turn_detection),
        "include": include_json(event.config),
    }


def flat_json(config: SessionConfig, offer: ServerOffer) -> dict[str, object]:
    """Write the fields that only the flat form has."""
    return {
        "modalities": ["text"],
        "input_audio_format": _NAMES[config.audio_format.encoding],
        "input_audio_noise_reduction": None,
        "input_audio_transcription": transcription_json(config, offer),
    }
