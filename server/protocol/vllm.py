"""vLLM's realtime protocol: flat messages, no items, one text per final commit.

JSON messages in, commands out; session events in, JSON text out. Two things differ from vLLM: a
plain commit starts nothing, as text is written from the first sample on; and deltas without text
are not sent. `transcription_delay_ms`, `include` and `timestamp_granularities` in
`session.update` are extensions, answered by a `session.updated` that vLLM's own messages don't get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

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
    Nothing,
    ProtocolError,
    SessionEvent,
    SessionUpdated,
)
from voxlite.server.protocol.wire import (
    LOGPROBS,
    WireModel,
    check_model,
    decode_audio,
    dump,
    event_type,
    logprobs_json,
    validate,
    with_delay,
    words_json,
)
from voxlite.server.session.session_config import ServerOffer, SessionConfig
from voxlite.server.wording import shorten

# Where vLLM has a code of its own.
_CODES: Final = {
    Fault.NOT_AN_OBJECT: "processing_error",
    Fault.MISSING_FIELD: "processing_error",
    Fault.INVALID_VALUE: "invalid_event",
    Fault.ENGINE_FAILURE: "processing_error",
}


class _Update(WireModel):
    model: str
    transcription_delay_ms: int | None = None
    include: list[Literal["item.input_audio_transcription.logprobs"]] | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None


class _Append(WireModel):
    audio: str


class _Commit(WireModel):
    final: bool = False


class VllmProtocol:
    """Speak to vLLM's clients."""

    def __init__(self, offer: ServerOffer) -> None:
        self._offer = offer

    def receive(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        """Understand a message. See `WireProtocol`."""
        match event_type(message):
            case "session.update":
                return self._update(message, config)
            case "input_audio_buffer.append":
                audio = decode_audio(validate(_Append, message).audio)
                if not audio:
                    raise ProtocolError(Fault.INVALID_AUDIO, "Invalid audio data: empty", "audio")
                return Append(audio)
            case "input_audio_buffer.commit":
                is_final = validate(_Commit, message).final
                if config.model is None:
                    raise ProtocolError(
                        Fault.MODEL_NOT_VALIDATED,
                        "Model not validated: send session.update with a model before a commit",
                    )
                return Commit() if is_final else Nothing()
            case unknown:
                raise ProtocolError(
                    Fault.UNKNOWN_EVENT, f"Unknown event type: {shorten(unknown)}", "type"
                )

    def _update(self, message: Mapping[str, Any], config: SessionConfig) -> Configure:
        if message.get("model") is None:
            raise ProtocolError(Fault.INVALID_EVENT, "Missing required field: model", "model")
        update = validate(_Update, message)
        # vLLM lets the empty name pass.
        model = update.model or self._offer.model_names[0]
        check_model(model, self._offer)
        config = replace(config, model=model)
        if update.transcription_delay_ms is not None:
            config = with_delay(
                config, update.transcription_delay_ms, self._offer, "transcription_delay_ms"
            )
        if update.include is not None:
            config = replace(config, has_logprobs=LOGPROBS in update.include)
        if update.timestamp_granularities is not None:
            config = replace(
                config,
                has_words="word" in update.timestamp_granularities,
                has_segments="segment" in update.timestamp_granularities,
            )
        has_extensions = bool(update.model_fields_set - {"model"})
        return Configure(config, is_acknowledged=has_extensions)

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event. See `WireProtocol`."""
        match event:
            case SessionUpdated(config=config):
                yield dump(
                    "session.updated",
                    model=config.model,
                    transcription_delay_ms=config.delay_ms,
                    include=[LOGPROBS] if config.has_logprobs else [],
                    timestamp_granularities=["word"] * config.has_words
                    + ["segment"] * config.has_segments,
                )
            case Delta() if event.text:
                logprobs = (
                    {} if event.logprobs is None else {"logprobs": logprobs_json(event.logprobs)}
                )
                yield dump("transcription.delta", delta=event.text, **logprobs)
            case Completed():
                yield dump(
                    "transcription.done", text=event.text, usage=_usage(event), **_times(event)
                )
            case Failed() | ErrorEvent():
                code = _CODES.get(event.fault, event.fault.code)
                yield dump("error", error=event.message, code=code)
            case _:
                pass


def _usage(event: Completed) -> dict[str, int | None]:
    return {
        "prompt_tokens": event.usage.prompt_tokens,
        "total_tokens": event.usage.total_tokens,
        "completion_tokens": event.usage.completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _times(event: Completed) -> dict[str, object]:
    times: dict[str, object] = {}
    if event.config.has_words:
        times["words"] = words_json(event.words)
    if event.config.has_segments:
        times["segments"] = [
            {
                "text": segment.text,
                "start": round(segment.start_s, 3),
                "end": round(segment.end_s, 3),
            }
            for segment in segments_of(event.words)
        ]
    return times
