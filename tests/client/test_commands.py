"""The commands as a user runs them, against the application on a real port."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from tests.server.fake_engine import pcm16, tone
from tests.server.harness import TIMEOUT_S, serve

ROOT = Path(__file__).parent.parent.parent
AUDIO = tone(1, 2, 3, num_tokens=2)


def run(command: list[str], *flags: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *command, *flags],
        input=stdin,
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "utf-8"},
    )


@pytest.mark.parametrize(
    "command",
    [["client/openai_realtime_client.py"], ["-m", "voxlite.client.openai_realtime_client"]],
    ids=["script", "module"],
)
def test_a_file_is_transcribed(command: list[str], tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", AUDIO, 16_000)
    with serve() as live:
        done = run(command, "--port", str(live.port), "--audio_path", str(tmp_path / "a.wav"))
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("Session: sess-")
    assert lines[1:3] == [f"Audio:   {tmp_path / 'a.wav'}, 0.5 s", "Chunks:  4"]
    assert lines[3:5] == ["Live:    w1 w2 w3", "Final:   w1 w2 w3"]
    assert lines[5].startswith("Usage:   39 prompt tokens, ")


def test_flags_reach_the_server_and_the_pace_is_kept(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", AUDIO, 16_000)
    flags = ["--pace", "realtime", "--model", "voxtral", "--api-key", "k", "--delay-ms", "960"]
    with serve(api_key=("k",)) as live:
        done = run(
            ["client/openai_realtime_client.py", "--port", str(live.port), *flags],
            *("--audio_path", str(tmp_path / "a.wav")),
        )
    assert done.returncode == 0, done.stderr
    # 32 tokens of left padding, the first one, and a delay of 12.
    assert b"Usage:   45 prompt tokens" in done.stdout


def test_standard_input_is_transcribed() -> None:
    with serve() as live:
        done = run(
            ["client/openai_realtime_client.py", "--port", str(live.port), "--audio_path", "-"],
            stdin=pcm16(AUDIO),
        )
    assert b"Final:   w1 w2 w3" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", "wrong"], "the API key is not valid"),
        (["--api-key", "k", "--model", "nonesuch"], "`nonesuch` does not exist"),
        (["--api-key", "k", "--audio_path", "nonesuch.wav"], "nonesuch.wav"),
    ],
)
def test_what_a_user_can_mend_is_a_sentence(flags: list[str], message: str, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", AUDIO, 16_000)
    if "--audio_path" not in flags:
        flags = [*flags, "--audio_path", str(tmp_path / "a.wav")]
    with serve(api_key=("k",)) as live:
        done = run(["client/openai_realtime_client.py", "--port", str(live.port)], *flags)
    assert done.returncode == 1
    assert message in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_the_microphone_client_says_what_it_needs() -> None:
    done = run(["client/microphone_client.py", "--help"])
    assert done.returncode == 0
    assert b"--device" in done.stdout
