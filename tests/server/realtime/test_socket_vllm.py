"""vLLM's protocol at the socket: its clients' course, its codes, and no text lost."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.server.fake_engine import pcm16, tone
from tests.server.harness import Client, LiveServer

DONE = "transcription.done"


def configured(client: Client, **fields: object) -> None:
    client.next("session.created")
    client.send("session.update", model="voxtral", **fields)


def text_of(events: list[dict]) -> str:
    deltas = "".join(e["delta"] for e in events if e["type"] == "transcription.delta")
    assert deltas == events[-1]["text"]
    return deltas


def test_the_course_of_vllms_example_client(server: LiveServer) -> None:
    clip = pcm16(np.concatenate([tone(*range(1, 21)), tone(3, num_tokens=180)]))
    chunks = [clip[i : i + 4096] for i in range(0, len(clip), 4096)]
    assert len(chunks) == 125  # 16.0 s
    with server.socket() as client:
        created = client.receive()
        assert created["type"] == "session.created"
        assert created["id"].startswith("sess-") and isinstance(created["created"], int)
        client.send("session.update", model="voxtral")
        client.send("input_audio_buffer.commit")
        for chunk in chunks:
            client.append(chunk)
        client.send("input_audio_buffer.commit", final=True)
        events = client.until(DONE)
    assert {e["type"] for e in events} == {"transcription.delta", DONE}
    assert all(set(e) == {"type", "delta"} and e["delta"] for e in events[:-1])
    assert text_of(events) == "".join(f" w{level}" for level in range(1, 21)) + " w3"
    assert events[-1]["usage"] == {
        "prompt_tokens": 39,
        "completion_tokens": 210,
        "total_tokens": 249,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize(
    "plan",
    ["commit append final", "append final", "append commit append commit final", "commit " * 3
     + "append commit commit append final"],
)  # fmt: skip
def test_every_order_of_commits_gives_the_full_text_once(server: LiveServer, plan: str) -> None:
    num_appends = plan.split().count("append")
    levels = iter(np.array_split(np.arange(1, 13), num_appends))
    with server.socket() as client:
        configured(client)
        for step in plan.split():
            match step:
                case "append":
                    client.append(pcm16(tone(*next(levels))))
                case "commit":
                    client.send("input_audio_buffer.commit")
                case "final":
                    client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == "".join(f" w{level}" for level in range(1, 13))


def test_utterances_may_be_pipelined(server: LiveServer) -> None:
    with server.socket() as client:
        configured(client)
        for level in (1, 2, 3):
            client.append(pcm16(tone(level)))
            client.send("input_audio_buffer.commit", final=True)
        assert [text_of(client.until(DONE)) for _ in range(3)] == [" w1", " w2", " w3"]


def test_each_final_commit_gives_exactly_one_done(server: LiveServer) -> None:
    with server.socket() as client:
        configured(client)
        client.send("input_audio_buffer.commit", final=True)
        client.append(pcm16(tone(5)))
        client.send("input_audio_buffer.commit", final=True)
        client.send("input_audio_buffer.commit", final=True)
        client.append(pcm16(tone(6)))
        client.send("input_audio_buffer.commit", final=True)
        dones = [client.next(DONE) for _ in range(4)]
        client.send("nonsense")
        assert client.receive()["type"] == "error"
    assert [done["text"] for done in dones] == ["", " w5", "", " w6"]
    assert [done["usage"]["total_tokens"] for done in dones] == [0, 50, 0, 50]


def test_an_append_of_nothing_is_refused_as_vllm_does_and_its_text_is_empty(
    server: LiveServer,
) -> None:
    with server.socket() as client:
        configured(client)
        client.append(b"")
        error = client.receive()
        assert (error["type"], error["error"]) == ("error", "Invalid audio data: empty")
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == ""
        client.append(pcm16(tone(4)))
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == " w4"


def test_silence_gives_empty_text_and_the_next_utterance_works(server: LiveServer) -> None:
    with server.socket() as client:
        configured(client)
        client.append(pcm16(np.zeros(16_000, np.float32)))
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == ""
        client.append(pcm16(tone(4)))
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == " w4"


def test_audio_before_the_update_is_kept_in_order(server: LiveServer) -> None:
    with server.socket() as client:
        client.append(pcm16(tone(1, 2)))
        client.send("session.update", model="voxtral")
        client.append(pcm16(tone(3)))
        client.send("input_audio_buffer.commit", final=True)
        client.next("session.created")
        assert text_of(client.until(DONE)) == " w1 w2 w3"


def test_pcm_may_be_cut_within_a_sample(server: LiveServer) -> None:
    clip = pcm16(tone(1, 2, 3, 4))
    cuts = [0, 1, 4, 777, 778, 2561, 5000, len(clip)]
    with server.socket() as client:
        configured(client)
        for start, end in zip(cuts, cuts[1:], strict=False):
            client.append(clip[start:end])
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == " w1 w2 w3 w4"


def test_binary_frames_are_pcm(server: LiveServer) -> None:
    with server.socket() as client:
        configured(client)
        client.websocket.send(pcm16(tone(8, 9)))
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == " w8 w9"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "invalid_json"),
        ('{"type": "session.update", "x": NaN}', "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("[1]", "processing_error"),
        ('{"model": "voxtral"}', "invalid_event"),
        ('{"type": "session.update"}', "invalid_event"),
        ('{"type": "session.update", "model": null}', "invalid_event"),
        ('{"type": "session.update", "model": 5}', "invalid_event"),
        ('{"type": "session.update", "model": "gpt-4"}', "model_not_found"),
        ('{"type": "session.update", "model": "voxtral", "include": ["x"]}', "invalid_event"),
        ('{"type": "session.update", "model": "voxtral", "transcription_delay_ms": 500}',
         "invalid_event"),
        ('{"type": "input_audio_buffer.commit"}', "model_not_validated"),
        ('{"type": "input_audio_buffer.commit", "final": true}', "model_not_validated"),
        ('{"type": "input_audio_buffer.append"}', "processing_error"),
        ('{"type": "input_audio_buffer.append", "audio": "x"}', "invalid_audio"),
        ('{"type": "input_audio_buffer.append", "audio": ""}', "invalid_audio"),
        ('{"type": "input_audio_buffer.append", "audio": "data:audio/wav;base64,AAAA"}',
         "invalid_audio"),
        ('{"type": "input_audio_buffer.append", "audio": 7}', "invalid_event"),
        ('{"type": "input_audio_buffer.clear"}', "unknown_event"),
        ('{"type": "\\ud800"}', "unknown_event"),
    ],
)  # fmt: skip
def test_a_bad_message_gets_its_code_and_the_session_goes_on(
    server: LiveServer, message: str, code: str
) -> None:
    with server.socket() as client:
        client.next("session.created")
        client.websocket.send(message)
        error = client.receive()
        assert (error["type"], error["code"]) == ("error", code)
        assert isinstance(error["error"], str) and len(error["error"]) < 400
        client.send("session.update", model="other")
        client.append(pcm16(tone(7)))
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == " w7"


@pytest.mark.parametrize(
    "message",
    [json.dumps({"type": "session.update", "x": "y" * 30_000_000}), bytes(20_000_000)],
    ids=["text", "binary"],
)
def test_a_message_that_is_too_large_is_refused_in_words(
    server: LiveServer, message: str | bytes
) -> None:
    with server.socket() as client:
        configured(client)
        client.websocket.send(message)
        error = client.next("error")
        assert error["code"] == "message_too_large"
        client.append(pcm16(tone(2)))
        client.send("input_audio_buffer.commit", final=True)
        assert text_of(client.until(DONE)) == " w2"


def test_extensions_are_acknowledged_and_have_their_effect(server: LiveServer) -> None:
    with server.socket() as client:
        configured(
            client,
            transcription_delay_ms=960,
            include=["item.input_audio_transcription.logprobs"],
            timestamp_granularities=["word", "segment"],
        )
        updated = client.next("session.updated")
        assert updated["transcription_delay_ms"] == 960
        client.append(pcm16(tone(0, 5, 6)))
        client.send("input_audio_buffer.commit", final=True)
        events = client.until(DONE)
    assert server.engine.delays_ms[-1] == 960
    assert events[0]["logprobs"] == [{"token": " w5", "logprob": -0.25, "bytes": list(b" w5")}]
    assert events[-1]["words"] == [
        {"word": "w5", "start": 0.08, "end": 0.16},
        {"word": "w6", "start": 0.16, "end": 0.24},
    ]
    assert [segment["text"] for segment in events[-1]["segments"]] == ["w5 w6"]
    assert events[-1]["usage"]["prompt_tokens"] == 1 + 32 + 12
