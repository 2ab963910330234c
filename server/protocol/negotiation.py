"""Tell apart the protocols that share `/v1/realtime`, and greet clients of all of them.

What the handshake shows is a hint; the first `session.update` decides (OpenAI's two versions may be
mixed). Until then a client is served as the hint says. `session.created` is one for all.

    update has                                       protocol
    top-level `model`, no `session`                  vLLM
    `session.type` or `session.audio`                OpenAI
    `session.input_audio_*`, or the update is a
    `transcription_session.update`                   OpenAI's beta

    handshake has                                    hint
    `OpenAI-Beta: realtime=v1`, or that subprotocol  OpenAI's beta
    `?intent=`, `?model=` or subprotocol `realtime`  OpenAI
    none of these                                    vLLM
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from voxlite.server.protocol.messages import (
    Command,
    NewId,
    SessionCreated,
    SessionEvent,
    WireProtocol,
)
from voxlite.server.protocol.openai_beta import OpenAIBetaProtocol, flat_json
from voxlite.server.protocol.openai_ga import OpenAIGAProtocol, session_json
from voxlite.server.protocol.vllm import VllmProtocol
from voxlite.server.protocol.wire import dump
from voxlite.server.session.session_config import PCM_16_KHZ, PCM_24_KHZ, ServerOffer, SessionConfig

_UPDATES: Final = ("session.update", "transcription_session.update")


class Dialect(Enum):
    """The protocols of `/v1/realtime`."""

    VLLM = "vllm"
    OPENAI = "openai"
    OPENAI_BETA = "openai_beta"


_DEFAULT_FORMATS: Final = {
    Dialect.VLLM: PCM_16_KHZ,
    Dialect.OPENAI: PCM_24_KHZ,
    Dialect.OPENAI_BETA: PCM_24_KHZ,
}


def hint_of(
    query: Mapping[str, str], headers: Mapping[str, str], subprotocols: Collection[str]
) -> Dialect:
    """Guess a client's protocol from its handshake."""
    is_beta = "realtime=v1" in headers.get("openai-beta", "")
    if is_beta or "openai-beta.realtime-v1" in subprotocols:
        return Dialect.OPENAI_BETA
    if "intent" in query or "model" in query or "realtime" in subprotocols:
        return Dialect.OPENAI
    return Dialect.VLLM


def dialect_of_update(message: Mapping[str, Any]) -> Dialect | None:
    """Tell a client's protocol from its update, None if the update doesn't."""
    if message.get("type") == "transcription_session.update":
        return Dialect.OPENAI_BETA
    session = message.get("session")
    if session is None:
        return Dialect.VLLM if "model" in message else None
    if not isinstance(session, dict):
        return None
    if "type" in session or "audio" in session:
        return Dialect.OPENAI
    return Dialect.OPENAI_BETA if any(k.startswith("input_audio_") for k in session) else None


class NegotiatedProtocol:
    """Speak whichever protocol the client speaks."""

    def __init__(self, offer: ServerOffer, new_id: NewId, hint: Dialect) -> None:
        self._offer = offer
        self._new_id = new_id
        self._dialect = hint
        self._is_decided = False
        self._protocols: dict[Dialect, WireProtocol] = {
            Dialect.VLLM: VllmProtocol(offer),
            Dialect.OPENAI: OpenAIGAProtocol(offer, new_id),
            Dialect.OPENAI_BETA: OpenAIBetaProtocol(offer, new_id),
        }

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    def initial_config(self) -> SessionConfig:
        """Return what is in force before the first update."""
        return self._offer.initial_config(_DEFAULT_FORMATS[self._dialect])

    def receive(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        """Understand a message. See `WireProtocol`."""
        if message.get("type") not in _UPDATES:
            return self._protocols[self._dialect].receive(message, config)
        return self._receive_update(message, config)

    def _receive_update(self, message: Mapping[str, Any], config: SessionConfig) -> Command:
        dialect = dialect_of_update(message) or self._dialect
        if self._is_decided and Dialect.VLLM in (dialect, self._dialect):
            dialect = self._dialect
        if config.audio_format == _DEFAULT_FORMATS[self._dialect]:
            config = replace(config, audio_format=_DEFAULT_FORMATS[dialect])
        # An error, too, is written as this client reads it.
        self._dialect = dialect
        command = self._protocols[dialect].receive(message, config)
        self._is_decided = True
        return command

    def send(self, event: SessionEvent) -> Iterable[str]:
        """Write an event. See `WireProtocol`."""
        if isinstance(event, SessionCreated):
            yield self._greeting(event)
        else:
            yield from self._protocols[self._dialect].send(event)

    def _greeting(self, event: SessionCreated) -> str:
        """Write OpenAI's `session.created` with what vLLM's and the beta's clients look for."""
        return dump(
            "session.created",
            event_id=self._new_id("event"),
            id=f"sess-{event.session_id}",
            created=event.created_s,
            session={
                **session_json(event, self._offer),
                **flat_json(event.config, self._offer),
            },
        )
