"""OpenAI's protocol, current and beta, at the socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soxr

from tests.server.fake_engine import AUDIO, FAILING_LEVEL, FakeEngine, pcm16, tone
from tests.server.harness import Client, LiveServer, serve

INTENT = "/v1/realtime?intent=transcription"
TRANSCRIPTION = "conversation.item.input_audio_transcription"
DELTA, COMPLETED = f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"
PCM_16 = {"type": "audio/pcm", "rate": 16000}


def update(client: Client, **audio_input: Any) -> dict[str, Any]:
    session = {"type": "transcription", "audio": {"input": audio_input}}
    client.send("session.update", session=session)
    return client.next("session.updated", "error")


def text_of(events: list[dict]) -> str:
    completed = events[-1]
    assert completed["type"] == COMPLETED
    deltas = [e for e in events if e["type"] == DELTA and e["item_id"] == completed["item_id"]]
    assert "".join(delta["delta"] for delta in deltas) == completed["transcript"]
    return completed["transcript"]


def test_session_created_serves_clients_of_every_protocol(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        created = client.receive()
    assert created["type"] == "session.created"
    assert created["event_id"].startswith("event_")
    assert created["id"].startswith("sess-")
    session = created["session"]
    assert session["id"] == created["id"].replace("-", "_")
    assert (session["object"], session["type"]) == (
        "realtime.transcription_session",
        "transcription",
    )
    assert session["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": 24000},
        "noise_reduction": None,
        "transcription": {"model": "voxtral", "language": None, "prompt": None, "delay": "low"},
        "turn_detection": None,
    }
    assert session["input_audio_format"] == "pcm16"


def test_a_commit_flushes_and_the_session_goes_on(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16)
        client.append(pcm16(tone(1, 2)))
        client.send("input_audio_buffer.commit")
        first = client.until(COMPLETED)
        client.append(pcm16(tone(3)))
        client.send("input_audio_buffer.commit")
        second = client.until(COMPLETED)
    assert (text_of(first), text_of(second)) == ("w1 w2", "w3")
    types = [event["type"] for event in first]
    assert types == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        DELTA,
        DELTA,
        COMPLETED,
    ]
    assert first[0]["previous_item_id"] is None
    assert second[0]["previous_item_id"] == first[0]["item_id"]
    item = first[2]["item"]
    assert item == {
        "id": first[0]["item_id"],
        "object": "realtime.item",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_audio", "transcript": None}],
    }
    assert {event["content_index"] for event in first[3:]} == {0}
    assert first[-1]["usage"] == {
        "type": "tokens",
        "input_tokens": 39,
        "output_tokens": 12,
        "total_tokens": 51,
        "input_token_details": {"audio_tokens": 39, "text_tokens": 0},
    }
    ids = [event["event_id"] for event in first + second]
    assert len(set(ids)) == len(ids)


def test_deltas_come_while_audio_is_appended_and_their_item_is_known(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16)
        client.append(pcm16(tone(1, *[0] * 10)))
        added, delta = client.until(DELTA)
        client.send("input_audio_buffer.commit")
        committed = client.receive()
        completed = client.next(COMPLETED)
    assert added["type"] == "conversation.item.added"
    assert added["item"]["id"] == delta["item_id"] == committed["item_id"] == completed["item_id"]


def test_a_commit_without_audio_gives_an_empty_text_and_no_error(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client)
        client.append(b"")
        client.send("input_audio_buffer.commit")
        events = client.until(COMPLETED, "error")
    assert text_of(events) == ""
    assert events[0]["type"] == "input_audio_buffer.committed"


def test_an_append_of_nothing_is_no_error_and_its_text_is_empty(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16)
        for _ in range(2):
            client.append(b"")
            client.websocket.send(b"")
            client.send("input_audio_buffer.commit")
            events = client.until(COMPLETED, "error")
            assert text_of(events) == ""
        client.append(pcm16(tone(2)))
        client.append(b"")
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED)) == "w2"


@pytest.mark.parametrize("end_ms", [1, 20, 40, 79, 80])
def test_the_last_word_is_kept_wherever_the_audio_is_cut(server: LiveServer, end_ms: int) -> None:
    """The first word starts with the audio; so much of the last one, or of silence, ends it."""
    with server.socket(INTENT) as client:
        update(client, format=PCM_16)
        for last in (tone(3), tone(0)):
            client.append(pcm16(np.concatenate((tone(1, 2), last[: end_ms * 16]))))
            client.send("input_audio_buffer.commit")
            expected = "w1 w2 w3" if last.any() else "w1 w2"
            assert text_of(client.until(COMPLETED)) == expected


def test_clear_forgets_the_audio(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16)
        client.append(pcm16(tone(1)))
        client.send("input_audio_buffer.clear")
        assert client.receive()["type"] == "input_audio_buffer.cleared"
        client.append(pcm16(tone(2)))
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED)) == "w2"
        num_discarded = server.engine.num_discarded
        client.send("input_audio_buffer.clear")
        assert client.receive()["type"] == "input_audio_buffer.cleared"
    assert server.engine.num_discarded == num_discarded == 1


def resampled(levels: list[int], rate_hz: int) -> np.ndarray:
    """Audio whose levels last a second each, so that the edges of a resampler don't matter."""
    clip = tone(*levels, num_tokens=12)
    return soxr.resample(clip, AUDIO.sampling_rate_hz, rate_hz).astype(np.float32)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 24000, 48000])
def test_every_rate_gives_the_same_text(server: LiveServer, rate_hz: int) -> None:
    clip = pcm16(resampled([3, 9, 20], rate_hz))
    with server.socket(INTENT) as client:
        updated = update(client, format={"type": "audio/pcm", "rate": rate_hz})
        assert updated["session"]["audio"]["input"]["format"]["rate"] == rate_hz
        for start in range(0, len(clip), 4801):
            client.append(clip[start : start + 4801])
        client.send("input_audio_buffer.commit")
        completed = client.next(COMPLETED)
    heard = [word for word in completed["transcript"].split() if word in ("w3", "w9", "w20")]
    assert list(dict.fromkeys(heard)) == ["w3", "w9", "w20"]


def test_the_result_does_not_depend_on_how_resampled_audio_was_cut(server: LiveServer) -> None:
    clip = pcm16(resampled([3, 9, 20], 24_000))
    texts = []
    for num_bytes in (len(clip), 4800, 333):
        with server.socket(INTENT) as client:
            for start in range(0, len(clip), num_bytes):
                client.append(clip[start : start + num_bytes])
            client.send("input_audio_buffer.commit")
            completed = client.next(COMPLETED)
            texts.append((completed["transcript"], completed["usage"]))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("type_", ["audio/pcmu", "audio/pcma"])
def test_g711(server: LiveServer, type_: str) -> None:
    from voxlite.server.protocol.openai_ga import _ENCODINGS
    from voxlite.server.session.audio_decoder import _G711_TABLES

    table = _G711_TABLES[_ENCODINGS[type_]]
    clip = resampled([4, 12], 8000)
    encoded = np.abs(table[None] - clip[:, None]).argmin(axis=1).astype(np.uint8).tobytes()
    with server.socket(INTENT) as client:
        updated = update(client, format={"type": type_})
        assert updated["session"]["audio"]["input"]["format"] == {"type": type_}
        client.append(encoded)
        client.send("input_audio_buffer.commit")
        words = client.next(COMPLETED)["transcript"].split()
    assert words[0] == "w4" and "w12" in words


@pytest.mark.parametrize(
    ("delay", "delay_ms"), [("minimal", 240), ("medium", 960), ("xhigh", 2400), (560, 560)]
)
def test_the_delay_is_echoed_and_has_its_effect(
    server: LiveServer, delay: str | int, delay_ms: int
) -> None:
    with server.socket(INTENT) as client:
        updated = update(client, format=PCM_16, transcription={"model": "voxtral", "delay": delay})
        assert updated["session"]["audio"]["input"]["transcription"]["delay"] == delay
        client.append(pcm16(tone(1)))
        client.send("input_audio_buffer.commit")
        client.next(COMPLETED)
    assert server.engine.delays_ms[-1] == delay_ms


def test_logprobs_and_words_come_on_request(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        client.send(
            "session.update",
            session={
                "type": "transcription",
                "include": [f"item.input_audio_transcription.{x}" for x in ("logprobs", "words")],
                "audio": {"input": {"format": PCM_16}},
            },
        )
        client.append(pcm16(tone(0, 5)))
        client.send("input_audio_buffer.commit")
        *_, delta, completed = client.until(COMPLETED)
    logprobs = [{"token": " w5", "logprob": -0.25, "bytes": list(b" w5")}]
    words = [{"word": "w5", "start": 0.08, "end": 0.16}]
    assert (delta["logprobs"], delta["words"]) == (logprobs, words)
    assert (completed["logprobs"], completed["words"]) == (logprobs, words)


REFUSED_UPDATES: list[tuple[dict, str]] = [
    ({"format": {"type": "audio/pcm", "rate": 12345}}, "session.audio.input.format.rate"),
    ({"format": {"type": "audio/opus"}}, "session.audio.input.format.type"),
    ({"transcription": {"model": "gpt-4o"}}, "session.audio.input.transcription.model"),
    ({"transcription": {"delay": "huge"}}, "session.audio.input.transcription.delay"),
    ({"transcription": {"delay": 500}}, "session.audio.input.transcription.delay"),
    ({"turn_detection": {"type": "x"}}, "session.audio.input.turn_detection.type"),
    (
        {"turn_detection": {"type": "server_vad", "threshold": 2}},
        "session.audio.input.turn_detection.threshold",
    ),
    ({"turn_detection": "server_vad"}, "session.audio.input.turn_detection"),
]


@pytest.mark.parametrize(("audio_input", "param"), REFUSED_UPDATES)
def test_an_update_that_is_refused_changes_nothing(
    server: LiveServer, audio_input: dict, param: str
) -> None:
    good = {"transcription": {"model": "other", "delay": "high"}, "format": PCM_16}
    with server.socket(INTENT) as client:
        before = update(client, **good)["session"]
        client.send(
            "session.update",
            event_id="mine",
            session={
                "type": "transcription",
                "include": ["item.input_audio_transcription.logprobs"],
                "audio": {"input": audio_input},
            },
        )
        error = client.next("error")["error"]
        client.send("session.update", session={"type": "transcription"})
        after = client.next("session.updated")["session"]
    assert error["type"] == "invalid_request_error"
    assert error["event_id"] == "mine"
    assert error["param"] == param
    assert after == before


def test_one_field_changes_only_that_field(server: LiveServer) -> None:
    vad = {"type": "server_vad", "threshold": 0.7, "silence_duration_ms": 350}
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad, transcription={"delay": "high"})
        updated = update(client, turn_detection={"prefix_padding_ms": 600})["session"]
    assert updated["audio"]["input"]["turn_detection"] == {
        **vad,
        "prefix_padding_ms": 600,
        "idle_timeout_ms": None,
    }
    assert updated["audio"]["input"]["format"] == PCM_16
    assert updated["audio"]["input"]["transcription"]["delay"] == "high"


def test_what_can_have_no_effect_is_echoed_as_null(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        echoed = update(
            client,
            noise_reduction={"type": "near_field"},
            transcription={"model": "voxtral", "language": "en", "prompt": "x", "keywords": ["y"]},
            something_new=1,
        )["session"]["audio"]["input"]
    assert echoed["noise_reduction"] is None
    assert echoed["transcription"]["language"] is None
    assert echoed["transcription"]["prompt"] is None


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "response.create"}, "unknown_event"),
        ({"type": "conversation.item.create"}, "unknown_event"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "invalid_value"),
        ({"type": "session.update", "session": 3}, "invalid_value"),
        ({"type": "session.update"}, "missing_required_parameter"),
        ({"type": "input_audio_buffer.append"}, "missing_required_parameter"),
        ({"type": "input_audio_buffer.append", "audio": "%"}, "invalid_audio"),
        ({"type": 3}, "invalid_event"),
    ],
)
def test_a_bad_message_gets_an_error_and_the_session_goes_on(
    server: LiveServer, message: dict, code: str
) -> None:
    with server.socket(INTENT) as client:
        client.next("session.created")
        client.send(**{"type_": message.pop("type"), **message})
        error = client.receive()
        assert error["type"] == "error" and error["error"]["code"] == code
        assert set(error["error"]) == {"type", "code", "message", "param", "event_id"}
        assert update(client)["type"] == "session.updated"


def test_an_unknown_model_in_the_url_is_refused_in_words(server: LiveServer) -> None:
    with server.socket("/v1/realtime?model=gpt-realtime") as client:
        error = client.receive()["error"]
        assert error["code"] == "model_not_found" and "voxtral" in error["message"]
        with pytest.raises(Exception, match="1008"):
            client.receive()


def test_a_step_that_fails_ends_its_session_alone() -> None:
    with serve(FakeEngine()) as live, live.socket(INTENT) as neighbour:
        update(neighbour, format=PCM_16)
        neighbour.append(pcm16(tone(1)))
        with live.socket(INTENT) as client:
            update(client, format=PCM_16)
            client.append(pcm16(tone(2, FAILING_LEVEL)))
            client.send("input_audio_buffer.commit")
            events = client.until("error")
            assert events[-2]["type"] == f"{TRANSCRIPTION}.failed"
            assert events[-2]["error"]["type"] == "server_error"
            assert events[-1]["error"]["code"] == "engine_failure"
            with pytest.raises(Exception, match="1011"):
                client.receive()
        neighbour.send("input_audio_buffer.commit")
        assert text_of(neighbour.until(COMPLETED)) == "w1"


def test_beta_shapes(server: LiveServer) -> None:
    headers = {"OpenAI-Beta": "realtime=v1", "Authorization": "Bearer any"}
    with server.socket(INTENT, additional_headers=headers) as client:
        client.send(
            "transcription_session.update",
            session={
                "input_audio_format": "pcm16",
                "input_audio_transcription": {"model": "voxtral", "language": "en"},
                "turn_detection": None,
            },
        )
        updated = client.next("transcription_session.updated")["session"]
        assert updated["input_audio_transcription"]["model"] == "voxtral"
        assert updated["turn_detection"] is None
        client.append(pcm16(resampled([7], 24_000)))
        client.send("input_audio_buffer.commit")
        types = [event["type"] for event in client.until(COMPLETED)]
    assert "conversation.item.created" in types
    assert "conversation.item.done" not in types


def test_a_flat_session_update_is_beta(server: LiveServer) -> None:
    with server.socket() as client:
        client.send("session.update", session={"input_audio_format": "g711_ulaw"})
        updated = client.next("session.updated")["session"]
    assert updated["input_audio_format"] == "g711_ulaw"


def test_a_bare_url_and_an_openai_update_is_openai(server: LiveServer) -> None:
    with server.socket() as client:
        session = update(client)["session"]
    assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
