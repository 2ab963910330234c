"""The two sockets: `/v1/realtime`, and Mistral's `/v1/audio/transcriptions/realtime`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.websockets import WebSocket

from voxlite.server.access import MISTRAL_PATH, REALTIME_PATH
from voxlite.server.auth import SUBPROTOCOL, key_in
from voxlite.server.protocol.mistral import MistralProtocol
from voxlite.server.protocol.negotiation import Dialect, NegotiatedProtocol, hint_of
from voxlite.server.realtime.connection import ConnectionProtocol, RealtimeConnection
from voxlite.server.services import Services, services_of
from voxlite.server.session.transcription_session import new_id

router = APIRouter()


@router.websocket(REALTIME_PATH)
async def realtime(websocket: WebSocket) -> None:
    """Serve a client of vLLM's or OpenAI's protocol."""
    services = services_of(websocket)
    subprotocols = websocket.scope["subprotocols"]
    hint = hint_of(websocket.query_params, websocket.headers, subprotocols)
    update = _update_of_secret(services, key_in(websocket.headers, subprotocols))
    if update is not None:
        hint = Dialect.OPENAI
    protocol = NegotiatedProtocol(services.offer(), new_id, hint)
    subprotocol = SUBPROTOCOL if SUBPROTOCOL in subprotocols else None
    await _serve(websocket, services, protocol, subprotocol, update)


@router.websocket(MISTRAL_PATH)
async def mistral_realtime(websocket: WebSocket) -> None:
    """Serve a client of Mistral's protocol."""
    services = services_of(websocket)
    await _serve(websocket, services, MistralProtocol(services.offer()), None, None)


def _update_of_secret(services: Services, key: str | None) -> Mapping[str, Any] | None:
    """Return the update that a client secret's session begins with."""
    secret = None if key is None else services.client_secrets.find(key)
    if secret is None or secret.update is None:
        return None
    return {"type": "session.update", "session": secret.update}


async def _serve(
    websocket: WebSocket,
    services: Services,
    protocol: ConnectionProtocol,
    subprotocol: str | None,
    update: Mapping[str, Any] | None,
) -> None:
    connection = RealtimeConnection(websocket, protocol, services, update)
    await connection.run(websocket.query_params.get("model"), subprotocol)
