"""Put the server together: settings in, an ASGI application out."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from voxlite.engine.engine import Engine
from voxlite.engine.errors import VoxliteError
from voxlite.server.access import AccessControl
from voxlite.server.async_engine import AsyncEngine, TranscriptionEngine
from voxlite.server.auth import ClientSecrets, KeyRing, OriginPolicy, is_loopback
from voxlite.server.http import models, operations, transcriptions, web
from voxlite.server.http.errors import add_error_handlers
from voxlite.server.metrics import Metrics
from voxlite.server.realtime import routes
from voxlite.server.services import Services
from voxlite.server.session.transcription_session import SessionServices
from voxlite.server.session.voice_activity import SileroModel, VoiceModel
from voxlite.server.settings import ServerSettings
from voxlite.server.warm_up import log_speed

logger = logging.getLogger(__name__)


def create_app(
    settings: ServerSettings,
    *,
    load_engine: Callable[[], TranscriptionEngine] | None = None,
    voice_model: VoiceModel | None = None,
    on_failure: Callable[[VoxliteError], None] | None = None,
) -> FastAPI:
    """Make the application. The model is loaded once it runs.

    Args:
        load_engine: what loads the engine, on a thread; by default the one of the settings.
        voice_model: what finds speech; by default Silero.
        on_failure: called if the model can't be loaded.
    """
    metrics = Metrics()
    engine = AsyncEngine(load_engine or _engine_loader(settings, metrics))
    # One thread: a window of 32 ms takes it some 0.2 ms.
    voice_executor = ThreadPoolExecutor(1, thread_name_prefix="voice")
    services = Services(
        settings=settings,
        engine=engine,
        metrics=metrics,
        client_secrets=ClientSecrets(),
        session_services=SessionServices(
            engine=engine,
            voice_model=voice_model or SileroModel(),
            voice_executor=voice_executor,
            max_append_wait_s=settings.max_append_wait,
        ),
        started_s=int(time.time()),
    )
    metrics.watch_engine(
        engine.stats, lambda: [session.lag_s for session in tuple(services.sessions)]
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start(on_failure or _log_failure)
        yield
        await engine.stop()
        voice_executor.shutdown()

    # No pages of documentation: they would load their scripts from elsewhere.
    app = FastAPI(title="voxlite", openapi_url=None, lifespan=lifespan)
    app.state.services = services
    for part in (routes, transcriptions, models, operations, web):
        app.include_router(part.router)
    add_error_handlers(app)
    _add_access_control(app, services)
    return app


def _engine_loader(settings: ServerSettings, metrics: Metrics) -> Callable[[], Engine]:
    """Check the engine's settings now; load it when called."""
    config = settings.engine_config()

    def load() -> Engine:
        engine = Engine(config, metrics.observe_step)
        log_speed(engine)
        return engine

    return load


def _add_access_control(app: FastAPI, services: Services) -> None:
    settings = services.settings
    app.add_middleware(
        AccessControl,
        key_ring=KeyRing(settings.api_key, services.client_secrets),
        origin_policy=OriginPolicy(
            allowed_origins=settings.allowed_origins, is_loopback=is_loopback(settings.host)
        ),
        metrics=services.metrics,
    )
    if settings.allowed_origins:
        # Outermost, so that a page can read a refusal too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )


def _log_failure(error: VoxliteError) -> None:
    logger.error("the model can't be loaded: %s", error)
