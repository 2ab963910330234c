"""The realtime part of the `mistralai` package, on Mistral's own protocol."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL, Speech
from tests.server.harness import LiveServer

client = pytest.importorskip("mistralai.client", reason="needs the extra `clients`")
realtime = pytest.importorskip("mistralai.extra.realtime", reason="needs the extra `clients`")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CHUNK_BYTES = 4096


async def chunks(pcm: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(pcm), CHUNK_BYTES):
        yield pcm[start : start + CHUNK_BYTES]


def transcribe(live: LiveServer, pcm: bytes, rate_hz: int, **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        mistral = client.Mistral(api_key=KEY, server_url=live.url)
        stream = mistral.audio.realtime.transcribe_stream(
            audio_stream=chunks(pcm),
            model=MODEL,
            audio_format=client.models.AudioFormat(encoding="pcm_s16le", sample_rate=rate_hz),
            **options,
        )
        return [event async for event in stream]

    return asyncio.run(run())


def test_a_stream_is_transcribed(live: LiveServer, speech: Speech) -> None:
    events = transcribe(live, speech.pcm_16_khz, 16_000)
    done = events[-1]
    assert done.type == "transcription.done"
    assert done.text.strip() == speech.text
    deltas = [event.text for event in events if event.type == "transcription.text.delta"]
    assert "".join(deltas) == done.text
    assert not any(isinstance(event, realtime.UnknownRealtimeEvent) for event in events)


def test_a_delay_is_reported_back(live: LiveServer, speech: Speech) -> None:
    events = transcribe(live, speech.pcm_16_khz, 16_000, target_streaming_delay_ms=960)
    [updated] = [event for event in events if event.type == "session.updated"]
    assert updated.session.target_streaming_delay_ms == 960
    assert events[-1].type == "transcription.done"
