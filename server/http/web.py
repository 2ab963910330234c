"""The page at `/`, its files under `/web/`, and the bundled sample for trying it out.

The page loads nothing from elsewhere and runs no inline script, and its headers hold it to that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from voxlite.engine.errors import CheckpointError
from voxlite.server.bundled import bundled_model

router = APIRouter()

_FOLDER: Final = Path(__file__).parent.parent / "web"
_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES: Final = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Permissions-Policy": "microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for again each time: a newer server may have another page.
    "Cache-Control": "no-cache",
}


def _file(path: Path, media_type: str) -> FileResponse:
    return FileResponse(path, media_type=media_type, headers=_HEADERS)


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> FileResponse:
    """Answer the page."""
    return _file(_FILES["index.html"], _MEDIA_TYPES[".html"])


@router.api_route("/web/sample.wav", methods=["GET", "HEAD"])
async def sample() -> FileResponse:
    """Answer the bundled sample, if there is one."""
    try:
        path = bundled_model() / "sample.wav"
    except CheckpointError as err:
        raise HTTPException(404, str(err)) from err
    if not path.is_file():
        raise HTTPException(404, "the bundled model has no sample")
    return _file(path, "audio/wav")


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def page_file(name: str) -> FileResponse:
    """Answer one of the page's files."""
    path = _FILES.get(name)
    if path is None:
        raise HTTPException(404, f"no file {name!r} belongs to the page")
    return _file(path, _MEDIA_TYPES[path.suffix])
