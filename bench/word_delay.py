"""Speak words whose ends are known to a running server; report when their text came.

    voxlite serve &
    python -m voxlite.bench.word_delay --sessions 2

In: a server's address and phrases, which Festival speaks and tells the word ends of. Out: two rows,
how long after its word's end a word's text was there, and how long after the commit a turn's last
text and its end came. Unlike in `load_test`, the ends aren't taken from what the model wrote.

Each phrase is a turn, sent at the pace it was spoken, committed with its last word's last sample. A
word is there with the delta that brings its last letter. Turns whose text isn't what was spoken are
counted and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect

from voxlite.bench.deltas import Arrival, Percentiles, TimedWord, percentiles
from voxlite.bench.load_test import encode, read_wav, socket_url
from voxlite.client.audio_sources import BYTES_PER_SECOND

_BYTES_PER_MS: Final = BYTES_PER_SECOND // 1000
_CHUNK_MS: Final = 80.0
_VOICE: Final = "kal_diphone"
# Words that the bundled model knows.
_PHRASES: Final = (
    "can i get a double shot latte with almond milk",
    "four two seven nine",
    "i would like a large cappuccino please",
    "one six three eight five",
    "two small coffees with oat milk",
    "nine zero four one",
)


@dataclass(frozen=True, slots=True)
class SpokenPhrase:
    """A phrase's words with their ends, and its audio up to the last of these."""

    words: Sequence[TimedWord]
    pcm: bytes


@dataclass(slots=True)
class Figures:
    """What was measured, in ms."""

    word_ms: list[float] = field(default_factory=list)
    last_text_ms: list[float] = field(default_factory=list)
    done_ms: list[float] = field(default_factory=list)
    num_misheard: int = 0


def speak(phrase: str, folder: Path) -> SpokenPhrase:
    """Let Festival speak a phrase.

    Raises:
        OSError, CalledProcessError: Festival or its voice is missing.
    """
    wav, script = folder / "phrase.wav", folder / "phrase.scm"
    script.write_text(
        f"(voice_{_VOICE})\n"
        f'(set! utt (utt.synth (Utterance Text "{phrase}")))\n'
        f'(utt.save.wave utt "{wav}" \'riff)\n'
        "(mapcar (lambda (word)\n"
        '  (format t "%s %f\\n" (item.name word) (item.feat word "word_end")))\n'
        "  (utt.relation.items utt 'Word))\n"
    )
    spoken = subprocess.run(
        ["festival", "--batch", str(script)], check=True, capture_output=True, text=True
    )
    words = [
        TimedWord(name, 1000 * float(end_s))
        for name, end_s in (line.split() for line in spoken.stdout.splitlines())
    ]
    return SpokenPhrase(words, read_wav(wav)[: round(words[-1].end_ms) * _BYTES_PER_MS])


def arrived_ms(arrivals: Sequence[Arrival], words: Sequence[TimedWord]) -> list[float] | None:
    """Return when each word's last letter had come; None if other words came.

    words "four" "two", deltas " fo" at 500, "ur t" at 580, "wo" at 660: 580 and 660.
    """
    if "".join(arrival.text for arrival in arrivals).split() != [word.text for word in words]:
        return None
    times_ms: list[float] = []
    letters_due = 0
    letters_there = 0
    following = iter(arrivals)
    at_ms = 0.0
    for word in words:
        letters_due += len(word.text)
        while letters_there < letters_due:
            arrival = next(following)
            letters_there += len("".join(arrival.text.split()))
            at_ms = arrival.at_ms
        times_ms.append(at_ms)
    return times_ms


async def run_session(url: str, delay_ms: int, phrases: Sequence[SpokenPhrase]) -> Figures:
    """Speak all phrases in one session, each as a turn of its own."""
    figures = Figures()
    async with connect(url, compression=None, proxy=None) as socket:
        update = {"type": "session.update", "model": "", "transcription_delay_ms": delay_ms}
        await socket.send(json.dumps(update))
        for phrase in phrases:
            began_s = time.perf_counter()
            sender = asyncio.create_task(_send(socket, phrase.pcm, began_s))
            arrivals, done_ms = await _receive(socket, began_s)
            await sender
            committed_ms = len(phrase.pcm) / _BYTES_PER_MS
            times_ms = arrived_ms(arrivals, phrase.words)
            if times_ms is None:
                figures.num_misheard += 1
                continue
            figures.word_ms += [
                at_ms - word.end_ms for at_ms, word in zip(times_ms, phrase.words, strict=True)
            ]
            figures.last_text_ms.append(times_ms[-1] - committed_ms)
            figures.done_ms.append(done_ms - committed_ms)
    return figures


async def _send(socket: ClientConnection, pcm: bytes, began_s: float) -> None:
    total_ms = len(pcm) / _BYTES_PER_MS
    for number, message in enumerate(encode(pcm, _CHUNK_MS, is_binary=False), 1):
        due_s = began_s + min(number * _CHUNK_MS, total_ms) / 1000
        await asyncio.sleep(due_s - time.perf_counter())
        await socket.send(message)
    await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))


async def _receive(socket: ClientConnection, began_s: float) -> tuple[list[Arrival], float]:
    arrivals: list[Arrival] = []
    while True:
        event = json.loads(await socket.recv())
        at_ms = 1000 * (time.perf_counter() - began_s)
        match event["type"]:
            case "transcription.delta":
                arrivals.append(Arrival(event["delta"], at_ms))
            case "transcription.done":
                return arrivals, at_ms
            case "error":
                sys.exit(f"the server says: {event['error']}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m voxlite.bench.word_delay",
        description="Speak words with known ends to a running server; report when they come.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--delay-ms", type=int, default=480)
    parser.add_argument("phrases", nargs="*", default=_PHRASES, help="words that the model knows")
    return parser.parse_args(arguments)


async def _run_all(args: argparse.Namespace, phrases: Sequence[SpokenPhrase]) -> Figures:
    runs = [run_session(socket_url(args.url), args.delay_ms, phrases) for _ in range(args.sessions)]
    total = Figures()
    for figures in await asyncio.gather(*runs):
        total.word_ms += figures.word_ms
        total.last_text_ms += figures.last_text_ms
        total.done_ms += figures.done_ms
        total.num_misheard += figures.num_misheard
    return total


def main() -> None:
    """Run the command."""
    args = parse_arguments()
    with TemporaryDirectory() as folder:
        phrases = [speak(phrase, Path(folder)) for phrase in args.phrases]
    figures = asyncio.run(_run_all(args, phrases))
    table = Table(title=f"{args.sessions} sessions, {len(phrases)} turns each, {args.delay_ms} ms")
    for column in ("ms", "p50", "p95", "p99", "most"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows: dict[str, Percentiles | None] = {
        f"word there after its end ({len(figures.word_ms)} words)": percentiles(figures.word_ms),
        "last word there after the commit": percentiles(figures.last_text_ms),
        "turn done after the commit": percentiles(figures.done_ms),
    }
    for name, values in rows.items():
        if values is not None:
            table.add_row(name, *(f"{value:.0f}" for value in values))
    console = Console()
    console.print(table)
    console.print(f"{figures.num_misheard} turns were heard differently and left out")


if __name__ == "__main__":
    main()
