"""A real server (uvicorn) on a free port with a given engine, and small clients for it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn
from websockets.sync.client import ClientConnection, connect

from tests.server.fake_engine import FakeEngine
from tests.server.fake_voice import LoudnessModel
from voxlite.server.app import create_app
from voxlite.server.commands.serve import DrainingServer, uvicorn_config
from voxlite.server.settings import ServerSettings

TIMEOUT_S = 60


class LiveServer:
    """A running server and its address."""

    def __init__(self, server: uvicorn.Server, engine: Any, settings: ServerSettings) -> None:
        self._server = server
        self.engine = engine
        self.settings = settings
        self.listener = server.servers[0].sockets[0]
        self.app = server.config.app
        self.services = self.app.state.services
        self.port = self.listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **kwargs: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False, **kwargs)

    @contextmanager
    def socket(self, path: str = "/v1/realtime", **kwargs: Any) -> Iterator[Client]:
        with connect(
            f"ws://127.0.0.1:{self.port}{path}",
            max_size=None,
            compression=None,
            proxy=None,
            close_timeout=1,
            **kwargs,
        ) as websocket:
            yield Client(websocket)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens soon, without sleeping longer than needed."""
        waiting = threading.Event()
        for _ in range(TIMEOUT_S * 100):
            if condition():
                return
            waiting.wait(0.01)
        raise AssertionError("it did not happen")

    def stop(self) -> None:
        """Begin to stop the server, as a signal does."""
        self._server.should_exit = True

    @property
    def num_sessions(self) -> int:
        """Seats that are taken."""
        return self.engine.num_taken_seats


class Client:
    """A socket with JSON messages."""

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket

    def send(self, type_: str, **fields: Any) -> None:
        self.websocket.send(json.dumps({"type": type_, **fields}))

    def append(self, audio: bytes, type_: str = "input_audio_buffer.append") -> None:
        self.send(type_, audio=base64.b64encode(audio).decode())

    def receive(self) -> dict[str, Any]:
        return json.loads(self.websocket.recv(timeout=TIMEOUT_S))

    def until(self, *types: str) -> list[dict[str, Any]]:
        """Receive up to and including an event of one of these types."""
        events = [self.receive()]
        while events[-1]["type"] not in types:
            events.append(self.receive())
        return events

    def next(self, *types: str) -> dict[str, Any]:
        return self.until(*types)[-1]


@contextmanager
def serve(
    engine: Any = None,
    load: Callable[[], Any] | None = None,
    voice_model: Any = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Run a server until the block ends."""
    engine = engine or FakeEngine()
    defaults = {"port": 0, "served_model_name": ("voxtral", "other")}
    chosen = ServerSettings(**{**defaults, **settings})
    app = create_app(
        chosen, load_engine=load or (lambda: engine), voice_model=voice_model or LoudnessModel()
    )
    server = DrainingServer(uvicorn_config(app, chosen))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    live = None
    try:
        waiting = threading.Event()
        while not server.started:
            assert thread.is_alive()
            waiting.wait(0.005)
        live = LiveServer(server, engine, chosen)
        if load is None:
            live.wait_until(lambda: live.services.engine.status.value == "ready")
        yield live
    finally:
        server.should_exit = True
        if hasattr(engine, "running"):
            engine.running.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
