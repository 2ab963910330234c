"""The HTTP side: files in every format, models, health, metrics."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.server.fake_engine import FAILING_LEVEL, FakeEngine, tone
from tests.server.harness import LiveServer, serve

URL = "/v1/audio/transcriptions"


def wav(samples: np.ndarray, subtype: str = "PCM_16", format_: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, subtype=subtype, format=format_)
    return file.getvalue()


CLIP = wav(tone(1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3))


def post(live: LiveServer, audio: bytes = CLIP, **fields: Any) -> Any:
    with live.http() as http:
        return http.post(URL, files={"file": ("a.wav", audio)}, data={"model": "voxtral", **fields})


def test_json(server: LiveServer) -> None:
    response = post(server)
    assert response.json() == {"text": "w1 w2 w3", "usage": {"type": "duration", "seconds": 1.2}}


def test_text_is_plain(server: LiveServer) -> None:
    response = post(server, response_format="text")
    assert response.headers["content-type"].startswith("text/plain")
    assert response.text == "w1 w2 w3\n"


def test_subtitles(server: LiveServer) -> None:
    srt = post(server, response_format="srt").text
    assert srt == (
        "1\n00:00:00,000 --> 00:00:00,160\nw1 w2\n\n2\n00:00:01,120 --> 00:00:01,200\nw3\n\n"
    )
    vtt = post(server, response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.160\nw1 w2\n")


def test_verbose_json(server: LiveServer) -> None:
    body = post(
        server,
        response_format="verbose_json",
        **{"timestamp_granularities[]": ["word", "segment"]},
    ).json()
    assert body["text"] == "w1 w2 w3" and body["duration"] == 1.2
    assert body["words"][0] == {"word": "w1", "start": 0.0, "end": 0.08}
    first, second = body["segments"]
    assert (first["text"], second["text"]) == ("w1 w2", "w3")
    assert first["tokens"] == [1001, 1002] and first["avg_logprob"] == -0.25
    assert "words" not in post(server, response_format="verbose_json").json()


def test_logprobs_on_request(server: LiveServer) -> None:
    body = post(server, **{"include[]": "logprobs"}).json()
    assert [token["token"] for token in body["logprobs"]] == [" w1", " w2", " w3"]


def test_streamed_as_openai_types_it(server: LiveServer) -> None:
    response = post(server, stream="true", **{"include[]": "logprobs"})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-1]]
    assert [e["type"] for e in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert "".join(e["delta"] for e in events[:-1]) == events[-1]["text"] == "w1 w2 w3"
    assert events[1]["logprobs"][0]["token"] == " w2"
    assert events[-1]["usage"]["type"] == "tokens"
    assert events[-1]["usage"]["total_tokens"] == 39 + 25


@pytest.mark.parametrize(
    ("subtype", "format_"),
    [("PCM_24", "WAV"), ("FLOAT", "WAVEX"), ("PCM_16", "FLAC"), ("PCM_U8", "WAV")],
)
def test_other_files(server: LiveServer, subtype: str, format_: str) -> None:
    audio = wav(tone(8, 16), subtype, format_)
    assert post(server, audio).json()["text"] == "w8 w16"


def test_stereo(server: LiveServer) -> None:
    mono = tone(4, 5)
    assert post(server, wav(np.stack([mono, mono], axis=1))).json()["text"] == "w4 w5"


def test_a_wav_of_unknown_length(server: LiveServer) -> None:
    audio = bytearray(wav(tone(4, 5)))
    at = audio.index(b"data") + 4
    audio[at : at + 4] = b"\xff\xff\xff\xff"
    assert post(server, bytes(audio)).json()["text"] == "w4 w5"


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize(
    ("fields", "audio", "status", "param"),
    [
        ({}, b"", 400, None),
        ({}, b"not audio at all", 400, None),
        ({"model": "whisper-1"}, CLIP, 404, "model"),
        ({"response_format": "diarized_json"}, CLIP, 400, "response_format"),
        ({"timestamp_granularities[]": "word"}, CLIP, 400, "timestamp_granularities"),
        ({"include[]": "everything"}, CLIP, 400, "include"),
        ({"transcription_delay_ms": "500"}, CLIP, 400, "transcription_delay_ms"),
        ({"transcription_delay_ms": "x"}, CLIP, 400, "transcription_delay_ms"),
        ({"temperature": "abc"}, CLIP, 400, "temperature"),
        ({"temperature": "1.5"}, CLIP, 400, "temperature"),
        ({"temperature": "nan"}, CLIP, 400, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    server: LiveServer,
    fields: dict[str, str],
    audio: bytes,
    status: int,
    param: str | None,
    stream: str,
) -> None:
    response = post(server, audio, stream=stream, **fields)
    error = response.json()["error"]
    assert response.status_code == status
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param
    server.wait_until(lambda: server.num_sessions == 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "xml"}, "response_format \"xml\": one of 'json', 'text', 'srt', "),
        ({"transcription_delay_ms": "x"}, 'transcription_delay_ms "x": a whole number'),
        ({"temperature": "1.5"}, 'temperature "1.5": at most 1'),
        ({"stream": "maybe"}, 'stream "maybe": true or false'),
    ],
)
def test_an_error_says_the_field_its_value_and_what_is_possible(
    server: LiveServer, fields: dict[str, str], message: str
) -> None:
    assert post(server, **fields).json()["error"]["message"].startswith(message)


def test_a_float_file_with_values_that_are_not_finite_has_silence_there(
    server: LiveServer,
) -> None:
    samples = tone(1, 2, 3).astype(np.float32)
    samples[1280:2560] = np.nan
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16_000, format="WAV", subtype="FLOAT")
    assert post(server, buffer.getvalue()).json()["text"] == "w1 w3"


def test_a_missing_file_is_named(server: LiveServer) -> None:
    with server.http() as http:
        error = http.post(URL, data={"model": "voxtral"}).json()["error"]
    assert error["param"] == "file"


def test_streaming_subtitles_is_refused(server: LiveServer) -> None:
    assert post(server, stream="true", response_format="srt").status_code == 400


def test_the_delay_has_its_effect(server: LiveServer) -> None:
    assert post(server, transcription_delay_ms="960").json()["text"] == "w1 w2 w3"
    assert server.engine.delays_ms[-1] == 960


def test_fields_without_effect_are_named(server: LiveServer) -> None:
    response = post(server, language="en", prompt="x", temperature="0.2", model="")
    assert response.headers["X-Voxlite-Ignored"] == "language, prompt, temperature"
    assert "X-Voxlite-Ignored" not in post(server).headers


def test_a_step_that_fails_is_our_fault(server: LiveServer) -> None:
    response = post(server, wav(tone(1, FAILING_LEVEL)))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    streamed = post(server, wav(tone(1, FAILING_LEVEL)), stream="true").text
    assert "server_error" in streamed.rstrip().split("\n")[-1]


def test_a_file_longer_than_the_buffer() -> None:
    clip = np.concatenate([tone(level, num_tokens=20) for level in range(1, 21)])
    with serve(FakeEngine(max_buffered_s=2.0)) as live:
        text = " ".join(f"w{level}" for level in range(1, 21))
        assert post(live, wav(clip)).json()["text"] == text
        assert json.loads(post(live, wav(clip), stream="true").text.split("data: ")[-1])[
            "text"
        ] == text  # fmt: skip


def test_a_file_that_is_too_large_is_refused() -> None:
    with serve(max_upload_mib=1) as live:
        response = post(live, bytes(2**21))
        assert response.status_code == 413
        assert "--max-upload-mib" in response.json()["error"]["message"]

        def chunks() -> Any:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(40):
                yield bytes(2**16)

        with live.http() as http:
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            assert http.post(URL, content=chunks(), headers=headers).status_code == 413


def test_a_client_that_leaves_frees_its_seat() -> None:
    engine = FakeEngine()
    with serve(engine) as live:
        engine.running.clear()

        def leave() -> None:
            with live.http() as http, pytest.raises(Exception, match="timed out"):
                http.post(URL, files={"file": ("a.wav", CLIP)}, timeout=0.3)

        leaving = threading.Thread(target=leave)
        leaving.start()
        live.wait_until(lambda: live.num_sessions == 1)
        leaving.join()
        engine.running.set()
        live.wait_until(lambda: live.num_sessions == 0)


def test_models(server: LiveServer) -> None:
    with server.http() as http:
        listed = http.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["voxtral", "other"]
        assert http.get("/v1/models/other").json() == listed["data"][1]
        missing = http.get("/v1/models/org/name")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_operations(server: LiveServer) -> None:
    post(server)
    with server.http() as http:
        assert http.get("/health").json()["status"] == "ready"
        assert http.post("/ping").status_code == 200
        assert "version" in http.get("/version").json()
        assert http.get("/nowhere").json()["error"]["code"] == "not_found"
        metrics = http.get("/metrics").text
    for name in (
        "voxlite_sessions 0.0",
        "voxlite_audio_seconds_total",
        "voxlite_tokens_total",
        "voxlite_decoder_passes_total",
        "voxlite_drafted_tokens_total",
        "voxlite_step_seconds_bucket",
        "voxlite_batch_sessions_bucket",
        "voxlite_lag_seconds 0.0",
        'voxlite_kv_cache_free_blocks{stack="decoder"}',
        "voxlite_websocket_connections_active 0.0",
        'voxlite_http_transcriptions_total{response_format="json"}',
    ):
        assert name in metrics, name


def test_refusals_are_counted_by_reason(server: LiveServer) -> None:
    with server.socket() as client:
        client.send("nonsense")
        client.next("error")
    with server.http() as http:
        assert http.get("/v1/models/nobody").status_code == 404
        assert http.post("/v1/audio/transcriptions").status_code == 400
        metrics = http.get("/metrics").text
    for reason in ("unknown_event", "model_not_found", "missing_required_parameter"):
        assert f'voxlite_refusals_total{{reason="{reason}"}}' in metrics
