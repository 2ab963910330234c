"""A server of vLLM's dialect without a model: the text of an utterance counts its chunks."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

KEY = "secret"


class StubServer:
    """What the clients sent, and answers as vLLM gives them: empty deltas among the others."""

    def __init__(self, error_at: str | None = None, needs_key: bool = False) -> None:
        """Make a server.

        Args:
            error_at: a message type that is answered by an error.
        """
        self.messages: list[dict[str, Any]] = []
        self.url = ""
        self._error_at = error_at
        self._needs_key = needs_key

    @property
    def types(self) -> list[str]:
        return [message["type"].removeprefix("input_audio_buffer.") for message in self.messages]

    @property
    def audio(self) -> bytes:
        return b"".join(base64.b64decode(m["audio"]) for m in self.messages if "audio" in m)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubServer]:
        async with serve(
            self._serve_client, "127.0.0.1", 0, process_request=self._check_key
        ) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            self.url = f"ws://127.0.0.1:{port}/v1/realtime"
            yield self

    def _check_key(self, connection: ServerConnection, request: Request) -> Response | None:
        if not self._needs_key or request.headers.get("Authorization") == f"Bearer {KEY}":
            return None
        response = connection.respond(HTTPStatus.UNAUTHORIZED, '{"error": "Unauthorized"}')
        return response

    async def _serve_client(self, socket: ServerConnection) -> None:
        async def send(**event: object) -> None:
            await socket.send(json.dumps(event))

        await send(type="session.created", id="sess-1", created=0)
        text = ""
        num_tokens = 0
        async for frame in socket:
            message = json.loads(frame)
            self.messages.append(message)
            if message["type"] == self._error_at:
                await send(type="error", error="refused", code="processing_error")
                return
            if message["type"] == "input_audio_buffer.append":
                num_tokens += 1
                text += f" {num_tokens}"
                await send(type="transcription.delta", delta="")
                await send(type="transcription.delta", delta=f" {num_tokens}")
            elif message.get("final"):
                usage = {
                    "prompt_tokens": 39,
                    "completion_tokens": num_tokens,
                    "total_tokens": 39 + num_tokens,
                }
                await send(type="transcription.done", text=text, usage=usage)
                text, num_tokens = "", 0
