"""uvicorn's WebSocket, which lets go of a client that is gone, or doesn't read at the very end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

# Where in a socket's scope the event lies that is set once the connection is lost.
_EXTENSION: Final = "voxlite.connection_lost"
_MAX_LINGER_S: Final = 15.0
_CHECK_INTERVAL_S: Final = 0.5
# Linux's states (the first byte of TCP_INFO) of a connection that the other side has ended: it was
# reset, or nothing more will be sent.
_ENDED_STATES: Final = (7, 8)


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """Notice that a client is gone while nothing is read, and don't wait for it at the end.

    uvicorn stops reading while the application has a message to take, and so sees neither the end
    of the connection nor a reset: a client that is gone would keep its seat for as long as the
    server waits for room for its audio.

    Closing a transport first sends what is in its buffer, which a stopped client never takes: the
    descriptor would stay for as long as the client's machine is up.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost.set()

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = {**(self.scope["extensions"] or {}), _EXTENSION: self._is_lost}
        self.scope["extensions"] = extensions
        watch = self.loop.create_task(self._watch())
        try:
            await super().run_asgi()
        finally:
            watch.cancel()
        self.loop.call_later(_MAX_LINGER_S, self._let_go)

    async def _watch(self) -> None:
        while not (self.read_paused and self._has_client_ended()):
            await asyncio.sleep(_CHECK_INTERVAL_S)
        self.transport.abort()

    def _has_client_ended(self) -> bool:
        """Ask the system; False where it doesn't tell."""
        tcp_info = getattr(socket, "TCP_INFO", None)
        sock = self.transport.get_extra_info("socket")
        if tcp_info is None or sock is None:
            return False
        try:
            return sock.getsockopt(socket.IPPROTO_TCP, tcp_info, 1)[0] in _ENDED_STATES
        except OSError:
            return False

    def _let_go(self) -> None:
        if not self.disconnected:
            self.transport.abort()


def lost_event(scope: Any) -> asyncio.Event:
    """Return the event that is set once a socket's connection is lost, if the server tells."""
    event: asyncio.Event = scope.get("extensions", {}).get(_EXTENSION) or asyncio.Event()
    return event
