"""`voxlite serve`: settings in, a server that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any, Final

import uvicorn
from pydantic import ValidationError
from starlette.types import ASGIApp

from voxlite.engine.errors import InvalidInput, VoxliteError
from voxlite.server.app import create_app
from voxlite.server.listening import listen
from voxlite.server.realtime.connection import MAX_MESSAGE_BYTES
from voxlite.server.realtime.socket_transport import BoundedWebSocketProtocol
from voxlite.server.services import Services
from voxlite.server.settings import ServerSettings
from voxlite.server.wording import problem_of

logger = logging.getLogger(__name__)

# How long a thread may keep Python's lock while another waits for it. The engine's thread gives it
# up in each of a step's hundreds of calls of PyTorch, and with Python's own 5 ms waited as long to
# have it back whenever the event loop was busy.
_SWITCH_INTERVAL_S: Final = 0.0005
# A frame up to twice the limit is read and then refused in words; a larger one ends the socket.
_MAX_FRAME_BYTES: Final = 2 * MAX_MESSAGE_BYTES
_PING_INTERVAL_S: Final = 20.0
# Docker kills a container 10 s after it asked it to stop: what is left then has to fit in 2 s.
_MAX_DRAIN_S: Final = 8.0
_MAX_SHUTDOWN_S: Final = 1


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Return how the application is served."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=settings.uvicorn_log_level,
        log_config=None,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ws=BoundedWebSocketProtocol,
        ws_max_size=_MAX_FRAME_BYTES,
        # Pings keep a quiet connection open on its way. Nobody is judged by the pongs: a client
        # that is busy sending may not read them. The idle timeout ends those that are gone.
        ws_ping_interval=_PING_INTERVAL_S,
        ws_ping_timeout=None,
        # Base64 of audio hardly shrinks, and each connection would hold two windows.
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=_MAX_SHUTDOWN_S,
        server_header=False,
        lifespan="on",
    )


class DrainingServer(uvicorn.Server):
    """Let text and answers that are on their way arrive before the server stops."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where: uvicorn doesn't, for sockets that it was given."""
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            logger.info(
                "listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new sessions in words, wait for those that are there, then shut down."""
        logger.info("stopping: no new sessions; waiting for committed text")
        self._services.stop_accepting()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _MAX_DRAIN_S
        # uvicorn's own way of waiting for them; a second SIGINT ends it.
        while self.server_state.tasks and not self.force_exit and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        if self.server_state.tasks:
            # Whoever waits still is told so, rather than cut off.
            await self._services.engine.stop()
        await super().shutdown(sockets)

    @property
    def _services(self) -> Services:
        services: Services = self.config.app.state.services  # type: ignore[union-attr]
        return services


def serve(settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        InvalidInput: nobody can listen on that host and port; nothing has been loaded.
        CheckpointError, InvalidInput, EngineFailure: the model can't be loaded.
    """
    failures: list[VoxliteError] = []

    def stop(error: VoxliteError) -> None:
        failures.append(error)
        server.should_exit = True

    server = DrainingServer(uvicorn_config(create_app(settings, on_failure=stop), settings))
    if not settings.api_key and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("no --api-key is set: everybody who reaches %s may use it", settings.host)
    sockets = listen(settings.host, settings.port)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    asyncio.run(server.serve(sockets))
    if failures:
        raise failures[0]


def settings_of(**flags: Any) -> ServerSettings:
    """Return the settings of a command line; a flag that wasn't given (None) says nothing.

    Raises:
        InvalidInput: a value is impossible, or the environment names an unknown setting.
    """
    try:
        return ServerSettings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        name = ServerSettings.public_name(str(first["loc"][0])) if first["loc"] else "settings"
        raise InvalidInput(problem_of(first, name)) from err
