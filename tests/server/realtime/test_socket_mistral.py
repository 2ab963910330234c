"""Mistral's protocol at the socket."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server.fake_engine import pcm16, tone
from tests.server.harness import Client, LiveServer

PATH = "/v1/audio/transcriptions/realtime?model=voxtral"
APPEND, DONE = "input_audio.append", "transcription.done"


def text_of(events: list[dict]) -> str:
    deltas = [e["text"] for e in events if e["type"] == "transcription.text.delta"]
    assert "".join(deltas) == events[-1]["text"]
    return events[-1]["text"]


def configure(client: Client, **session: object) -> dict:
    client.send("session.update", session=session)
    return client.next("session.updated", "error")


def test_the_course_of_the_sdk(server: LiveServer) -> None:
    with server.socket(PATH) as client:
        created = client.receive()
        assert created["type"] == "session.created"
        assert created["session"]["model"] == "voxtral"
        assert created["session"]["request_id"]
        assert created["session"]["audio_format"] == {
            "encoding": "pcm_s16le",
            "sample_rate": 16000,
        }
        updated = configure(client, target_streaming_delay_ms=240)
        assert updated["session"]["target_streaming_delay_ms"] == 240
        client.append(pcm16(tone(1, 2)), APPEND)
        client.send("input_audio.flush")
        client.send("input_audio.end")
        events = client.until(DONE)
        with pytest.raises(Exception, match="1000"):
            client.receive()
    assert server.engine.delays_ms[-1] == 240
    assert text_of(events) == " w1 w2"
    done = events[-1]
    assert done["model"] == "voxtral" and done["language"] is None
    assert done["usage"]["prompt_tokens"] == 1 + 32 + 3
    assert [segment["text"] for segment in done["segments"]] == ["w1 w2"]


def test_every_flush_is_answered_and_the_session_goes_on(server: LiveServer) -> None:
    with server.socket(PATH) as client:
        client.next("session.created")
        for level in (1, 2):
            client.append(pcm16(tone(level)), APPEND)
            client.send("input_audio.flush")
            assert text_of(client.until(DONE)) == f" w{level}"
        client.append(pcm16(tone(3)), APPEND)
        client.send("input_audio.end")
        assert text_of(client.until(DONE)) == " w3"


def test_an_end_without_audio_is_answered(server: LiveServer) -> None:
    with server.socket(PATH) as client:
        client.send("input_audio.end")
        assert client.next(DONE)["text"] == ""


@pytest.mark.parametrize(
    ("encoding", "dtype", "scale"),
    [
        ("pcm_s16le", "<i2", 2**15),
        ("pcm_s32le", "<i4", 2**31),
        ("pcm_f16le", "<f2", 1),
        ("pcm_f32le", "<f4", 1),
    ],
)
def test_every_encoding(server: LiveServer, encoding: str, dtype: str, scale: float) -> None:
    audio = (tone(5, 6).astype(np.float64) * scale).astype(dtype).tobytes()
    with server.socket(PATH) as client:
        configure(client, audio_format={"encoding": encoding, "sample_rate": 16000})
        for start in range(0, len(audio), 1001):
            client.append(audio[start : start + 1001], APPEND)
        client.send("input_audio.flush")
        assert text_of(client.until(DONE)) == " w5 w6"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_and_the_session_goes_on(
    server: LiveServer, bad: float
) -> None:
    with server.socket(PATH) as client:
        configure(client, audio_format={"encoding": "pcm_f32le", "sample_rate": 16000})
        client.append(np.array([0.0, bad], "<f4").tobytes(), APPEND)
        error = client.receive()
        assert error["type"] == "error" and error["error"]["code"] == 400
        client.append(tone(3).astype("<f4").tobytes(), APPEND)
        client.send("input_audio.flush")
        assert text_of(client.until(DONE)) == " w3"


def test_updates_after_audio_and_what_the_model_cannot_do_are_refused(server: LiveServer) -> None:
    with server.socket(PATH) as client:
        client.next("session.created")
        assert configure(client, diarize=True)["type"] == "error"
        assert configure(client, target_streaming_delay_ms=500)["type"] == "error"
        assert configure(client, language="en", diarize=False)["type"] == "session.updated"
        client.append(bytes(262_145), APPEND)
        assert "262144" in client.receive()["error"]["message"]
        client.append(pcm16(tone(1)), APPEND)
        error = configure(client, target_streaming_delay_ms=480)
        assert error["error"]["code"] == 400
        client.send("input_audio.flush")
        assert text_of(client.until(DONE)) == " w1"
