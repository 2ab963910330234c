"""LiveKit's OpenAI plugin, as an agent uses it: a stream of audio frames with server-side turns."""

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import KEY, LONGEST_TEST_S, MODEL, RATE_HZ, Speech

rtc = pytest.importorskip("livekit.rtc", reason="needs the extra `clients`")
agents = pytest.importorskip("livekit.agents", reason="needs the extra `clients`")
plugin = pytest.importorskip("livekit.plugins.openai", reason="needs the extra `clients`")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CHUNK_SAMPLES = RATE_HZ // 20
QUIET_S = 5.0


def test_a_stream_gives_interim_and_final_transcripts(base_url: str, speech: Speech) -> None:
    kinds = agents.stt.SpeechEventType

    async def run() -> list[Any]:
        async with agents.utils.http_context.open():
            stt = plugin.STT(use_realtime=True, base_url=base_url, api_key=KEY, model=MODEL)
            stream = stt.stream()
            pcm = speech.pcm_with_silence
            for start in range(0, len(pcm), 2 * CHUNK_SAMPLES):
                chunk = pcm[start : start + 2 * CHUNK_SAMPLES]
                stream.push_frame(rtc.AudioFrame(chunk, RATE_HZ, 1, len(chunk) // 2))
            events = []
            try:
                while True:
                    timeout_s = QUIET_S if events else LONGEST_TEST_S
                    events.append(await asyncio.wait_for(anext(stream), timeout_s))
            except (TimeoutError, StopAsyncIteration):
                pass
            await stream.aclose()
            await stt.aclose()
            return events

    events = asyncio.run(run())
    finals = [e.alternatives[0].text for e in events if e.type == kinds.FINAL_TRANSCRIPT]
    speech.assert_turns([text for text in finals if text] or finals)
    assert kinds.START_OF_SPEECH in {event.type for event in events}
