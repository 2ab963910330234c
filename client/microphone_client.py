"""Transcribe what the microphone hears, through `/v1/realtime`, until Ctrl-C.

    python client/microphone_client.py

Needs sounddevice: pip install sounddevice.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from voxlite.client.audio_sources import Microphone
from voxlite.client.openai_realtime_client import (
    add_connection_flags,
    client_of,
    print_transcription,
    run_command,
)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Transcribe the microphone until Ctrl-C.")
    parser.add_argument("--device", help="a name or number of `python -m sounddevice`")
    add_connection_flags(parser)
    return parser.parse_args()


async def run(args: argparse.Namespace) -> None:
    """Transcribe until the first Ctrl-C, which still brings the last words; a second one quits."""
    is_number = args.device is not None and args.device.isdigit()
    microphone = Microphone(int(args.device) if is_number else args.device)

    def stop(signal_number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        microphone.stop()

    async with client_of(args) as client:
        print(f"Session: {client.session_id}\nSpeak; Ctrl-C ends.", flush=True)
        signal.signal(signal.SIGINT, stop)
        await print_transcription(client, microphone.chunks())


if __name__ == "__main__":
    run_command(run(parse_arguments()))
