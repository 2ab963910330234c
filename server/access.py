"""The gate in front of every route and socket: who may come in.

In: the scope of a request or handshake. Out: the application's answer, or a refusal with a body, at
the handshake of a socket too.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from voxlite.server.auth import KeyRing, OriginPolicy, key_in
from voxlite.server.http.errors import error_body
from voxlite.server.metrics import Metrics
from voxlite.server.wording import shorten

# What a load balancer asks, and the page that asks for the key.
PUBLIC_PATHS: Final = ("/health", "/ping", "/")
PUBLIC_PREFIX: Final = "/web/"
REALTIME_PATH: Final = "/v1/realtime"
MISTRAL_PATH: Final = "/v1/audio/transcriptions/realtime"
_SOCKET_PATHS: Final = (REALTIME_PATH, MISTRAL_PATH)


class AccessControl:
    """Refuse what the keys and the origin policy don't admit."""

    def __init__(
        self, app: ASGIApp, key_ring: KeyRing, origin_policy: OriginPolicy, metrics: Metrics
    ) -> None:
        self._app = app
        self._key_ring = key_ring
        self._origin_policy = origin_policy
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            # For a socket, Starlette sends this as a denial response of the handshake.
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host")
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS")
        if not is_read and not self._origin_policy.admits(origin, host):
            self._metrics.refusals.labels(reason="origin").inc()
            message = f"pages of {origin} may not use this server; see --allowed-origins"
            return JSONResponse(error_body(message, "origin_not_allowed"), 403)
        if self._is_open(scope):
            return None
        key = key_in(headers, scope.get("subprotocols", ()))
        if not self._key_ring.admits(key, accepts_secrets=scope["type"] == "websocket"):
            self._metrics.refusals.labels(reason="invalid_api_key").inc()
            message = "no API key was given" if key is None else "the API key is not valid"
            body = error_body(f"{message}: send Authorization: Bearer <key>", "invalid_api_key")
            return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        if scope["type"] == "websocket" and scope["path"] not in _SOCKET_PATHS:
            message = f"no socket at {shorten(scope['path'])}: there are {', '.join(_SOCKET_PATHS)}"
            return JSONResponse(error_body(message, "not_found"), 404)
        return None

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        return is_preflight or path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)
