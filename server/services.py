"""What the parts of the server share, in one object that the application holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from voxlite.engine.config import LEGAL_DELAYS_MS, AudioConfig
from voxlite.server.async_engine import AsyncEngine, EngineStatus
from voxlite.server.auth import ClientSecrets
from voxlite.server.metrics import Metrics
from voxlite.server.session.session_config import ServerOffer
from voxlite.server.session.transcription_session import SessionServices, TranscriptionSession
from voxlite.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One server's settings, engine and bookkeeping."""

    settings: ServerSettings
    engine: AsyncEngine
    metrics: Metrics
    client_secrets: ClientSecrets
    session_services: SessionServices
    started_s: int
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: set[TranscriptionSession] = field(default_factory=set)

    def stop_accepting(self) -> None:
        """Open no more sessions; each that is there ends when it has no text to come."""
        self.engine.stop_accepting()
        self.stopping.set()

    def offer(self) -> ServerOffer:
        """Return what clients may choose; before the model is loaded, what is usual."""
        if self.engine.status is EngineStatus.READY:
            engine = self.engine.ready
            default_delay_ms, legal_delays_ms = engine.default_delay_ms, engine.legal_delays_ms
        else:
            default_delay_ms, legal_delays_ms = AudioConfig().default_delay_ms, LEGAL_DELAYS_MS
        return ServerOffer(
            model_names=self.settings.model_names,
            default_delay_ms=default_delay_ms,
            legal_delays_ms=legal_delays_ms,
            max_session_s=self.settings.max_session_seconds or None,
        )


def services_of(connection: HTTPConnection) -> Services:
    """Return the services of the application that a request or socket came to."""
    services: Services = connection.app.state.services
    return services
