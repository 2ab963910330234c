"""Transcribe a file through `/v1/realtime` and print its text as it comes.

    python client/openai_realtime_client.py [--audio_path FILE] [--pace realtime]

The flags are those of vLLM's example, and some more. Without a file, the bundled sample is sent;
`-` reads raw PCM16, mono, 16 kHz from standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterable, Coroutine
from pathlib import Path
from typing import Any, Final

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from voxlite.client.audio_sources import (
    BYTES_PER_SECOND,
    AudioSourceError,
    cut,
    paced,
    read_file,
    read_stream,
    unpaced,
)
from voxlite.client.realtime_client import Delta, Done, RealtimeClient, RealtimeError

_SAMPLE: Final = Path(__file__).resolve().parent.parent / "models" / "demo" / "sample.wav"


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the server is and what is asked of it."""
    parser.add_argument("--model", default="", help="the model's name; default: the one served")
    parser.add_argument("--host", default="localhost", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--api-key", help="a key of the server's --api-key")
    parser.add_argument(
        "--delay-ms",
        type=int,
        help="how long the model listens on before it writes: 80 to 1200 in steps of 80, or 2400; "
        "default: the server's",
    )


def client_of(args: argparse.Namespace) -> RealtimeClient:
    """Return a client for the flags of `add_connection_flags`."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"ws://{host}:{args.port}/v1/realtime"
    return RealtimeClient(url, args.model, args.api_key, args.delay_ms)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Transcribe a file through /v1/realtime.")
    parser.add_argument(
        "--audio_path",
        "--audio-path",
        default=str(_SAMPLE),
        help="an audio file, or - for PCM16 on standard input; default: the bundled sample",
    )
    parser.add_argument(
        "--pace",
        choices=("realtime", "fast"),
        default="fast",
        help="send the file as it was spoken, or at once; default: %(default)s",
    )
    add_connection_flags(parser)
    return parser.parse_args()


def open_source(audio_path: str, pace: str) -> AsyncIterable[bytes]:
    """Return the audio's chunks and say what they are.

    Raises:
        AudioSourceError: the file can't be read.
    """
    if audio_path == "-":
        print("Audio:   standard input", flush=True)
        return read_stream(sys.stdin.buffer)
    pcm = read_file(Path(audio_path))
    chunks = cut(pcm)
    seconds = len(pcm) / BYTES_PER_SECOND
    print(f"Audio:   {audio_path}, {seconds:.1f} s\nChunks:  {len(chunks)}", flush=True)
    return paced(chunks) if pace == "realtime" else unpaced(chunks)


async def print_transcription(client: RealtimeClient, chunks: AsyncIterable[bytes]) -> None:
    """Send audio, print its text as it comes, then all of it and what it took."""
    print("Live:   ", end="", flush=True)
    async for event in client.transcribe(chunks):
        match event:
            case Delta(text):
                print(text, end="", flush=True)
            case Done(text, usage):
                print(f"\nFinal:  {text}")
                print(
                    f"Usage:   {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} "
                    f"completion tokens, {usage.total_tokens} in all"
                )


async def run(args: argparse.Namespace) -> None:
    """Transcribe what the command line names."""
    async with client_of(args) as client:
        print(f"Session: {client.session_id}")
        await print_transcription(client, open_source(args.audio_path, args.pace))


def run_command(command: Coroutine[Any, Any, None]) -> None:
    """Run a command; what a user can mend is a sentence, not a traceback."""
    try:
        asyncio.run(command)
    except (RealtimeError, AudioSourceError) as err:
        sys.exit(f"\nerror: {err}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run_command(run(parse_arguments()))
