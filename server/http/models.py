"""The model, under each of its names, and short-lived secrets for browsers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from voxlite.server.protocol.messages import Configure, Fault, ProtocolError, SessionUpdated
from voxlite.server.protocol.openai_ga import OpenAIGAProtocol, session_json
from voxlite.server.protocol.wire import WireModel, check_model, parse_object, validate
from voxlite.server.services import services_of
from voxlite.server.session.session_config import PCM_24_KHZ

router = APIRouter()

_DEFAULT_LIFETIME_S: Final = 600
_MAX_BODY_BYTES: Final = 2**16


class _ExpiresAfter(WireModel):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = _DEFAULT_LIFETIME_S


class _SecretRequest(WireModel):
    expires_after: _ExpiresAfter | None = None
    session: dict[str, Any] | None = None


def _model_json(name: str, created_s: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "voxlite"}


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the model."""
    services = services_of(request)
    names = services.settings.model_names
    data = [_model_json(name, services.started_s) for name in names]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """Describe one name of the model."""
    services = services_of(request)
    check_model(name, services.offer())
    return JSONResponse(_model_json(name, services.started_s))


@router.post("/v1/realtime/client_secrets")
async def create_client_secret(request: Request) -> Response:
    """Make a secret that opens sockets, with the settings that its sessions begin with."""
    services = services_of(request)
    asked = validate(_SecretRequest, parse_object(await _body(request)))
    offer = services.offer()
    config = offer.initial_config(PCM_24_KHZ)
    if asked.session is not None:
        update = {"type": "session.update", "session": asked.session}
        protocol = OpenAIGAProtocol(offer, lambda prefix: prefix)
        command = protocol.receive(update, config)
        assert isinstance(command, Configure)
        config = command.config
    lifetime_s = (asked.expires_after or _ExpiresAfter()).seconds
    secret = services.client_secrets.issue(lifetime_s, asked.session)
    created = SessionUpdated(session_id="", created_s=services.started_s, config=config)
    session = session_json(created, replace(offer, max_session_s=None))
    session.pop("id")
    return JSONResponse(
        {"value": secret.value, "expires_at": secret.expires_at_s, "session": session}
    )


async def _body(request: Request) -> str:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ProtocolError(
                Fault.MESSAGE_TOO_LARGE, f"a body of more than {_MAX_BODY_BYTES} bytes"
            )
    try:
        return body.decode() or json.dumps({})
    except UnicodeDecodeError as err:
        raise ProtocolError(Fault.INVALID_JSON, "the body isn't UTF-8") from err
