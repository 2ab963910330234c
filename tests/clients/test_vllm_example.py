"""The course of vLLM's example client, message for message, over a bare socket."""

import base64
import json

import pytest
from websockets.sync.client import connect

from tests.clients.conftest import KEY, LONGEST_TEST_S, MODEL, Speech

pytestmark = pytest.mark.clients

CHUNK_BYTES = 4096


def test_a_file_is_sent_unread_until_its_final_commit(realtime_url: str, speech: Speech) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with connect(realtime_url, additional_headers=headers, max_size=None, proxy=None) as socket:
        created = json.loads(socket.recv(LONGEST_TEST_S))
        assert created["type"] == "session.created" and created["id"]
        socket.send(json.dumps({"type": "session.update", "model": MODEL}))
        socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        for start in range(0, len(speech.pcm_16_khz), CHUNK_BYTES):
            audio = base64.b64encode(speech.pcm_16_khz[start : start + CHUNK_BYTES])
            message = {"type": "input_audio_buffer.append", "audio": audio.decode("utf-8")}
            socket.send(json.dumps(message))
        socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        deltas = []
        while True:
            event = json.loads(socket.recv(LONGEST_TEST_S))
            if event["type"] != "transcription.delta":
                break
            deltas.append(event["delta"])
    assert event["type"] == "transcription.done", event
    assert "".join(deltas) == event["text"]
    assert event["text"].strip() == speech.text
    usage = event["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
