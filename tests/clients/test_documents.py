"""The examples of other projects' clients in the documents, run as they stand there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.clients.conftest import KEY, LONGEST_TEST_S, Speech
from tests.documents import ROOT, Block, in_language
from tests.server.harness import LiveServer
from tests.word_lists import words

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CLIENTS = ("openai", "agents", "pipecat", "livekit", "mistralai")
# What follows an example that only makes something.
USES = {
    "mistralai": """
import asyncio, wave

async def chunks():
    with wave.open({sample!r}) as file:
        while chunk := file.readframes(3200):
            yield chunk

asyncio.run(transcribe(chunks()))
"""
}


@pytest.mark.parametrize(
    ("client", "block"),
    [
        pytest.param(client, block, id=f"{client} {block.where}")
        for client in CLIENTS
        for block in in_language("python", client)
    ],
)
def test_an_example_of_a_client_runs(
    client: str, block: Block, live: LiveServer, speech: Speech
) -> None:
    pytest.importorskip(client, reason="needs the extra `clients`")
    sample = str(speech.path)
    code = block.with_values(
        address=f"127.0.0.1:{live.port}", sample=sample, key=repr(KEY)
    ) + USES.get(client, "").format(sample=sample)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LONGEST_TEST_S,
        cwd=ROOT,
        env={**os.environ, "no_proxy": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    if "print(" in block.text and client == "openai":
        assert words(done.stdout) == words(speech.text)
