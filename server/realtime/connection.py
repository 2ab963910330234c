"""One WebSocket connection: its messages, its limits, its end.

In: a socket, a protocol, and what all sessions share. Out: nothing; when `run` returns the
connection is over and its seat given back. Whatever one client does ends here.

    OPENING --> OPEN --> DRAINING --> CLOSED
       |         |                       ^
       '---------'-----------------------'
    refused; gone, or it doesn't read
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from voxlite.engine.errors import InvalidInput, Overloaded, SessionClosed, VoxliteError
from voxlite.server.errors import fault_of
from voxlite.server.protocol.messages import (
    Append,
    Clear,
    Command,
    Commit,
    Committed,
    Completed,
    Configure,
    ErrorEvent,
    Fault,
    Finish,
    Nothing,
    ProtocolError,
    SessionCreated,
    SessionEvent,
    SessionUpdated,
    WireProtocol,
)
from voxlite.server.protocol.wire import check_model, event_id, parse_object
from voxlite.server.realtime.connection_state import (
    CLIENT_IS_GONE,
    TRANSITIONS,
    CloseCode,
    Ending,
    State,
)
from voxlite.server.realtime.outbox import ClientDoesNotRead, Outbox
from voxlite.server.realtime.socket_transport import lost_event
from voxlite.server.services import Services
from voxlite.server.session.session_config import SessionConfig
from voxlite.server.session.transcription_session import TranscriptionSession

logger = logging.getLogger(__name__)

# OpenAI's limit on an append of 15 MiB, in base64 and with its envelope, and some more.
MAX_MESSAGE_BYTES: Final = 16 * 2**20
# A sleep of the watch: no limit is missed by it, as each is computed anew.
_MAX_SLEEP_S: Final = 3600.0
# How long a session that has reached a limit may take to write the text of its last utterance.
_MAX_DRAIN_S: Final = 60.0


class ConnectionProtocol(WireProtocol, Protocol):
    """A protocol that also knows what a session begins with."""

    def initial_config(self) -> SessionConfig: ...


class RealtimeConnection:
    """Serve one client from its handshake to its end."""

    def __init__(
        self,
        websocket: WebSocket,
        protocol: ConnectionProtocol,
        services: Services,
        initial_update: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a connection that is not accepted yet.

        Args:
            initial_update: a message to begin with, which isn't answered.
        """
        self._websocket = websocket
        self._protocol = protocol
        self._services = services
        self._metrics = services.metrics
        self._initial_update = initial_update
        self._state = State.OPENING
        self._session_id = secrets.token_hex(12)
        self._created_s = int(time.time())
        self._outbox = Outbox()
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._commit_times_s: deque[float] = deque()
        self._is_lost = lost_event(websocket.scope)
        self._is_listening = asyncio.Event()  # cleared while a message is carried out

    async def run(self, model: str | None, subprotocol: str | None) -> None:
        """Accept the client and serve it until it, or the server, has had enough.

        Args:
            model: the name in the URL, None if there is none.
            subprotocol: the one to accept.
        """
        started_s = time.monotonic()
        await self._websocket.accept(subprotocol)
        self._metrics.connections_total.inc()
        self._metrics.connections.inc()
        writer = asyncio.create_task(self._write())
        try:
            ending = await self._serve(model)
            await self._close(ending)
        finally:
            writer.cancel()
            self._metrics.connections.dec()
            self._metrics.connection_s.observe(time.monotonic() - started_s)

    async def _serve(self, model: str | None) -> Ending:
        """Open a session and serve it. Return why it ended; its seat has been given back."""
        try:
            session = self._open_session(model)
        except ProtocolError as err:
            error = ErrorEvent(err.fault, err.message, err.param)
            return Ending(CloseCode.POLICY, error)
        except VoxliteError as err:
            self._metrics.refusals.labels(reason=fault_of(err).code).inc()
            return Ending(CloseCode.TRY_AGAIN_LATER, ErrorEvent(fault_of(err), str(err)))
        self._services.sessions.add(session)
        self._move_to(State.OPEN)
        logger.info("session %s opened (%d)", self._session_id, session.engine_session_id)
        tasks = [
            asyncio.create_task(self._read(session)),
            asyncio.create_task(self._watch(session)),
            asyncio.create_task(self._watch_connection()),
            asyncio.create_task(self._end_when_stopping(session)),
        ]
        try:
            self._emit(
                SessionCreated(
                    session_id=self._session_id, created_s=self._created_s, config=session.config
                )
            )
            ending = await self._ending
            if ending.is_drained:
                self._move_to(State.DRAINING)
                await _cancel(tasks)
                with suppress(VoxliteError):
                    await self._unless_lost(session.drain(), _MAX_DRAIN_S)
            return ending
        finally:
            await _cancel(tasks)
            session.close()
            self._services.sessions.discard(session)
            logger.info("session %s ended", self._session_id)

    async def _unless_lost(self, work: Coroutine[Any, Any, None], max_s: float) -> None:
        """Carry something out, for at most so long, while the connection is there."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self._watch_connection())]
        await asyncio.wait(tasks, timeout=max_s, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()

    def _open_session(self, model: str | None) -> TranscriptionSession:
        if model:
            check_model(model, self._services.offer())
        config = self._protocol.initial_config()
        if self._initial_update is not None:
            command = self._protocol.receive(self._initial_update, config)
            assert isinstance(command, Configure)
            config = command.config
        return TranscriptionSession(
            self._services.session_services, config, self._emit, self._on_engine_end
        )

    async def _read(self, session: TranscriptionSession) -> None:
        """Carry out the client's messages, one after the other."""
        try:
            while True:
                self._is_listening.set()
                message = await self._websocket.receive()
                self._is_listening.clear()
                if message["type"] == "websocket.disconnect":
                    self._end(CLIENT_IS_GONE)
                    return
                data = message.get("bytes")
                if data is not None:
                    await self._take_binary(session, data)
                else:
                    await self._take_text(session, message["text"])
        except Exception:
            logger.exception("session %s failed", self._session_id)
            error = ErrorEvent(Fault.ENGINE_FAILURE, "internal error; the log has more")
            self._end(Ending(CloseCode.INTERNAL_ERROR, error))

    async def _take_binary(self, session: TranscriptionSession, data: bytes) -> None:
        try:
            _check_size(len(data))
        except ProtocolError as err:
            self._refuse(ErrorEvent(err.fault, err.message))
        else:
            await self._carry_out(session, Append(data), None)

    async def _take_text(self, session: TranscriptionSession, text: str) -> None:
        id_ = None
        try:
            _check_size(len(text))
            message = parse_object(text)
            id_ = event_id(message)
            command = self._protocol.receive(message, session.config)
        except ProtocolError as err:
            self._refuse(ErrorEvent(err.fault, err.message, err.param, id_))
        else:
            await self._carry_out(session, command, id_)

    async def _carry_out(
        self, session: TranscriptionSession, command: Command, id_: str | None
    ) -> None:
        try:
            match command:
                case Append(audio):
                    await session.append(audio)
                case Commit():
                    await session.commit()
                case Clear():
                    await session.clear()
                case Configure(config, is_acknowledged):
                    await session.configure(config)
                    if is_acknowledged:
                        self._emit(
                            SessionUpdated(
                                session_id=self._session_id,
                                created_s=self._created_s,
                                config=session.config,
                            )
                        )
                case Finish():
                    await session.finish()
                    self._end(Ending(CloseCode.NORMAL))
                case Nothing():
                    pass
        except Overloaded as err:
            self._refuse(ErrorEvent(Fault.BUFFER_FULL, f"refused: {err}", None, id_))
        except InvalidInput as err:
            self._refuse(ErrorEvent(Fault.INVALID_AUDIO, f"Invalid audio data: {err}", None, id_))
        except VoxliteError as err:
            # The engine has ended the session; `_on_engine_end` says why.
            logger.debug("session %s: %s", self._session_id, err)

    async def _watch(self, session: TranscriptionSession) -> None:
        """End a session that has become too old, or that nobody uses."""
        loop = asyncio.get_running_loop()
        # Settings of 0 mean: no limit.
        max_s = self._services.settings.max_session_seconds or inf
        idle_s = self._services.settings.idle_timeout or inf
        expires_s = loop.time() + max_s
        while True:
            now_s = loop.time()
            # A client that waits for text isn't idle.
            active_s = now_s if session.is_waiting_for_text else session.last_activity_s
            idle_until_s = active_s + idle_s
            if now_s >= expires_s:
                message = f"the session has lasted {max_s:g} s, the server's limit"
                return self._end_at_limit(Fault.SESSION_EXPIRED, message)
            if now_s >= idle_until_s:
                message = f"no audio for {idle_s:g} s, the server's idle timeout"
                return self._end_at_limit(Fault.IDLE_TIMEOUT, message)
            await asyncio.sleep(min(expires_s, idle_until_s, now_s + _MAX_SLEEP_S) - now_s)

    async def _watch_connection(self) -> None:
        """End a session whose client is gone, whatever it is waiting for."""
        await self._is_lost.wait()
        self._end(CLIENT_IS_GONE)

    async def _end_when_stopping(self, session: TranscriptionSession) -> None:
        """End a session of a server that is being stopped, once no committed text is to come."""
        await self._services.stopping.wait()
        while session.is_waiting_for_text or not self._is_listening.is_set():
            await self._is_listening.wait()
            await session.wait_for_text()
        self._end(Ending(CloseCode.SERVICE_RESTART))

    def _end_at_limit(self, fault: Fault, message: str) -> None:
        self._metrics.refusals.labels(reason=fault.code).inc()
        error = ErrorEvent(fault, message)
        self._end(Ending(CloseCode.POLICY, error, is_drained=True))

    def _on_engine_end(self, error: VoxliteError | None) -> None:
        if error is None or isinstance(error, SessionClosed):  # the engine is being stopped
            self._end(Ending(CloseCode.TRY_AGAIN_LATER))
        else:
            event = ErrorEvent(fault_of(error), str(error))
            self._end(Ending(CloseCode.INTERNAL_ERROR, event))

    def _refuse(self, error: ErrorEvent) -> None:
        self._metrics.refusals.labels(reason=error.fault.code).inc()
        self._emit(error)

    def _emit(self, event: SessionEvent) -> None:
        """Queue an event for the client; a client that has too many waiting is given up."""
        if self._state is State.CLOSED:
            return
        self._measure(event)
        try:
            for text in self._protocol.send(event):
                self._outbox.put(text)
        except ClientDoesNotRead as err:
            self._give_up(err)

    def _measure(self, event: SessionEvent) -> None:
        if isinstance(event, Committed):
            self._commit_times_s.append(time.monotonic())
        elif isinstance(event, Completed) and self._commit_times_s:
            self._metrics.flush_s.observe(time.monotonic() - self._commit_times_s.popleft())

    async def _write(self) -> None:
        """Send what is queued, as fast as the client reads."""
        try:
            await self._outbox.send_all(
                self._websocket.send_text, self._services.settings.max_send_wait
            )
        except ClientDoesNotRead as err:
            self._give_up(err)
        except (WebSocketDisconnect, RuntimeError):
            self._end(CLIENT_IS_GONE)

    def _give_up(self, reason: ClientDoesNotRead) -> None:
        """End a connection whose client doesn't read."""
        if not self._ending.done():
            logger.warning("session %s ends: %s", self._session_id, reason)
            self._metrics.refusals.labels(reason="slow_reader").inc()
        self._end(CLIENT_IS_GONE)

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    async def _close(self, ending: Ending) -> None:
        """Send what is left and the close frame, to a client that is there."""
        if ending.error is not None:
            self._emit(ending.error)
        self._move_to(State.CLOSED)
        if not ending.is_reachable:
            return
        reason = "" if ending.error is None else _close_reason(ending.error.message)
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._unless_lost(
                self._send_close(ending.code, reason), self._services.settings.max_send_wait
            )

    async def _send_close(self, code: CloseCode, reason: str) -> None:
        await self._outbox.wait_until_empty()
        await self._websocket.close(code.value, reason)

    def _move_to(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RuntimeError(f"connection is {self._state.value}, not to become {state.value}")
        self._state = state


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        message = f"a message of {num_bytes} bytes: at most {MAX_MESSAGE_BYTES}"
        raise ProtocolError(Fault.MESSAGE_TOO_LARGE, message)


def _close_reason(message: str) -> str:
    """Cut a message to the 123 bytes that a close frame has room for."""
    return message.encode()[:123].decode(errors="ignore")
