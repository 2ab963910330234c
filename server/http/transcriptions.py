"""`POST /v1/audio/transcriptions`: a file in, its text out, whole or as it is written.

What can't have an effect on this model (a language, a prompt, a temperature) is accepted, because
clients send it unasked, and named in the header `X-Voxlite-Ignored`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.types import Message

from voxlite.engine.config import SessionOptions
from voxlite.engine.errors import VoxliteError
from voxlite.engine.events import TextDelta, UtteranceDone
from voxlite.server.formats import segments_of, to_srt, to_verbose_json, to_vtt
from voxlite.server.http.errors import voxlite_error_body
from voxlite.server.http.file_transcription import FileTranscription
from voxlite.server.protocol.messages import Fault, ProtocolError
from voxlite.server.protocol.openai_common import usage_json
from voxlite.server.protocol.wire import check_model, logprobs_json, with_delay
from voxlite.server.services import Services, services_of
from voxlite.server.session.session_config import PCM_16_KHZ, ServerOffer
from voxlite.server.transcript import Transcript
from voxlite.server.wording import problem_of

router = APIRouter()

_LIST_FIELDS: Final = ("include", "timestamp_granularities")
_STREAMED_FORMATS: Final = ("json", "text")
_Events = AsyncIterator[TextDelta | UtteranceDone]


def _or_none(value: object) -> object:
    return value or None


class _Options(BaseModel):
    """The fields of the form that are checked; all but the temperature have an effect."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Annotated[str | None, BeforeValidator(_or_none)] = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    stream: bool = False
    include: list[Literal["logprobs"]] = []
    timestamp_granularities: list[Literal["word", "segment"]] = []
    transcription_delay_ms: int | None = None
    # Checked as OpenAI does, but greedy decoding has no use for it.
    temperature: Annotated[float | None, BeforeValidator(_or_none), Field(ge=0, le=1)] = None

    @property
    def has_logprobs(self) -> bool:
        return "logprobs" in self.include

    @property
    def granularities(self) -> list[Literal["word", "segment"]]:
        return self.timestamp_granularities or ["segment"]


_EFFECTIVE_FIELDS: Final = {"file", *_Options.model_fields} - {"temperature"}


@router.post("/v1/audio/transcriptions")
async def transcribe(request: Request) -> Response:
    """Transcribe a file."""
    services = services_of(request)
    form = await _read_form(request, services.settings.max_upload_bytes)
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ProtocolError(Fault.MISSING_FIELD, "Missing required field: file", "file")
        options = _options(form, services.offer())
        run = _Run(services, options, form, file)
    except BaseException:
        await form.close()
        raise
    response = await (run.stream() if options.stream else run.whole(request))
    ignored = sorted(_plain_names(form) - _EFFECTIVE_FIELDS)
    if ignored:
        response.headers["X-Voxlite-Ignored"] = ", ".join(_header_safe(ignored))
    return response


class _Run:
    """One request: its file, its session, and what has been written so far."""

    def __init__(
        self, services: Services, options: _Options, form: FormData, file: UploadFile
    ) -> None:
        self._options = options
        self._form = form
        self._file = file
        # verbose_json tells the mean log probability of each segment.
        needs_logprobs = options.has_logprobs or options.response_format == "verbose_json"
        self._transcription = FileTranscription(
            services.engine,
            SessionOptions(delay_ms=options.transcription_delay_ms, logprobs=needs_logprobs),
        )
        self._transcript = Transcript(services.engine.ready.tokenizer.token_bytes)
        services.metrics.http_requests.labels(response_format=options.response_format).inc()

    async def whole(self, request: Request) -> Response:
        """Answer once everything is written, unless the client has left by then."""
        work = asyncio.create_task(self._finish())
        leaving = asyncio.create_task(_wait_for_disconnect(request))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return self._answer(await work) if work.done() else Response(status_code=499)
        finally:
            work.cancel()
            leaving.cancel()
            await self._close()

    async def stream(self) -> Response:
        """Answer as it is written. A file that isn't audio is refused before the answer begins."""
        events = self._transcription.run(self._file.file)
        try:
            first = await anext(events)
        except BaseException:
            await self._close()
            raise
        return StreamingResponse(
            self._messages(first, events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def _finish(self) -> UtteranceDone:
        async for event in self._transcription.run(self._file.file):
            if isinstance(event, UtteranceDone):
                return event
            self._transcript.add(event)
        raise AssertionError("events end with an UtteranceDone")

    async def _messages(
        self, event: TextDelta | UtteranceDone, events: _Events
    ) -> AsyncIterator[str]:
        try:
            while isinstance(event, TextDelta):
                first_new = len(self._transcript.logprobs)
                text = self._transcript.add(event)
                if text:
                    yield _sse("transcript.text.delta", delta=text, **self._logprobs(first_new))
                event = await anext(events)
            yield _sse(
                "transcript.text.done",
                text=self._transcript.text.lstrip(),
                usage=usage_json(event.usage),
                **self._logprobs(0),
            )
        except VoxliteError as err:
            yield f"data: {json.dumps(voxlite_error_body(err))}\n\n"
        finally:
            await self._close()

    def _logprobs(self, first: int) -> dict[str, object]:
        if not self._options.has_logprobs:
            return {}
        return {"logprobs": logprobs_json(self._transcript.logprobs[first:])}

    def _answer(self, done: UtteranceDone) -> Response:
        duration_s = done.end_s - done.start_s
        text, words = self._transcript.text.lstrip(), self._transcript.words
        match self._options.response_format:
            case "text":
                return PlainTextResponse(text + "\n")
            case "srt":
                return PlainTextResponse(to_srt(segments_of(words)))
            case "vtt":
                return PlainTextResponse(to_vtt(segments_of(words)), media_type="text/vtt")
            case "verbose_json":
                body = to_verbose_json(
                    text,
                    segments_of(words),
                    duration_s=duration_s,
                    granularities=self._options.granularities,
                )
                return Response(body, media_type="application/json")
        usage = {"type": "duration", "seconds": round(duration_s, 3)}
        return JSONResponse({"text": text, "usage": usage, **self._logprobs(0)})

    async def _close(self) -> None:
        self._transcription.close()
        await self._form.close()


def _sse(type_: str, **fields: object) -> str:
    return f"data: {json.dumps({'type': type_, **fields})}\n\n"


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_form(request: Request, max_bytes: int) -> FormData:
    """Read a multipart body of a bounded size, large files to disk."""
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        _check_size(num_bytes, max_bytes)
        return message

    announced = request.headers.get("content-length", "0")
    _check_size(int(announced) if announced.isascii() and announced.isdigit() else 0, max_bytes)
    return await Request(request.scope, receive).form(max_files=1)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ProtocolError(
            Fault.MESSAGE_TOO_LARGE,
            f"a request of {num_bytes} bytes or more: at most {max_bytes} (--max-upload-mib)",
            "file",
        )


def _plain_names(form: FormData) -> set[str]:
    return {name.removesuffix("[]") for name in form}


def _header_safe(names: list[str]) -> Iterator[str]:
    """Keep the names that OpenAI's and vLLM's clients could have sent, not just anything."""
    return (name for name in names if name.isascii() and name.isidentifier() and len(name) < 64)


def _options(form: FormData, offer: ServerOffer) -> _Options:
    """Read the form.

    Raises:
        ProtocolError: a field has a value that isn't possible.
    """
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        plain = name.removesuffix("[]")
        if plain in _LIST_FIELDS:
            fields.setdefault(plain, []).append(value)
        elif plain in _Options.model_fields:
            fields[plain] = value
    try:
        options = _Options.model_validate(fields)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        param = str(first["loc"][0])
        raise ProtocolError(Fault.INVALID_VALUE, problem_of(first, param), param) from err
    if options.model is not None:
        check_model(options.model, offer)
    if options.transcription_delay_ms is not None:
        delay_ms = options.transcription_delay_ms
        with_delay(offer.initial_config(PCM_16_KHZ), delay_ms, offer, "transcription_delay_ms")
    _check_combination(options)
    return options


def _check_combination(options: _Options) -> None:
    if options.stream and options.response_format not in _STREAMED_FORMATS:
        raise ProtocolError(
            Fault.INVALID_VALUE,
            f"response_format {options.response_format!r} can't be streamed: json or text",
            "response_format",
        )
    if options.timestamp_granularities and options.response_format != "verbose_json":
        raise ProtocolError(
            Fault.INVALID_VALUE,
            "timestamp_granularities need response_format 'verbose_json'",
            "timestamp_granularities",
        )
