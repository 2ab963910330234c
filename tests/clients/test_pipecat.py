"""Pipecat's realtime service in a pipeline: turns ended by its side, and by the server."""

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL, RATE_HZ, Speech

stt = pytest.importorskip("pipecat.services.openai.stt", reason="needs the extra `clients`")
frames = pytest.importorskip("pipecat.frames.frames", reason="needs the extra `clients`")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CHUNK_BYTES = 2 * RATE_HZ // 50
CONNECT_S = 1.0
WAIT_S = 8.0


def run_pipeline(realtime_url: str, pcm: bytes, turn_detection: Any, *after: Any) -> list[Any]:
    """Send audio through a pipeline of the service alone; return the frames that leave it."""
    from pipecat.pipeline.worker import PipelineParams
    from pipecat.tests.utils import SleepFrame, run_test

    async def run() -> list[Any]:
        service = stt.OpenAIRealtimeSTTService(
            api_key=KEY,
            base_url=realtime_url,
            turn_detection=turn_detection,
            settings=stt.OpenAIRealtimeSTTService.Settings(model=MODEL),
        )
        audio = [
            frames.InputAudioRawFrame(pcm[start : start + CHUNK_BYTES], RATE_HZ, 1)
            for start in range(0, len(pcm), CHUNK_BYTES)
        ]
        down, up = await run_test(
            service,
            frames_to_send=[SleepFrame(CONNECT_S), *audio, *after, SleepFrame(WAIT_S)],
            pipeline_params=PipelineParams(audio_in_sample_rate=RATE_HZ),
            start_timeout=20.0,
        )
        assert [frame for frame in up if isinstance(frame, frames.ErrorFrame)] == []
        return list(down)

    return asyncio.run(run())


def texts(down: list[Any], kind: type) -> list[str]:
    return [frame.text for frame in down if type(frame) is kind]


def test_a_turn_ended_by_the_pipeline_is_transcribed(realtime_url: str, speech: Speech) -> None:
    down = run_pipeline(realtime_url, speech.pcm, False, frames.VADUserStoppedSpeakingFrame())
    assert texts(down, frames.TranscriptionFrame) == [speech.text_24_khz]
    assert texts(down, frames.InterimTranscriptionFrame)


def test_turns_ended_by_the_server_are_transcribed(realtime_url: str, speech: Speech) -> None:
    down = run_pipeline(realtime_url, speech.pcm_with_silence, {"type": "server_vad"})
    speech.assert_turns(texts(down, frames.TranscriptionFrame))
