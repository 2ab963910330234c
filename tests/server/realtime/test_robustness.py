"""One client never hurts another, or the process; no text is lost in silence."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from tests.server.fake_engine import FAILING_LEVEL, FakeEngine, pcm16, tone
from tests.server.harness import Client, LiveServer, serve
from tests.server.realtime.test_socket_mistral import PATH as MISTRAL
from tests.server.realtime.test_socket_openai import (
    COMPLETED,
    DELTA,
    INTENT,
    PCM_16,
    text_of,
    update,
)


def transcribes(live: LiveServer, *levels: int) -> bool:
    with live.socket(INTENT) as client:
        update(client, format=PCM_16)
        client.append(pcm16(tone(*levels)))
        client.send("input_audio_buffer.commit")
        return text_of(client.until(COMPLETED)) == " ".join(f"w{level}" for level in levels)


HANDSHAKE = """GET /v1/realtime?intent=transcription HTTP/1.1\r
Host: localhost\r
Upgrade: websocket\r
Connection: Upgrade\r
Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r
Sec-WebSocket-Version: 13\r
\r
"""


def reset(client: Client) -> None:
    """Vanish without a close frame."""
    raw = client.websocket.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("moment", ["at once", "after append", "within a fragment", "after commit"])
def test_a_socket_that_vanishes_takes_nobody_along(moment: str) -> None:
    with serve(FakeEngine(max_sessions=2)) as live, live.socket(INTENT) as neighbour:
        update(neighbour, format=PCM_16)
        neighbour.append(pcm16(tone(1)))
        for _ in range(5):
            live.wait_until(lambda: live.num_sessions == 1)
            with live.socket(INTENT) as client:
                client.next("session.created")
                if moment != "at once":
                    client.append(pcm16(tone(3, num_tokens=20)))
                if moment == "after commit":
                    client.send("input_audio_buffer.commit")
                if moment == "within a fragment":
                    client.websocket.socket.sendall(b"\x01\xfe\x10\x00abcd{")
                reset(client)
        live.wait_until(lambda: live.num_sessions == 1)
        neighbour.append(pcm16(tone(2)))
        neighbour.send("input_audio_buffer.commit")
        assert text_of(neighbour.until(COMPLETED)) == "w1 w2"


def test_clients_that_are_gone_before_they_are_greeted_leave_every_seat_free() -> None:
    """Fifty times, as many as there are seats: with all of a handshake, and with half of one."""
    with serve(FakeEngine(max_sessions=2)) as live:
        for number in range(50):
            for _ in range(2):
                raw = socket.create_connection(("127.0.0.1", live.port))
                raw.sendall(HANDSHAKE.encode()[: None if number % 2 else 100])
                if number % 4 < 2:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raw.close()
        with live.http() as http:
            assert http.get("/health").status_code == 200  # read after all those handshakes
        live.wait_until(lambda: live.num_sessions == 0 and not live.services.sessions)
        with live.socket(INTENT) as a, live.socket(INTENT) as b:
            assert update(a)["type"] == update(b)["type"] == "session.updated"
        live.wait_until(lambda: live.num_sessions == 0 and not live.services.sessions)


def test_audio_for_a_session_that_is_gone_brings_nothing_back() -> None:
    """The client goes on sending; it has not read yet that its session has failed."""
    engine = FakeEngine(max_sessions=1)
    with serve(engine) as live:
        with live.socket(INTENT) as client:
            update(client, format=PCM_16)
            engine.running.clear()
            client.append(pcm16(tone(FAILING_LEVEL, num_tokens=20)))
            (session,) = live.services.sessions
            for _ in range(5):
                client.append(pcm16(tone(3, 4)))
                client.send("input_audio_buffer.commit")
            live.wait_until(lambda: session._items.num_committed == 5)
            engine.running.set()
            live.wait_until(lambda: live.num_sessions == 0)
            for _ in range(5):
                with suppress(ConnectionClosed):
                    client.append(pcm16(tone(3, 4)))
                    client.send("input_audio_buffer.commit")
            events = []
            with pytest.raises(ConnectionClosed, match="1011"):
                while True:
                    events.append(client.receive())
        types = [event["type"] for event in events]
        assert DELTA not in types and COMPLETED not in types
        assert types.count("error") == 1
        live.wait_until(lambda: not live.services.sessions)
        num_samples = engine.num_samples_in
        assert live.num_sessions == 0
        assert transcribes(live, 1, 2)
        assert engine.num_samples_in - num_samples == len(tone(1, 2))


def leave(client: Client) -> None:
    """Stop sending and reading, as a process that ends does, without a close frame."""
    client.websocket.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("vanish", [reset, leave], ids=["reset", "end"])
@pytest.mark.parametrize("moment", ["append", "commit", "finish", "drain"])
def test_a_client_that_vanishes_while_the_server_waits_frees_its_seat(
    moment: str, vanish: Callable[[Client], None]
) -> None:
    """Room for its audio, or its last text, won't come for as long as the test lasts."""
    engine = FakeEngine(max_sessions=2, max_buffered_s=2.0)
    is_mistral = moment == "finish"
    idle_timeout = 1.0 if moment == "drain" else 0
    with (
        serve(engine, max_append_wait=1000.0, idle_timeout=idle_timeout) as live,
        live.socket(INTENT) as neighbour,
        live.socket(MISTRAL if is_mistral else INTENT) as client,
    ):
        update(neighbour, format=PCM_16)
        neighbour.append(pcm16(tone(1)))
        live.wait_until(lambda: engine.num_samples_in > 0)
        client.next("session.created")
        (session,) = (s for s in live.services.sessions if s._position == 0)
        engine.running.clear()
        type_ = "input_audio.append" if is_mistral else "input_audio_buffer.append"
        client.append(pcm16(tone(2)), type_)
        if moment == "append":
            for _ in range(8):
                client.append(pcm16(tone(2, num_tokens=12)))
            live.wait_until(lambda: session.lag_s > 1.0)
        elif moment == "commit":
            client.send("input_audio_buffer.commit")
            live.wait_until(lambda: session.is_waiting_for_text)
        elif moment == "finish":
            client.send("input_audio.end")
            live.wait_until(lambda: session.is_waiting_for_text)
        else:
            live.wait_until(lambda: session.is_waiting_for_text)
        # More is there than is read, so that the end isn't seen by reading.
        for _ in range(8):
            client.append(pcm16(tone(2)), type_)
        vanish(client)
        live.wait_until(lambda: session not in live.services.sessions)
        engine.running.set()
        if moment != "drain":
            live.wait_until(lambda: live.num_sessions == 1)
            neighbour.append(pcm16(tone(2)))
            neighbour.send("input_audio_buffer.commit")
            assert text_of(neighbour.until(COMPLETED)) == "w1 w2"
        live.wait_until(lambda: engine.stats().num_sessions == len(live.services.sessions))


def test_one_session_too_many_is_refused_in_words() -> None:
    with serve(FakeEngine(max_sessions=1)) as live:
        with live.socket(INTENT) as client:
            client.next("session.created")
            with live.socket(INTENT) as second:
                error = second.receive()
                assert error["error"]["code"] == "overloaded"
                assert "all 1 sessions are in use" in error["error"]["message"]
                with pytest.raises(Exception, match="1013"):
                    second.receive()
            with live.socket() as third:
                assert third.receive()["code"] == "overloaded"
            with live.http() as http:
                files = {"file": ("a.wav", b"RIFF")}
                response = http.post("/v1/audio/transcriptions", files=files)
                assert response.status_code == 503
                assert response.headers["Retry-After"] == "1"
        live.wait_until(lambda: live.num_sessions == 0)
        assert transcribes(live, 1)


def test_the_cap_is_free_again_after_every_kind_of_end() -> None:
    def final(client: Client) -> None:
        client.append(pcm16(tone(1)))
        client.send("input_audio_buffer.commit")
        client.next(COMPLETED)

    def close(client: Client) -> None:
        client.append(pcm16(tone(1)))

    def fail(client: Client) -> None:
        client.append(pcm16(tone(30, num_tokens=20)))
        client.next("error")

    with serve(FakeEngine(max_sessions=2)) as live:
        for _ in range(12):
            for end in (final, close, fail, reset):
                live.wait_until(lambda: live.num_sessions == 0)
                with live.socket(INTENT) as a, live.socket(INTENT) as b:
                    for client in (a, b):
                        update(client, format=PCM_16)
                        end(client)
        live.wait_until(lambda: live.num_sessions == 0)
        live.wait_until(lambda: not live.services.sessions)
        assert transcribes(live, 1, 2)


def test_a_client_that_does_not_read_ends_alone() -> None:
    with (
        serve(FakeEngine(max_sessions=2), max_send_wait=0.2) as live,
        live.socket(INTENT) as neighbour,
    ):
        update(neighbour, format=PCM_16)
        live.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", live.port))
        reader.settimeout(0.5)
        reader.sendall(HANDSHAKE.encode())
        live.wait_until(lambda: live.num_sessions == 2)
        # Each commit is answered by four events.
        commit = b'{"type":"input_audio_buffer.commit"}'
        frame = bytes((0x81, 0x80 | len(commit), 0, 0, 0, 0)) + commit
        with suppress(OSError):
            for _ in range(2000):
                reader.sendall(frame * 100)
        live.wait_until(lambda: live.num_sessions == 1)
        reader.close()
        neighbour.append(pcm16(tone(4)))
        neighbour.send("input_audio_buffer.commit")
        assert text_of(neighbour.until(COMPLETED)) == "w4"


_CLIENT: Final = """
import sys
from websockets.sync.client import connect

with connect(sys.argv[1], proxy=None) as websocket:
    websocket.recv()
    websocket.send(bytes(320))
    print("there", flush=True)
    websocket.recv()
"""


def test_a_client_that_is_stopped_ends_alone_after_the_idle_time() -> None:
    with serve(FakeEngine(max_sessions=2), idle_timeout=1.0) as live, live.socket(INTENT) as other:
        update(other, format=PCM_16)
        url = f"ws://127.0.0.1:{live.port}{INTENT}"
        with subprocess.Popen(
            [sys.executable, "-c", _CLIENT, url], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None

                def speak_until(condition: Callable[[], bool]) -> None:
                    """Silence is activity: the neighbour stays."""
                    live.wait_until(lambda: other.append(bytes(320)) or condition())

                speak_until(lambda: live.num_sessions == 2)
                process.send_signal(signal.SIGSTOP)
                speak_until(lambda: live.num_sessions == 1)
            finally:
                process.kill()
        other.append(pcm16(tone(0, 5, num_tokens=2)))
        other.send("input_audio_buffer.commit")
        assert text_of(other.until(COMPLETED)).endswith("w5")


def test_floods_leave_no_memory_behind() -> None:
    """Twenty times 8 MB of audio where there is room for 64 kB."""
    engine = FakeEngine(max_buffered_s=2.0)
    resident_bytes = []
    with serve(engine, max_append_wait=0.02) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16)
        for _ in range(20):
            engine.running.clear()
            for _ in range(2):
                client.append(bytes(4_000_000))
                assert client.next("error")["error"]["code"] == "buffer_full"
            engine.running.set()
            client.send("input_audio_buffer.commit")
            assert client.next(COMPLETED)["transcript"] == ""
            resident_bytes.append(psutil.Process().memory_info().rss)
    assert resident_bytes[-1] - resident_bytes[4] < 32e6


def test_overload_waits_and_loses_nothing() -> None:
    """Much more audio than may be buffered, sent at once: reading stops until there is room."""
    engine = FakeEngine(max_buffered_s=1.0)
    clip = np.concatenate([tone(level, num_tokens=10) for level in range(1, 26)])
    with serve(engine) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16)
        engine.running.clear()
        threading.Timer(0.3, engine.running.set).start()
        client.append(pcm16(clip))
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED)) == " ".join(f"w{x}" for x in range(1, 26))


def test_fifteen_minutes_of_text_are_the_sum_of_their_deltas() -> None:
    levels = np.tile(np.arange(1, 26), 450)
    clip = pcm16(tone(*levels))
    assert len(clip) == 2 * 900 * 16_000
    with serve() as live, live.socket(INTENT, ping_interval=None) as client:
        update(client, format=PCM_16)
        for start in range(0, len(clip), 1_000_000):
            client.append(clip[start : start + 1_000_000])
        client.send("input_audio_buffer.commit")
        text = text_of(client.until(COMPLETED))
    assert text == " ".join(f"w{level}" for level in levels)


def test_the_buffer_is_bounded_the_error_says_so_and_the_socket_stays_usable() -> None:
    engine = FakeEngine(max_buffered_s=2.0)
    with serve(engine, max_append_wait=0.05) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16)
        engine.running.clear()
        second = pcm16(tone(1, num_tokens=12))
        for _ in range(5):
            client.append(second + b"\x00")  # an odd byte: alignment must survive the refusal
        client.websocket.ping()
        error = client.next("error")["error"]
        assert error["code"] == "buffer_full"
        assert "32000" in error["message"]
        assert "0.96 of 0.96 s were not taken" in error["message"]
        (session,) = live.services.sessions
        assert session.lag_s <= 2.0
        engine.running.set()
        update(client)
        client.append(b"\x00" + pcm16(tone(0, 7, 8, num_tokens=3)))
        client.send("input_audio_buffer.commit")
        assert client.next(COMPLETED)["transcript"].endswith("w7 w8")


def test_a_blocked_engine_blocks_nobody_elses_answers() -> None:
    engine = FakeEngine()
    with serve(engine) as live, live.socket(INTENT) as client, live.http() as http:
        update(client, format=PCM_16)
        engine.running.clear()
        client.append(pcm16(tone(1)))
        worst_s = 0.0
        for _ in range(20):
            started_s = time.monotonic()
            assert client.websocket.ping().wait(timeout=5)
            assert http.get("/health").status_code == 200
            worst_s = max(worst_s, time.monotonic() - started_s)
        assert worst_s < 1.0
        engine.running.set()
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED)) == "w1"


def test_pings_and_empty_commits_do_not_keep_a_session_but_silence_does() -> None:
    with serve(idle_timeout=1.0) as live:
        with live.socket(INTENT) as client:
            update(client, format=PCM_16)
            stop = threading.Event()

            def pester() -> None:
                with suppress(ConnectionClosed):  # the server may end the session between two sends
                    while not stop.wait(0.02):
                        client.websocket.ping()
                        client.send("input_audio_buffer.commit")

            pest = threading.Thread(target=pester, daemon=True)
            pest.start()
            error = client.next("error")["error"]
            stop.set()
            pest.join()
            assert error["code"] == "idle_timeout" and "1 s" in error["message"]
        live.wait_until(lambda: live.num_sessions == 0)
        with live.socket(INTENT) as client:
            update(client, format=PCM_16)
            for _ in range(15):  # 1.5 s
                client.append(bytes(3200))
                stop.clear()
                stop.wait(0.1)
            assert update(client)["type"] == "session.updated"


def test_a_flood_of_commits_is_bounded_and_keeps_nothing_alive() -> None:
    engine = FakeEngine()
    with serve(engine, max_append_wait=0.05) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16)
        engine.running.clear()
        for _ in range(300):
            client.send("input_audio_buffer.commit")
        error = client.next("error")["error"]
        assert error["code"] == "buffer_full" and "256 utterances" in error["message"]
        (session,) = live.services.sessions
        assert not session.is_waiting_for_text
        engine.running.set()
        client.append(pcm16(tone(1)))
        client.send("input_audio_buffer.commit")
        live.wait_until(lambda: not session._items.num_committed)
        update(client)


def test_the_last_words_come_before_an_idle_session_ends() -> None:
    with serve(idle_timeout=0.2) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16)
        client.append(pcm16(tone(1, 2)))
        events = client.until("error")
        assert text_of([e for e in events if e["type"] != "error"]) == "w1 w2"
        assert events[-1]["error"]["code"] == "idle_timeout"
        with pytest.raises(Exception, match="1008"):
            client.receive()


def test_a_session_lasts_as_long_as_it_may() -> None:
    with serve(max_session_seconds=0.5) as live, live.socket(INTENT) as client:
        created = client.receive()
        assert created["session"]["expires_at"] == created["created"] + round(0.5)
        update(client, format=PCM_16)
        client.append(pcm16(tone(1, 2, 3)))
        events = client.until("error")
        assert text_of(events[:-1]) == "w1 w2 w3"
        error = events[-1]["error"]
        assert error["code"] == "session_expired" and "0.5 s" in error["message"]


def test_while_loading_and_after_a_failure_the_server_says_so() -> None:
    may_load = threading.Event()
    engine = FakeEngine()

    def load() -> FakeEngine:
        may_load.wait(20)
        return engine

    with serve(engine, load=load) as live, live.http() as http:
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        assert http.get("/v1/models").status_code == 200
        with live.socket(INTENT) as client:
            assert client.receive()["error"]["code"] == "loading"
            with pytest.raises(Exception, match="1013"):
                client.receive()
        may_load.set()
        live.wait_until(lambda: http.get("/health").status_code == 200)
        assert transcribes(live, 1)
        from voxlite.engine.errors import EngineFailure

        engine.failure = EngineFailure("out of memory")
        health = http.get("/health")
        assert health.status_code == 503 and "out of memory" in health.json()["reason"]
        with live.socket(INTENT) as client:
            assert client.receive()["error"]["code"] == "engine_failure"
        engine.failure = None


def test_a_model_that_cannot_be_loaded_is_a_reason_not_a_hang() -> None:
    def load() -> FakeEngine:
        from voxlite.engine.errors import CheckpointError

        raise CheckpointError("params.json is missing")

    with serve(load=load) as live, live.http() as http:
        live.wait_until(lambda: "params.json" in http.get("/health").json()["reason"])
        assert http.get("/ping").status_code == 503


def test_a_thousand_failed_connections_leave_nothing_behind(server: LiveServer) -> None:
    process = psutil.Process()
    assert transcribes(server, 1)
    server.wait_until(lambda: not server.services.sessions)
    num_threads, num_files = threading.active_count(), process.num_fds()
    for _ in range(1000):
        raw = socket.create_connection(("127.0.0.1", server.port))
        raw.sendall(b"GET /v1/realtime HTTP/1.1\r\nUpgrade: websocket\r\n")
        raw.close()
    assert transcribes(server, 1)
    server.wait_until(lambda: not server.services.sessions)
    server.wait_until(lambda: process.num_fds() <= num_files + 1)
    assert threading.active_count() <= num_threads + 1
