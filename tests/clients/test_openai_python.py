"""The `openai` package: realtime transcription sessions, and files over HTTP in every format."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import KEY, LONGEST_TEST_S, MODEL, RATE_HZ, Speech
from tests.word_lists import words

openai = pytest.importorskip("openai", reason="needs the extra `clients`")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CHUNK_BYTES = 4800
TRANSCRIPTION = "conversation.item.input_audio_transcription"


async def realtime(
    base_url: str, pcm: bytes, turn_detection: dict[str, Any] | None, num_turns: int | None
) -> list[Any]:
    """Send audio in a transcription session; return the events up to its last turn."""
    client = openai.AsyncOpenAI(api_key=KEY, base_url=base_url)
    events = []
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": RATE_HZ},
                        "transcription": {"model": MODEL, "language": "en"},
                        "turn_detection": turn_detection,
                    }
                },
            }
        )
        for start in range(0, len(pcm), CHUNK_BYTES):
            audio = base64.b64encode(pcm[start : start + CHUNK_BYTES]).decode()
            await connection.input_audio_buffer.append(audio=audio)
        if turn_detection is None:
            await connection.input_audio_buffer.commit()
        num_committed = num_completed = 0
        try:
            async with asyncio.timeout(LONGEST_TEST_S if num_turns else 15):
                async for event in connection:
                    events.append(event)
                    assert event.type not in ("error", f"{TRANSCRIPTION}.failed"), event
                    num_committed += event.type == "input_audio_buffer.committed"
                    num_completed += event.type == f"{TRANSCRIPTION}.completed"
                    if num_completed == num_turns:
                        break
        except TimeoutError:
            assert num_committed == num_completed > 0
    return events


def of_type(events: list[Any], suffix: str) -> list[Any]:
    return [event for event in events if event.type.endswith(suffix)]


def test_a_committed_turn_is_transcribed(base_url: str, speech: Speech) -> None:
    events = asyncio.run(realtime(base_url, speech.pcm, None, num_turns=1))
    assert [event.type for event in events[:2]] == ["session.created", "session.updated"]
    updated = events[1].session
    assert updated.type == "transcription"
    assert updated.audio.input.format.rate == RATE_HZ
    assert updated.audio.input.turn_detection is None
    [completed] = of_type(events, f"{TRANSCRIPTION}.completed")
    assert completed.transcript == speech.text_24_khz
    deltas = of_type(events, f"{TRANSCRIPTION}.delta")
    assert "".join(delta.delta for delta in deltas) == completed.transcript
    assert {delta.item_id for delta in deltas} == {completed.item_id}
    assert completed.usage.type == "tokens"
    assert completed.usage.total_tokens > completed.usage.output_tokens > 0


def test_the_servers_turn_detection_ends_turns(base_url: str, speech: Speech) -> None:
    vad = {"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 500}
    events = asyncio.run(realtime(base_url, speech.pcm_with_silence, vad, num_turns=None))
    speech.assert_turns([e.transcript for e in of_type(events, f"{TRANSCRIPTION}.completed")])
    started = of_type(events, "speech_started")
    stopped = of_type(events, "speech_stopped")
    committed = of_type(events, ".committed")
    assert [e.item_id for e in started] == [e.item_id for e in stopped]
    assert [e.item_id for e in started] == [e.item_id for e in committed]
    for start, stop in zip(started, stopped, strict=True):
        assert 0 <= start.audio_start_ms < stop.audio_end_ms


@pytest.fixture
def client(base_url: str) -> Any:
    with openai.OpenAI(api_key=KEY, base_url=base_url) as client:
        yield client


def letters(text: str) -> str:
    return "".join(words(text))


def transcribe(client: Any, path: Path, **options: Any) -> Any:
    with open(path, "rb") as file:
        return client.audio.transcriptions.create(model=MODEL, file=file, **options)


def test_json_and_text(client: Any, speech: Speech) -> None:
    answer = transcribe(client, speech.path)
    assert answer.text == speech.text
    assert transcribe(client, speech.path, response_format="json").text == speech.text
    plain = transcribe(client, speech.path, response_format="text")
    assert plain.strip() == speech.text


def test_verbose_json_has_words_and_segments(client: Any, speech: Speech) -> None:
    answer = transcribe(
        client,
        speech.path,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert answer.text == speech.text
    assert letters(" ".join(word.word for word in answer.words)) == letters(speech.text)
    ends_s = [word.end for word in answer.words]
    assert ends_s == sorted(ends_s) and ends_s[-1] <= float(answer.duration) + 0.5
    assert letters(" ".join(segment.text for segment in answer.segments)) == letters(speech.text)


@pytest.mark.parametrize(("name", "first"), [("srt", "1\n00:00:"), ("vtt", "WEBVTT\n")])
def test_subtitles(client: Any, speech: Speech, name: str, first: str) -> None:
    subtitles = transcribe(client, speech.path, response_format=name)
    assert subtitles.startswith(first)
    assert "-->" in subtitles


def test_a_stream_of_typed_events(client: Any, speech: Speech) -> None:
    events = list(transcribe(client, speech.path, stream=True))
    *deltas, done = events
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas).strip() == done.text.strip() == speech.text
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_log_probabilities(client: Any, speech: Speech) -> None:
    answer = transcribe(client, speech.path, include=["logprobs"])
    tokens = b"".join(bytes(map(int, entry.bytes)) for entry in answer.logprobs)
    assert tokens.decode(errors="ignore").strip() == speech.text
    assert all(entry.logprob <= 0 for entry in answer.logprobs)


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_clients_exceptions(client: Any, base_url: str, speech: Speech) -> None:
    with pytest.raises(openai.NotFoundError, match="nonesuch"):
        client.models.retrieve("nonesuch")
    with pytest.raises(openai.BadRequestError):
        client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"not audio"))
    with openai.OpenAI(api_key="wrong", base_url=base_url) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
