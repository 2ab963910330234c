"""Mistral's realtime transcription protocol, as the `mistralai` SDK speaks it.

JSON messages in, commands out; session events in, JSON text out. Every flush is answered by one
`transcription.done`; so is the end of the audio, unless nothing came after the last flush.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from voxlite.engine.errors import InvalidInput
from voxlite.server.formats import segments_of
from voxlite.server.protocol.messages import (
    Append,
    Command,
    Commit,
    Completed,
    Configure,
    Delta,
    ErrorEvent,
    Failed,
    Fault,
    Finish,
    ProtocolError,
    SessionCreated,
    SessionEvent,
    SessionUpdated,
)
from voxlite.server.protocol.wire import (
    WireModel,
    decode_audio,
    dump,
    event_type,
    validate,
    with_delay,
)
from voxlite.server.session.session_config import (
    PCM_16_KHZ,
    AudioFormat,
    Encoding,
    ServerOffer,
    SessionConfig,
)
from voxlite.server.wording import shorten

MAX_APPEND_BYTES: Final = 262_144
# Mistral's own number for a session without progress; all others are HTTP statuses.
_CODES: Final = {Fault.IDLE_TIMEOUT: 3804}


class _Format(WireModel):
    encoding: str
    sample_rate: int


class _Session(WireModel):
    audio_format: _Format | None = None
    target_streaming_delay_ms: int | None = None
    diarize: bool | None = None
    turn_detection: dict[str, Any] | None = None


class _Update(WireModel):
    session: _Session


class _Append(WireModel):
    audio: str


class MistralProtocol:
    """Speak to Mistral's clients."""

    def __init__(self, offer: ServerOffer) -> None:
        self._offer = offer
        self._has_audio = False

    def initial_config(self) -> SessionConfig:
        """Return what is in force before the first update."""
        # The segments of `transcription.done`.
        return replace(self._offer.initial_config(PCM_16_KHZ), has_segments=True)

    def receive(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        """Understand a message. See `WireProtocol`."""
        match event_type(message):
            case "session.update":
                return self._update(message, config)
            case "input_audio.append":
                return self._append(message)
            case "input_audio.flush":
                return Commit()
            case "input_audio.end":
                return Finish()
            case unknown:
                raise ProtocolError(
                    Fault.UNKNOWN_EVENT, f"Unknown event type: {shorten(unknown)}", "type"
                )

    def _append(self, message: Mapping[str, Any]) -> Append:
        audio = decode_audio(validate(_Append, message).audio)
        if len(audio) > MAX_APPEND_BYTES:
            raise ProtocolError(
                Fault.INVALID_AUDIO,
                f"{len(audio)} bytes of audio: at most {MAX_APPEND_BYTES} in one message",
                "audio",
            )
        self._has_audio = True
        return Append(audio)

    def _update(self, message: Mapping[str, Any], config: SessionConfig) -> Configure:
        if self._has_audio:
            raise ProtocolError(Fault.INVALID_EVENT, "session.update after audio has started")
        asked = validate(_Update, message).session
        for name in ("diarize", "turn_detection"):
            if getattr(asked, name):
                raise ProtocolError(
                    Fault.INVALID_VALUE, f"session.{name}: this server doesn't do it", name
                )
        if asked.audio_format is not None:
            config = replace(config, audio_format=_audio_format(asked.audio_format))
        if asked.target_streaming_delay_ms is not None:
            config = with_delay(
                config,
                asked.target_streaming_delay_ms,
                self._offer,
                "session.target_streaming_delay_ms",
            )
        return Configure(config)

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event. See `WireProtocol`."""
        match event:
            case SessionCreated():
                yield dump("session.created", session=self._session_json(event))
            case SessionUpdated():
                yield dump("session.updated", session=self._session_json(event))
            case Delta():
                yield dump("transcription.text.delta", text=event.text)
            case Completed():
                yield self._done(event)
            case Failed() | ErrorEvent():
                code = _CODES.get(event.fault, event.fault.http_status)
                yield dump("error", error={"message": event.message, "code": code})
            case _:
                pass

    def _session_json(self, event: SessionCreated | SessionUpdated) -> dict[str, object]:
        audio_format = event.config.audio_format
        return {
            "request_id": event.session_id,
            "model": event.config.model or self._offer.model_names[0],
            "audio_format": {
                "encoding": audio_format.encoding.value,
                "sample_rate": audio_format.rate_hz,
            },
            "target_streaming_delay_ms": event.config.delay_ms,
        }

    def _done(self, event: Completed) -> str:
        return dump(
            "transcription.done",
            model=event.config.model or self._offer.model_names[0],
            text=event.text,
            language=None,
            usage={
                "prompt_tokens": event.usage.prompt_tokens,
                "completion_tokens": event.usage.completion_tokens,
                "total_tokens": event.usage.total_tokens,
                "prompt_audio_seconds": round(event.duration_s),
            },
            segments=[
                {
                    "type": "transcription_segment",
                    "text": segment.text,
                    "start": round(segment.start_s, 3),
                    "end": round(segment.end_s, 3),
                }
                for segment in segments_of(event.words)
            ],
        )


def _audio_format(asked: _Format) -> AudioFormat:
    path = "session.audio_format"
    try:
        encoding = Encoding(asked.encoding)
    except ValueError as err:
        known = ", ".join(each.value for each in Encoding)
        raise ProtocolError(
            Fault.INVALID_VALUE,
            f"{path}.encoding {asked.encoding[:32]!r}: one of {known}",
            f"{path}.encoding",
        ) from err
    try:
        return AudioFormat(encoding, asked.sample_rate)
    except InvalidInput as err:
        raise ProtocolError(Fault.INVALID_VALUE, str(err), f"{path}.sample_rate") from err
