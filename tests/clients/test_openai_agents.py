"""Speech to text of `openai-agents`: streamed, with its default turn detection."""

import asyncio

import numpy as np
import pytest

from tests.clients.conftest import KEY, LONGEST_TEST_S, MODEL, RATE_HZ, SILENCE_S, Speech

voice = pytest.importorskip("agents.voice", reason="needs the extra `clients`")
openai = pytest.importorskip("openai", reason="needs the extra `clients`")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CHUNK_SAMPLES = RATE_HZ // 20


def test_streamed_audio_is_transcribed_turn_by_turn(base_url: str, speech: Speech) -> None:
    async def session() -> list[str]:
        client = openai.AsyncOpenAI(api_key=KEY, base_url=base_url)
        audio = voice.StreamedAudioInput()
        transcription = await voice.OpenAISTTModel(MODEL, client).create_session(
            audio, voice.STTModelSettings(), False, False
        )
        samples = np.frombuffer(speech.pcm_with_silence, np.int16)
        for start in range(0, len(samples), CHUNK_SAMPLES):
            await audio.add_audio(samples[start : start + CHUNK_SAMPLES])
        await audio.add_audio(None)
        async with asyncio.timeout(LONGEST_TEST_S):
            turns = [turn async for turn in transcription.transcribe_turns()]
        await transcription.close()
        return turns

    assert SILENCE_S > 0.5
    speech.assert_turns(asyncio.run(session()))
