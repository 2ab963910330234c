"""uvicorn's WebSocket, which lets go of a client that doesn't read even at the very end."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_MAX_LINGER_S: Final = 15.0


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """Bound the time that a finished connection waits for its client to read what is left.

    Closing a transport first sends what is in its buffer, which a stopped client never takes: the
    descriptor would stay for as long as the client's machine is up.
    """

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self.loop.call_later(_MAX_LINGER_S, self._let_go)

    def _let_go(self) -> None:
        if not self.disconnected:
            self.transport.abort()
