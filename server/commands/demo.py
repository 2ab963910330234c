"""`voxlite demo`: a server with the bundled model, and a client that speaks a sample to it.

The sample is sent at the pace it was spoken, through the socket, in OpenAI's protocol; words are
printed as they come.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import numpy as np
import typer
import uvicorn
from websockets.sync.client import ClientConnection, connect

from voxlite.engine.audio.audio_file import read_audio
from voxlite.engine.errors import EngineFailure, VoxliteError
from voxlite.server.app import create_app
from voxlite.server.bundled import bundled_model
from voxlite.server.commands.serve import uvicorn_config
from voxlite.server.session.session_config import PCM_16_KHZ
from voxlite.server.settings import ServerSettings

_CHUNK_SAMPLES: Final = PCM_16_KHZ.rate_hz // 20  # 50 ms
_MAX_WAIT_S: Final = 600.0


def run_demo() -> None:
    """Start a server, speak the bundled sample to it in real time, print the words as they come."""
    sample = bundled_model() / "sample.wav"
    with_server = _DemoServer(ServerSettings(host="127.0.0.1", port=0, uvicorn_log_level="warning"))
    with with_server as port:
        url = f"ws://127.0.0.1:{port}/v1/realtime?intent=transcription"
        typer.echo(f"Server: {url}\nAudio:  {sample}, at the pace it was spoken\n")
        with connect(url, proxy=None) as socket:
            transcribe_live(socket, sample)


class _DemoServer:
    """A server on a thread, on a free port, for as long as the `with` block runs."""

    def __init__(self, settings: ServerSettings) -> None:
        self._ready = Event()
        self._failure: VoxliteError | None = None
        self._app = create_app(settings, on_failure=self._fail)
        self._server = uvicorn.Server(uvicorn_config(self._app, settings))
        self._thread = Thread(target=self._run, name="server", daemon=True)

    def __enter__(self) -> int:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._stop()
            raise self._failure
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve()
        finally:
            watch.cancel()
            self._failure = self._failure or EngineFailure("the server has stopped")
            self._ready.set()

    async def _watch(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        await self._app.state.services.engine.loaded()
        self._ready.set()

    def _fail(self, error: VoxliteError) -> None:
        self._failure = error
        self._ready.set()


def transcribe_live(socket: ClientConnection, path: Path) -> None:
    """Send a file at its own pace and print its words as they come."""
    session: dict[str, Any] = {
        "type": "transcription",
        "audio": {"input": {"format": {"type": "audio/pcm", "rate": PCM_16_KHZ.rate_hz}}},
    }
    socket.send(json.dumps({"type": "session.update", "session": session}))
    sender = Thread(target=_send, args=(socket, path), name="sender", daemon=True)
    sender.start()
    while True:
        event = json.loads(socket.recv(timeout=_MAX_WAIT_S))
        match event["type"]:
            case "conversation.item.input_audio_transcription.delta":
                typer.echo(event["delta"], nl=False)
            case "conversation.item.input_audio_transcription.completed":
                typer.echo(f"\n\nDone: {event['usage']['total_tokens']} tokens.")
                return
            case "error":
                raise EngineFailure(event["error"]["message"])


def _send(socket: ClientConnection, path: Path) -> None:
    samples = np.concatenate(list(read_audio(path)))
    started_s = time.monotonic()
    for first in range(0, len(samples), _CHUNK_SAMPLES):
        # Each chunk leaves once it has been spoken to its end.
        spoken_s = (first + _CHUNK_SAMPLES) / PCM_16_KHZ.rate_hz
        time.sleep(max(0.0, started_s + spoken_s - time.monotonic()))
        chunk = (samples[first : first + _CHUNK_SAMPLES] * 32_767).astype("<i2").tobytes()
        audio = base64.b64encode(chunk).decode()
        socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
    socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
