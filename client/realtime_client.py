"""An asyncio client of `/v1/realtime`, in vLLM's dialect: text arrives while audio is sent.

    async with RealtimeClient("ws://localhost:8000/v1/realtime") as client:
        async for event in client.transcribe(chunks):
            match event:
                case Delta(text):
                    print(text, end="", flush=True)
                case Done(text, usage):
                    print(usage.total_tokens)

`transcribe` sends and receives at once. For several utterances on one connection, call it again, or
use `append`, `commit` and `events` yourself. Works with voxlite and with vLLM; `delay_ms` is
voxlite's own.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI


class RealtimeError(Exception):
    """Report what the server refused, or a connection that can't be had or was lost.

    `code` is the server's word for it, or one of "connection_failed" and "connection_closed".
    """

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an utterance: one per 80 ms of audio, and those before its start."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More text."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The whole text of an utterance: the sum of its deltas."""

    text: str
    usage: Usage


class RealtimeClient:
    """One connection. Audio is raw PCM16, little endian, mono, 16 kHz."""

    def __init__(
        self, url: str, model: str = "", api_key: str | None = None, delay_ms: int | None = None
    ) -> None:
        """Describe a connection; `connect`, or entering `async with`, opens it.

        Args:
            url: such as ws://localhost:8000/v1/realtime.
            model: a name that the server knows its model by; empty for the one it has.
            delay_ms: how long the model listens on before it writes: 80 to 1200 in steps of 80, or
                2400; None for the server's default.
        """
        self._url = url
        self._model = model
        self._api_key = api_key
        self._delay_ms = delay_ms
        self._socket: ClientConnection | None = None
        self._session_id = ""

    @property
    def session_id(self) -> str:
        """The server's name for this session, once connected."""
        return self._session_id

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect, and name the model and the delay.

        Raises:
            RealtimeError: the server can't be reached or refuses.
        """
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        try:
            self._socket = await connect(
                self._url,
                additional_headers=headers,
                max_size=None,
                # Base64 of audio hardly shrinks.
                compression=None,
                # A server that reads no faster than it transcribes answers pings late.
                ping_timeout=None,
            )
        except InvalidStatus as err:
            raise _refusal(err) from err
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as err:
            raise RealtimeError(f"{self._url}: {err}", "connection_failed") from err
        try:
            await self._open_session()
        except BaseException:
            await self.close()
            raise

    async def _open_session(self) -> None:
        created = await self._receive()
        if created["type"] != "session.created":
            raise RealtimeError(f"the server began with {created['type']!r}", "connection_failed")
        self._session_id = created["id"]
        # vLLM would take an unknown field in silence; a delay it can't set isn't asked for.
        delay = {} if self._delay_ms is None else {"transcription_delay_ms": self._delay_ms}
        await self._send("session.update", model=self._model, **delay)
        # vLLM's cue to begin; audio is transcribed from here on.
        await self._send("input_audio_buffer.commit")

    async def close(self) -> None:
        """Close the connection. Text that is still to come is lost."""
        if self._socket is not None:
            await self._socket.close()

    async def append(self, pcm: bytes) -> None:
        """Send audio; waits while the server has no room for more."""
        await self._send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode("ascii"))

    async def commit(self, *, final: bool = True) -> None:
        """End the utterance: its last words come, then `Done`. The connection stays open.

        Args:
            final: False only tells vLLM to begin, which voxlite does by itself.
        """
        await self._send("input_audio_buffer.commit", final=final)

    async def events(self) -> AsyncIterator[Delta | Done]:
        """Yield text as it comes, for as long as the connection is open.

        Raises:
            RealtimeError: the server refused something, or the connection was lost.
        """
        while True:
            yield await self._next_event()

    async def transcribe(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[Delta | Done]:
        """Send an utterance's audio and yield its text meanwhile. `Done` is the last event.

        Raises:
            RealtimeError: as `events`. Whatever `chunks` raises is raised here too.
        """
        sender = asyncio.create_task(self._send_utterance(chunks))
        try:
            while True:
                event = await self._next_event_while(sender)
                yield event
                if isinstance(event, Done):
                    return
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_utterance(self, chunks: AsyncIterable[bytes]) -> None:
        async for chunk in chunks:
            await self.append(chunk)
        await self.commit(final=True)

    async def _next_event_while(self, sender: asyncio.Task[None]) -> Delta | Done:
        """Wait for the next event, or raise what the sender raises as soon as it does."""
        receiver = asyncio.create_task(self._next_event())
        try:
            await asyncio.wait({receiver, sender}, return_when=asyncio.FIRST_COMPLETED)
            # What the server said explains why nothing can be sent to it, so it goes first.
            if not receiver.done():
                await sender
            return await receiver
        finally:
            receiver.cancel()

    async def _next_event(self) -> Delta | Done:
        while True:
            event = await self._receive()
            match event["type"]:
                case "transcription.delta":
                    # vLLM sends a delta for each token, most of them empty.
                    if event["delta"]:
                        return Delta(event["delta"])
                case "transcription.done":
                    return Done(event["text"], _usage(event["usage"]))

    async def _send(self, type_: str, **fields: object) -> None:
        if self._socket is None:
            raise RealtimeError("not connected", "connection_closed")
        try:
            await self._socket.send(json.dumps({"type": type_, **fields}))
        except ConnectionClosed as err:
            raise _closed(err) from err

    async def _receive(self) -> dict[str, Any]:
        """Return the next event.

        Raises:
            RealtimeError: it is an error, or there is none because the connection was lost.
        """
        if self._socket is None:
            raise RealtimeError("not connected", "connection_closed")
        try:
            event: dict[str, Any] = json.loads(await self._socket.recv())
        except ConnectionClosed as err:
            raise _closed(err) from err
        if event["type"] == "error":
            raise _error(event)
        return event


def _usage(usage: dict[str, Any]) -> Usage:
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])


def _error(event: dict[str, Any]) -> RealtimeError:
    """Read an error: flat in vLLM's dialect, nested before the server knows the dialect."""
    error = event["error"]
    if isinstance(error, dict):
        return RealtimeError(error["message"], error.get("code"))
    return RealtimeError(error, event.get("code"))


def _closed(err: ConnectionClosed) -> RealtimeError:
    reason = f": {err.rcvd.reason}" if err.rcvd is not None and err.rcvd.reason else ""
    return RealtimeError(f"the server closed the connection{reason}", "connection_closed")


def _refusal(err: InvalidStatus) -> RealtimeError:
    """Read why a handshake was refused."""
    status = err.response.status_code
    try:
        error = json.loads(err.response.body)["error"]
        message, code = error["message"], error["code"]
    except (ValueError, KeyError, TypeError):
        message, code = "the server refused the connection", "connection_failed"
    return RealtimeError(f"{message} (HTTP {status})", code)
