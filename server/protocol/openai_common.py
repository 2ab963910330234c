"""What OpenAI's protocol is in both its versions: events about items, their text, and errors.

The subclasses add how a session is written and updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

from voxlite.engine.events import Usage
from voxlite.server.protocol.messages import (
    Append,
    Clear,
    Cleared,
    Command,
    Commit,
    Committed,
    Completed,
    Delta,
    ErrorEvent,
    Failed,
    Fault,
    IdleTimeout,
    NewId,
    ProtocolError,
    SessionEvent,
    SpeechStarted,
    SpeechStopped,
)
from voxlite.server.protocol.wire import (
    WireModel,
    decode_audio,
    dump,
    event_type,
    logprobs_json,
    validate,
    words_json,
)
from voxlite.server.session.session_config import ServerOffer, SessionConfig
from voxlite.server.wording import shorten

_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"


class _Append(WireModel):
    audio: str


class OpenAIProtocol(ABC):
    """Speak to OpenAI's clients."""

    def __init__(self, offer: ServerOffer, new_id: NewId) -> None:
        self._offer = offer
        self._new_id = new_id

    @abstractmethod
    def _understand_update(self, message: Mapping[str, Any], config: SessionConfig) -> Command: ...

    def receive(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        """Understand a message. See `WireProtocol`."""
        match event_type(message):
            case "session.update" | "transcription_session.update":
                return self._understand_update(message, config)
            case "input_audio_buffer.append":
                return Append(decode_audio(validate(_Append, message).audio))
            case "input_audio_buffer.commit":
                return Commit()
            case "input_audio_buffer.clear":
                return Clear()
            case unknown:
                raise ProtocolError(
                    Fault.UNKNOWN_EVENT,
                    f"Unknown event type: {shorten(unknown)}. A transcription session takes "
                    "session.update and input_audio_buffer.append, .commit and .clear",
                    "type",
                )

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event. See `WireProtocol`."""
        match event:
            case SpeechStarted():
                yield self._event(
                    "input_audio_buffer.speech_started",
                    item_id=event.item_id,
                    audio_start_ms=event.start_ms,
                )
            case SpeechStopped():
                yield self._event(
                    "input_audio_buffer.speech_stopped",
                    item_id=event.item_id,
                    audio_end_ms=event.end_ms,
                )
            case IdleTimeout():
                yield self._event(
                    "input_audio_buffer.timeout_triggered",
                    item_id=event.item_id,
                    audio_start_ms=event.start_ms,
                    audio_end_ms=event.end_ms,
                )
            case Committed():
                yield self._event(
                    "input_audio_buffer.committed",
                    item_id=event.item_id,
                    previous_item_id=event.previous_item_id,
                )
            case Cleared():
                yield self._event("input_audio_buffer.cleared")
            case Delta():
                yield from self._delta(event)
            case Completed():
                yield self._completed(event)
            case Failed():
                yield self._event(
                    f"{_TRANSCRIPTION}.failed",
                    item_id=event.item_id,
                    content_index=0,
                    error=_error_json(event.fault, event.message),
                )
            case ErrorEvent():
                error = _error_json(event.fault, event.message, event.param)
                yield self._event("error", error={**error, "event_id": event.event_id})
            case _:
                pass

    def _event(self, type_: str, **fields: object) -> str:
        return dump(type_, event_id=self._new_id("event"), **fields)

    def _delta(self, event: Delta) -> Iterable[str]:
        # The model's first word carries a space that OpenAI's transcripts don't have.
        text = event.text.lstrip() if event.is_first else event.text
        # A word is complete, and has its times, only after its last letters.
        if not text and not event.words:
            return
        fields: dict[str, object] = {}
        if event.logprobs is not None:
            fields["logprobs"] = logprobs_json(event.logprobs)
        if event.words:
            fields["words"] = words_json(event.words)
        yield self._event(
            f"{_TRANSCRIPTION}.delta",
            item_id=event.item_id,
            content_index=0,
            delta=text,
            **fields,
        )

    def _completed(self, event: Completed) -> str:
        fields: dict[str, object] = {}
        if event.logprobs is not None:
            fields["logprobs"] = logprobs_json(event.logprobs)
        if event.config.has_words:
            fields["words"] = words_json(event.words)
        return self._event(
            f"{_TRANSCRIPTION}.completed",
            item_id=event.item_id,
            content_index=0,
            transcript=event.text.lstrip(),
            usage=usage_json(event.usage),
            **fields,
        )


def item_json(item_id: str, status: str) -> dict[str, object]:
    """Write an utterance as an item of a conversation."""
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "role": "user",
        "status": status,
        "content": [{"type": "input_audio", "transcript": None}],
    }


def usage_json(usage: Usage) -> dict[str, object]:
    """Write token counts as OpenAI does. The model's prompt is audio alone."""
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "input_token_details": {"audio_tokens": usage.prompt_tokens, "text_tokens": 0},
    }


def _error_json(fault: Fault, message: str, param: str | None = None) -> dict[str, object]:
    type_ = "server_error" if fault.is_ours else "invalid_request_error"
    return {"type": type_, "code": fault.code, "message": message, "param": param}
