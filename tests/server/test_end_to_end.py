"""The server on the real engine, with a tiny random checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine import Engine, EngineConfig
from server.voice_activity import SileroModel
from tests.checkpoints import write_checkpoint
from tests.server.fake_engine import pcm16
from tests.server.harness import LiveServer, serve
from tests.server.test_http import post, wav
from tests.server.test_socket_openai import COMPLETED, INTENT, PCM_16, update
from tests.server.test_socket_openai import text_of as openai_text_of
from tests.server.test_socket_vllm import DONE, configured, text_of


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=3)
    engine = Engine(config)
    with serve(engine, voice_model=SileroModel()) as server:
        yield server


def noise(duration_s: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(duration_s * 16_000))
    return (0.1 * samples).astype(np.float32)


def vllm_text(live: LiveServer, clip: bytes, chunk_bytes: int) -> tuple[str, dict]:
    with live.socket() as client:
        configured(client)
        client.send("input_audio_buffer.commit")
        for start in range(0, len(clip), chunk_bytes):
            client.append(clip[start : start + chunk_bytes])
        client.send("input_audio_buffer.commit", final=True)
        events = client.until(DONE)
    return text_of(events), events[-1]["usage"]


def test_sixteen_seconds_in_125_appends_are_counted_as_vllm_counts(live: LiveServer) -> None:
    clip = pcm16(noise(16.0))
    text, usage = vllm_text(live, clip, 4096)
    assert len(clip) / 4096 == 125
    assert text
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        39,
        210,
        249,
    )


def test_every_way_of_sending_gives_the_same_text(live: LiveServer) -> None:
    samples = noise(3.0, seed=1)
    clip = pcm16(samples)
    expected, _ = vllm_text(live, clip, len(clip))
    assert vllm_text(live, clip, 1281)[0] == expected
    with live.socket(INTENT) as client:
        update(client, format=PCM_16)
        for start in range(0, len(clip), 3333):
            client.websocket.send(clip[start : start + 3333])
        client.send("input_audio_buffer.commit")
        assert openai_text_of(client.until(COMPLETED)) == expected.lstrip()
    assert post(live, wav(samples)).json()["text"] == expected.lstrip()


def test_an_utterance_after_another_is_what_it_is_alone(live: LiveServer) -> None:
    first, second = pcm16(noise(2.0, seed=2)), pcm16(noise(1.5, seed=3))
    alone, _ = vllm_text(live, second, 4096)
    with live.socket() as client:
        configured(client, include=["item.input_audio_transcription.logprobs"])
        client.append(first)
        client.send("input_audio_buffer.commit", final=True)
        client.append(second)
        client.send("input_audio_buffer.commit", final=True)
        client.until(DONE)
        events = client.until(DONE)
    assert text_of(events) == alone
    assert any(e["logprobs"] for e in events[:-1])
    assert all(t["logprob"] <= 0 and t["bytes"] for e in events[:-1] for t in e["logprobs"])


def test_word_times_are_monotone_over_turns(live: LiveServer) -> None:
    with live.socket() as client:
        configured(client, timestamp_granularities=["word"])
        ends = []
        for seed in (4, 5, 6):
            client.append(pcm16(noise(2.0, seed=seed)))
            client.send("input_audio_buffer.commit", final=True)
            words = client.next(DONE)["words"]
            ends.append([(word["start"], word["end"]) for word in words])
    times = [time for turn in ends for word in turn for time in word]
    assert times == sorted(times)
    assert times[-1] <= 6.0


def test_the_seats_are_the_engines(live: LiveServer) -> None:
    with live.socket(INTENT) as a, live.socket(INTENT) as b, live.socket(INTENT) as c:
        for client in (a, b, c):
            assert client.receive()["type"] == "session.created"
        with live.socket(INTENT) as d:
            assert d.receive()["error"]["code"] == "overloaded"
    live.wait_until(lambda: live.engine.stats().num_sessions == 0)
    with live.http() as http:
        metrics = http.get("/metrics").text
    assert "voxlite_sessions 0.0" in metrics
