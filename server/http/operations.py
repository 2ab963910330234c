"""What operators ask: is it up, which version, what does it measure."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from voxlite.server.async_engine import EngineStatus
from voxlite.server.services import services_of

router = APIRouter()


def server_version() -> str:
    """Return the installed version, "unknown" when run from a folder that isn't installed."""
    try:
        return version("voxlite")
    except PackageNotFoundError:
        return "unknown"


@router.get("/health")
@router.api_route("/ping", methods=["GET", "POST"])
async def health(request: Request) -> Response:
    """Answer 200 when sessions can be opened, 503 while loading and once the engine has failed."""
    engine = services_of(request).engine
    is_ready = engine.status is EngineStatus.READY
    body = {"status": engine.status.value, "reason": engine.reason}
    return JSONResponse(body, 200 if is_ready else 503)


@router.get("/version")
async def get_version(request: Request) -> Response:
    """Answer the version."""
    return JSONResponse({"version": server_version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer Prometheus."""
    text = services_of(request).metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
