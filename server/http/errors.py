"""Every error of the HTTP side, in OpenAI's words: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from voxlite.engine.errors import InvalidInput, VoxliteError
from voxlite.server.errors import fault_of
from voxlite.server.protocol.messages import ProtocolError
from voxlite.server.services import services_of

_RETRY_AFTER_S = "1"


def error_body(
    message: str, code: str, param: str | None = None, *, is_ours: bool = False
) -> dict[str, object]:
    """Return the body of an error."""
    type_ = "server_error" if is_ours else "invalid_request_error"
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def voxlite_error_body(error: VoxliteError) -> dict[str, object]:
    """Return the body of an error of the engine."""
    fault = fault_of(error)
    return error_body(str(error), _code(error), is_ours=fault.is_ours)


def _code(error: VoxliteError) -> str:
    return "invalid_audio" if isinstance(error, InvalidInput) else fault_of(error).code


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the application in this form."""

    def count(request: Request, code: str) -> None:
        services_of(request).metrics.refusals.labels(reason=code).inc()

    @app.exception_handler(ProtocolError)
    async def on_protocol_error(request: Request, error: ProtocolError) -> JSONResponse:
        count(request, error.fault.code)
        body = error_body(error.message, error.fault.code, error.param)
        return JSONResponse(body, error.fault.http_status)

    @app.exception_handler(VoxliteError)
    async def on_voxlite_error(request: Request, error: VoxliteError) -> JSONResponse:
        count(request, _code(error))
        fault = fault_of(error)
        headers = {"Retry-After": _RETRY_AFTER_S} if fault.http_status == 503 else None
        return JSONResponse(voxlite_error_body(error), fault.http_status, headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = "not_found" if error.status_code == 404 else "invalid_request"
        body = error_body(str(error.detail), code, is_ours=error.status_code >= 500)
        return JSONResponse(body, error.status_code, error.headers)
