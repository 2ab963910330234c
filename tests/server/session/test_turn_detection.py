"""Turns from speech probabilities, and at the socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.server.fake_engine import FakeEngine, pcm16, tone
from tests.server.harness import LiveServer, serve
from tests.server.realtime.test_socket_openai import COMPLETED, INTENT, PCM_16, text_of, update
from voxlite.server.session.session_config import Eagerness, SemanticVad, ServerVad
from voxlite.server.session.turn_detection import Started, Stopped, TimedOut, TurnDetector
from voxlite.server.session.voice_activity import WINDOW_SAMPLES, SileroModel

WINDOW_MS = 32


def events_of(detector: TurnDetector, probabilities: list[float], padding_ms: int = 0) -> list:
    events = (detector.push(probability, padding_ms) for probability in probabilities)
    return [event for event in events if event is not None]


def test_a_turn_starts_before_its_speech_and_ends_after_its_silence() -> None:
    detector = TurnDetector(ServerVad(prefix_padding_ms=64, silence_duration_ms=96), 0)
    events = events_of(detector, [0.1] * 5 + [0.9] * 3 + [0.1] * 5)
    assert events == [Started(3 * WINDOW_SAMPLES), Stopped(11 * WINDOW_SAMPLES)]


def test_a_short_pause_does_not_end_a_turn() -> None:
    detector = TurnDetector(ServerVad(silence_duration_ms=96), 0)
    assert len(events_of(detector, [0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 0.9])) == 1


def test_a_probability_just_under_the_threshold_keeps_a_turn_open_but_starts_none() -> None:
    detector = TurnDetector(ServerVad(silence_duration_ms=64), 0)
    assert events_of(detector, [0.4] * 10) == []
    assert len(events_of(detector, [0.6] + [0.4] * 10)) == 1


def test_the_threshold_is_the_clients() -> None:
    assert events_of(TurnDetector(ServerVad(threshold=0.95), 0), [0.9] * 9) == []
    assert len(events_of(TurnDetector(ServerVad(threshold=0.2), 0), [0.3] * 9)) == 1


def test_padding_before_speech_never_reaches_into_the_last_turn() -> None:
    detector = TurnDetector(ServerVad(prefix_padding_ms=10_000, silence_duration_ms=32), 0)
    events = events_of(detector, [0.9, 0.1, 0.9])
    assert events == [Started(0), Stopped(2 * WINDOW_SAMPLES), Started(2 * WINDOW_SAMPLES)]


def test_nobody_speaking_times_out_again_and_again() -> None:
    detector = TurnDetector(ServerVad(idle_timeout_ms=320), 0)
    ten = 10 * WINDOW_SAMPLES
    assert events_of(detector, [0.1] * 20) == [TimedOut(0, ten), TimedOut(ten, 2 * ten)]


@pytest.mark.parametrize(
    ("eagerness", "max_s"), [("low", 8), ("medium", 4), ("auto", 4), ("high", 2)]
)
def test_semantic_turns_wait_as_long_as_the_eagerness_says(eagerness: str, max_s: int) -> None:
    detector = TurnDetector(SemanticVad(eagerness=Eagerness(eagerness)), 0)
    detector.push(0.9, 0)
    (stopped,) = events_of(detector, [0.1] * 300)
    assert stopped.position == pytest.approx(max_s * 16_000, abs=2 * WINDOW_SAMPLES)


def test_semantic_turns_end_early_once_the_model_only_pads() -> None:
    for padding_ms, expected_ms in ((900, 4000), (960, 500)):
        detector = TurnDetector(SemanticVad(), 0)
        detector.push(0.9, 0)
        (stopped,) = events_of(detector, [0.1] * 300, padding_ms)
        assert stopped.position / 16 == pytest.approx(expected_ms, abs=3 * WINDOW_MS)


def test_silero_hears_no_speech_in_noise_and_silence_whatever_the_cuts() -> None:
    noise = (np.random.default_rng(0).standard_normal(16_000) * 0.01).astype(np.float32)
    model = SileroModel()
    whole, cut = model.new_stream(), model.new_stream()
    probabilities = whole.push(noise)
    assert len(probabilities) == 16_000 // WINDOW_SAMPLES
    assert max(probabilities) < 0.3
    pieces = [p for start in range(0, 16_000, 777) for p in cut.push(noise[start : start + 777])]
    assert pieces == pytest.approx(probabilities, abs=1e-5)


def silence_and(*levels: int) -> np.ndarray:
    """0.8 s of silence, levels of 0.24 s each, 0.8 s of silence."""
    return np.concatenate([tone(0, num_tokens=10), speech(*levels), tone(0, num_tokens=10)])


def speech(*levels: int) -> np.ndarray:
    """Long enough to be heard from wherever the engine's tokens begin."""
    return tone(*levels, num_tokens=3)


def vad(**fields: object) -> dict[str, object]:
    return {"type": "server_vad", **fields}


def test_turns_are_found_and_flushed_and_the_times_are_right(server: LiveServer) -> None:
    clip = pcm16(np.concatenate([silence_and(1, 2, 3), silence_and(4, 5)]))
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad(prefix_padding_ms=160))
        for start in range(0, len(clip), 1601):
            client.append(clip[start : start + 1601])
        events = client.until(COMPLETED) + client.until(COMPLETED)
    # A turn can start before the text of the one before it is whole.
    first_id, second_id = dict.fromkeys(e["item_id"] for e in events if "item_id" in e)
    first, second = ([e for e in events if e.get("item_id") == i] for i in (first_id, second_id))
    assert (text_of(first), text_of(second)) == ("w1 w2 w3", "w4 w5")
    types = [event["type"].removeprefix("input_audio_buffer.") for event in first]
    order = [types.index(each) for each in ("speech_started", "speech_stopped", "committed")]
    assert order == sorted(order)
    times = {e["type"]: e for e in first}
    start_ms = times["input_audio_buffer.speech_started"]["audio_start_ms"]
    end_ms = times["input_audio_buffer.speech_stopped"]["audio_end_ms"]
    assert start_ms == pytest.approx(800 - 160, abs=WINDOW_MS)
    assert end_ms == pytest.approx(800 + 3 * 240 + 500, abs=2 * WINDOW_MS)
    second_start = next(e for e in second if e["type"].endswith("speech_started"))
    assert second_start["audio_start_ms"] == pytest.approx(1600 + 720 + 800 - 160, abs=WINDOW_MS)


def test_word_times_are_on_the_clients_clock(server: LiveServer) -> None:
    """The engine hears neither the silence between turns nor that before the first."""
    clip = pcm16(np.concatenate([silence_and(1), silence_and(2), silence_and(3)]))
    with server.socket(INTENT) as client:
        client.send(
            "session.update",
            session={
                "type": "transcription",
                "include": ["item.input_audio_transcription.words"],
                "audio": {"input": {"format": PCM_16, "turn_detection": vad()}},
            },
        )
        client.append(clip)
        words = [client.next(COMPLETED)["words"][0] for _ in range(3)]
    starts_s = [word["start"] for word in words]
    assert starts_s == pytest.approx([0.8, 0.8 + 1.84, 0.8 + 2 * 1.84], abs=0.16)
    assert starts_s == sorted(starts_s)


def test_semantic_vad_is_what_openai_agents_sends(server: LiveServer) -> None:
    clip = pcm16(np.concatenate([silence_and(1, 2), tone(0, num_tokens=20)]))
    with server.socket(INTENT) as client:
        updated = update(client, format=PCM_16, turn_detection={"type": "semantic_vad"})
        assert updated["session"]["audio"]["input"]["turn_detection"]["eagerness"] == "auto"
        for start in range(0, len(clip), 2560):
            client.append(clip[start : start + 2560])
        assert text_of(client.until(COMPLETED)) == "w1 w2"


def test_a_client_that_stops_sending_has_ended_its_turn(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad(silence_duration_ms=0))
        client.append(pcm16(speech(0, 0, 1, 2)))
        assert text_of(client.until(COMPLETED)) == "w1 w2"


def test_a_commit_within_a_turn_ends_it_and_the_next_has_the_rest(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad())
        client.append(pcm16(speech(0, 0, 1, 2)))
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED)) == "w1 w2"
        client.append(pcm16(np.concatenate([speech(3, 4), tone(0, num_tokens=10)])))
        assert text_of(client.until(COMPLETED)) == "w3 w4"


def test_a_commit_without_speech_is_harmless(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad())
        client.append(pcm16(tone(0, 0, 0)))
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED, "error")) == ""


def test_clear_within_a_turn(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad())
        client.append(pcm16(speech(0, 1, 2)))
        client.send("input_audio_buffer.clear")
        client.next("input_audio_buffer.cleared")
        client.append(pcm16(silence_and(5)))
        assert text_of(client.until(COMPLETED)) == "w5"


def test_an_idle_timeout_gives_an_empty_turn(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad(idle_timeout_ms=1000))
        client.append(pcm16(tone(0, num_tokens=20)))
        events = client.until(COMPLETED)
    timed_out = events[0]
    assert timed_out["type"] == "input_audio_buffer.timeout_triggered"
    assert timed_out["audio_end_ms"] == pytest.approx(1000, abs=WINDOW_MS)
    assert text_of(events) == ""
    assert timed_out["item_id"] == events[-1]["item_id"]


def test_turn_detection_may_be_switched_on_and_off_within_an_utterance(server: LiveServer) -> None:
    with server.socket(INTENT) as client:
        update(client, format=PCM_16)
        client.append(pcm16(speech(1, 2)))
        update(client, turn_detection=vad())
        client.append(pcm16(np.concatenate([speech(3), tone(0, num_tokens=10)])))
        assert text_of(client.until(COMPLETED)) == "w1 w2 w3"
        client.append(pcm16(speech(0, 0, 4, 5)))
        update(client, turn_detection=None)
        client.append(pcm16(np.concatenate([speech(6), tone(0, num_tokens=20)])))
        client.send("input_audio_buffer.commit")
        assert text_of(client.until(COMPLETED)) == "w4 w5 w6"


def test_turns_are_found_again_after_audio_was_refused() -> None:
    engine = FakeEngine(max_buffered_s=1.0)
    with serve(engine, max_append_wait=0.05) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad())
        engine.running.clear()
        client.append(pcm16(tone(1, num_tokens=40)))
        assert client.next("error")["error"]["code"] == "buffer_full"
        engine.running.set()
        client.append(pcm16(silence_and()))
        client.next(COMPLETED)
        client.append(pcm16(silence_and(5, 6)))
        events = client.until(COMPLETED)
    assert text_of(events) == "w5 w6"
    assert [e for e in events if e["type"].endswith("speech_started")]


def test_silero_runs_behind_the_socket() -> None:
    with serve(FakeEngine(), voice_model=SileroModel()) as live, live.socket(INTENT) as client:
        update(client, format=PCM_16, turn_detection=vad(idle_timeout_ms=1000))
        client.append(pcm16(tone(0, num_tokens=20)))
        assert text_of(client.until(COMPLETED)) == ""


def test_the_voice_detector_reports_to_nobody(tmp_path: Path) -> None:
    """Its library would keep a number of the machine's, and a database of what it reports."""
    script = "from voxlite.server.session.voice_activity import SileroModel; SileroModel()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
