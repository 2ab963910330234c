"""`voxlite serve` and `voxlite demo` as processes and functions: start, ready, end."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import httpx2
import numpy as np
import pytest
import soundfile
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.checkpoints import write_checkpoint
from tests.server.fake_engine import FakeEngine, pcm16, tone
from tests.server.harness import TIMEOUT_S, Client, LiveServer, serve
from tests.server.realtime.test_socket_openai import COMPLETED, INTENT, PCM_16, text_of, update
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.errors import CheckpointError, InvalidInput
from voxlite.engine.stats import EngineStats
from voxlite.server.async_engine import EngineStatus
from voxlite.server.commands import demo
from voxlite.server.commands.serve import serve as run_server
from voxlite.server.commands.serve import settings_of
from voxlite.server.listening import listen
from voxlite.server.warm_up import log_speed, step_s

ROOT = Path(__file__).parents[3]


def start(*args: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "voxlite.server.cli", "serve", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_it_serves_a_checkpoint_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    folder, port = write_checkpoint(tmp_path / "checkpoint"), free_port()
    process = start(str(folder), "--port", str(port), "--served-model-name", "tiny")
    try:
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{port}",
            transport=httpx2.HTTPTransport(retries=0),
            timeout=TIMEOUT_S,
            trust_env=False,
        ) as http:
            live = _Waiting(process, http)
            live.wait_until_ready()
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


def test_text_of_a_committed_turn_arrives_after_sigterm(tmp_path: Path) -> None:
    folder, port = write_checkpoint(tmp_path / "checkpoint"), free_port()
    process = start(str(folder), "--port", str(port))
    try:
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False
        ) as http:
            _Waiting(process, http).wait_until_ready()
        clip = pcm16(0.1 * np.random.default_rng(0).standard_normal(20 * 16_000))
        with connect(f"ws://127.0.0.1:{port}{INTENT}", proxy=None, max_size=None) as websocket:
            client = Client(websocket)
            update(client, format=PCM_16)
            client.append(clip)
            client.send("input_audio_buffer.commit")
            client.next("input_audio_buffer.committed")
            process.send_signal(signal.SIGTERM)
            assert client.next(COMPLETED)["usage"]["total_tokens"] > 20 / 0.08
            with pytest.raises(ConnectionClosed) as closed:
                client.receive()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        assert process.wait(TIMEOUT_S) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_is_stopped_finishes_what_was_committed_and_refuses_the_rest() -> None:
    engine = FakeEngine()
    with (
        serve(engine) as live,
        live.http() as http,
        live.socket(INTENT) as waiting,
        live.socket(INTENT) as late,
        live.socket(INTENT) as idle,
    ):
        for client in (waiting, late, idle):
            update(client, format=PCM_16)
        engine.running.clear()
        waiting.append(pcm16(tone(1, 2)))
        waiting.send("input_audio_buffer.commit")
        waiting.next("input_audio_buffer.committed")
        # More than there is room for: its commit is read only after the server was told to stop.
        late.append(pcm16(np.tile(tone(3, 4, num_tokens=10), 60)))
        late.send("input_audio_buffer.commit")
        live.wait_until(lambda: any(session.lag_s > 50 for session in live.services.sessions))
        live.stop()
        with pytest.raises(ConnectionClosed) as closed:
            idle.receive()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "stopping"
        with live.socket(INTENT) as refused:
            assert refused.receive()["error"]["code"] == "overloaded"
        engine.running.set()
        assert text_of(waiting.until(COMPLETED)) == "w1 w2"
        assert text_of(late.until(COMPLETED)) == " ".join(["w3 w4"] * 60)


def test_who_waits_when_the_time_to_stop_is_over_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    monkeypatch.setattr("voxlite.server.commands.serve._MAX_DRAIN_S", 0.2)
    file = io.BytesIO()
    soundfile.write(file, np.tile(tone(1, 2, 3), 200), 16_000, format="WAV")
    answers: list[httpx2.Response] = []

    def send(live: LiveServer) -> None:
        with live.http() as http:
            answers.append(
                http.post("/v1/audio/transcriptions", files={"file": ("a.wav", file.getvalue())})
            )

    with serve(load=lambda: Engine(EngineConfig(model=str(tiny_checkpoint)))) as live:
        live.wait_until(lambda: live.services.engine.status is EngineStatus.READY)
        request = threading.Thread(target=send, args=(live,))
        request.start()
        live.wait_until(lambda: cast(EngineStats, live.services.engine.stats()).num_passes > 0)
        live.stop()
        request.join(TIMEOUT_S)
    (answer,) = answers
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the engine was stopped"


def test_a_server_that_is_loading_stops_without_waiting_for_it() -> None:
    may_load = threading.Event()

    def load() -> FakeEngine:
        may_load.wait(10 * TIMEOUT_S)
        return FakeEngine()

    with serve(load=load) as live, live.http() as http:
        assert http.get("/health").json()["status"] == "loading"
    may_load.set()


def test_a_port_in_use_is_said_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = start("no-such-model", "--port", str(port))
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert f"voxlite: can't listen on host 127.0.0.1, port {port}: address already in use" in errors
    assert "Traceback" not in errors and "no-such-model" not in errors


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
def test_every_kind_of_host_is_listened_on(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    sockets = listen(host, 0)
    port = sockets[0].getsockname()[1]
    assert {sock.getsockname()[1] for sock in sockets} == {port}
    with socket.create_connection(("localhost" if host == "0.0.0.0" else host, port), TIMEOUT_S):
        pass
    with pytest.raises(InvalidInput, match="address already in use"):
        listen(host, port)
    for sock in sockets:
        sock.close()


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"host no\.such\.host\.invalid, port 80"):
        listen("no.such.host.invalid", 80)


class _Waiting:
    def __init__(self, process: subprocess.Popen[str], http: httpx2.Client) -> None:
        self._process = process
        self._http = http

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._process.communicate()[1]
        try:
            return self._http.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def wait_until_ready(self) -> None:
        LiveServer.wait_until(self, self._is_ready)  # type: ignore[arg-type]


def test_a_model_that_is_missing_ends_it_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        run_server(settings_of(model=str(tmp_path), port=0))


def test_the_speed_is_measured_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(
        model=str(write_checkpoint(tmp_path / "checkpoint")), device="cpu", max_num_seqs=2
    )
    engine = Engine(config)
    assert step_s(engine, 2) > 0
    log_speed(engine)
    assert "of audio take" in caplog.text or "slower than real time" in caplog.text
    assert engine.stats().num_sessions == 0
    engine.check_integrity()
    engine.stop()


def test_the_demo_prints_the_words_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = np.concatenate([tone(1, 2, 3), tone(0, num_tokens=10)])
    soundfile.write(tmp_path / "sample.wav", clip, 16_000, subtype="PCM_16")
    with serve(FakeEngine()) as live, live.socket("/v1/realtime?intent=transcription") as client:
        demo.transcribe_live(client.websocket, tmp_path / "sample.wav")
    assert "w1 w2 w3" in capsys.readouterr().out
