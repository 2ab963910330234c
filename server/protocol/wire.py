"""What the protocol modules share: strict reading of messages, and parts that look the same.

Text in, dictionaries and pydantic models out. Knows no protocol as a whole.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from voxlite.engine.errors import InvalidInput
from voxlite.engine.events import Word
from voxlite.server.protocol.messages import Fault, ProtocolError, TokenLogprob
from voxlite.server.session.session_config import ServerOffer, SessionConfig
from voxlite.server.wording import problem_of, shorten

LOGPROBS: Final = "item.input_audio_transcription.logprobs"


class WireModel(BaseModel):
    """A part of a message: wrong types are refused, unknown fields ignored (clients send many)."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=WireModel)


def parse_object(text: str) -> dict[str, Any]:
    """Parse a message.

    Raises:
        ProtocolError: it is not JSON, or not an object.
    """
    try:
        message = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as err:
        raise ProtocolError(Fault.INVALID_JSON, "Invalid JSON") from err
    if not isinstance(message, dict):
        raise ProtocolError(
            Fault.NOT_AN_OBJECT, f"a message is a JSON object, not {type(message).__name__}"
        )
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def event_type(message: Mapping[str, Any]) -> str:
    """Return the message's type.

    Raises:
        ProtocolError: it has none, or it isn't a string.
    """
    type_ = message.get("type")
    if type_ is None:
        raise ProtocolError(Fault.INVALID_EVENT, "Missing required field: type", "type")
    if not isinstance(type_, str):
        raise ProtocolError(Fault.INVALID_EVENT, "type: a string", "type")
    return type_


def event_id(message: Mapping[str, Any]) -> str | None:
    """Return the identifier that the client gave its message, to be named in an error."""
    id_ = message.get("event_id")
    return id_ if isinstance(id_, str) else None


def validate(model: type[Model], value: object, path: str = "") -> Model:
    """Check a part of a message.

    Args:
        path: where the part is, for the error.

    Raises:
        ProtocolError: a field is missing or has a wrong type or value.
    """
    try:
        return model.model_validate(value)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        fields = (str(field) for field in first["loc"])
        param = ".".join(filter(None, (path, *fields))) or None
        is_missing = first["type"] == "missing"
        name = param or "the message"
        message = f"Missing required field: {param}" if is_missing else problem_of(first, name)
        fault = Fault.MISSING_FIELD if is_missing else Fault.INVALID_VALUE
        raise ProtocolError(fault, message, param) from err


def decode_audio(audio: str, param: str = "audio") -> bytes:
    """Decode base64.

    Raises:
        ProtocolError: it isn't base64, a data URI for one.
    """
    try:
        return base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as err:
        reason = "a data URI, not base64" if audio.startswith("data:") else f"not base64: {err}"
        raise ProtocolError(Fault.INVALID_AUDIO, f"Invalid audio data: {reason}", param) from err


def dump(type_: str, **fields: object) -> str:
    """Write a message."""
    return json.dumps({"type": type_, **fields}, separators=(",", ":"))


def check_model(model: str, offer: ServerOffer, param: str = "model") -> None:
    """Raise ProtocolError unless the model is one that is served."""
    if model not in offer.model_names:
        raise ProtocolError(
            Fault.MODEL_NOT_FOUND,
            f"The model `{shorten(model)}` does not exist. "
            f"Served here: {', '.join(offer.model_names)}",
            param,
        )


def with_delay(
    config: SessionConfig, delay: str | int, offer: ServerOffer, param: str
) -> SessionConfig:
    """Change the delay, or raise ProtocolError if it isn't a legal one."""
    try:
        return offer.with_delay(config, delay)
    except InvalidInput as err:
        raise ProtocolError(Fault.INVALID_VALUE, f"{param}: {err}", param) from err


def logprobs_json(logprobs: Iterable[TokenLogprob]) -> list[dict[str, object]]:
    """Write the log probabilities of tokens as OpenAI and vLLM do."""
    return [{"token": t.token, "logprob": t.logprob, "bytes": list(t.bytes)} for t in logprobs]


def words_json(words: Iterable[Word]) -> list[dict[str, object]]:
    """Write words with their times as OpenAI's HTTP side does."""
    return [
        {"word": word.text.strip(), "start": round(word.start_s, 3), "end": round(word.end_s, 3)}
        for word in words
    ]
