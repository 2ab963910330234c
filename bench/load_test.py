"""Open N sessions on a running server, speak to them in real time, and report how late text comes.

    voxlite serve --max-num-seqs 64 &
    python -m voxlite.bench.load_test --sessions 64 --seconds 60

In: a server's address and a WAV file, which is looped with pauses. Out: a table, or JSON. Times are
by the schedule of the audio, not by when this process got round to sending it, so a machine that is
too busy to send shows as latency and not as nothing. What `latency` and `lag` are is said in
`deltas.py`. The text is first transcribed over HTTP, for the times of its words.

`--pace 0` sends everything at once and reports the time taken; that works with vLLM too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import sys
import time
import urllib.request
import uuid
import wave
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from voxlite.bench.deltas import (
    TOKEN_MS,
    Arrival,
    DeltaTiming,
    Percentiles,
    TimedWord,
    percentiles,
    start_ms,
    time_deltas,
)
from voxlite.client.audio_sources import BYTES_PER_SECOND, SAMPLE_RATE_HZ, cut

_BYTES_PER_MS: Final = BYTES_PER_SECOND // 1000
_SAMPLE: Final = Path(__file__).resolve().parent.parent / "models" / "demo" / "sample.wav"
# What a delta may take beyond its delay.
_ALLOWANCE_MS: Final = 200
_OPEN_TIMEOUT_S: Final = 60
_COMMIT: Final = json.dumps({"type": "input_audio_buffer.commit"})
_FINAL_COMMIT: Final = json.dumps({"type": "input_audio_buffer.commit", "final": True})


class ServerRefusal(Exception):
    """Report what the server answered instead of what was asked for."""


@dataclass(slots=True)
class SessionLog:
    """What happened in one session. Times are in ms from the beginning of its audio."""

    arrivals: list[Arrival] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] | None = None
    error: str | None = None
    send_lateness_ms: list[float] = field(default_factory=list)
    finished_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: the audio and how it is sent. `pace` 0 is as fast as the server takes it."""

    url: str
    model: str
    headers: dict[str, str]
    messages: Sequence[str | bytes]
    total_ms: float
    chunk_ms: float
    delay_ms: int | None
    ramp_ms: float
    pace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one run. A percentile is None where nothing was measured."""

    sessions: int
    audio_s: float
    wall_s: float
    deltas: int
    deltas_without_place: int
    texts_unlike_reference: int
    latency_ms: Percentiles | None
    lag_ms: Percentiles | None
    flush_ms: Percentiles | None
    first_delta_ms: float | None
    between_deltas_ms: float | None
    send_lateness_ms: Percentiles | None
    generator_cpu_percent: float
    errors: dict[str, int]
    usage: dict[str, Any] | None
    allowed_ms: int | None

    @property
    def times_real_time(self) -> float:
        """Wall time per time of audio, all sessions' audio taken together."""
        return self.wall_s / (self.audio_s * self.sessions)

    @property
    def is_within_limit(self) -> bool:
        """Whether every session ran and the 95th percentile of latency is as wished."""
        if self.errors or self.latency_ms is None or self.allowed_ms is None:
            return False
        return self.latency_ms.p95 <= self.allowed_ms


def looped(pcm: bytes, pause_ms: float, seconds: float) -> bytes:
    """Repeat audio, with a pause of silence after each time, up to a length; cut it there."""
    period = pcm + bytes(round(pause_ms) * _BYTES_PER_MS)
    num_bytes = round(seconds * 1000) * _BYTES_PER_MS
    return (period * (num_bytes // len(period) + 1))[:num_bytes]


def socket_url(address: str) -> str:
    """Return the address of the realtime socket of a server at `http(s)://HOST`."""
    return address.rstrip("/").replace("http", "ws", 1) + "/v1/realtime"


def read_wav(path: Path) -> bytes:
    """Return the samples of a WAV file, PCM16, mono, 16 kHz.

    Raises:
        ValueError: it is of another kind.
    """
    with wave.open(str(path)) as file:
        kind = (file.getframerate(), file.getnchannels(), file.getsampwidth())
        if kind != (SAMPLE_RATE_HZ, 1, 2):
            raise ValueError(f"{path}: {kind} instead of 16 kHz, one channel, 2 bytes a sample")
        samples: bytes = file.readframes(file.getnframes())
        return samples


def encode(pcm: bytes, chunk_ms: float, *, is_binary: bool) -> list[str | bytes]:
    """Write the messages that carry the audio, once for all sessions."""
    size = round(chunk_ms * _BYTES_PER_MS / 2) * 2
    chunks = cut(pcm, size)
    if is_binary:
        return list(chunks)
    return [
        json.dumps(
            {
                "type": "input_audio_buffer.append",
                "audio": base64.b64encode(chunk).decode(),
            }
        )
        for chunk in chunks
    ]


def reference_words(
    base_url: str, headers: dict[str, str], pcm: bytes, delay_ms: int
) -> list[TimedWord]:
    """Transcribe the audio over HTTP and return its words with their ends."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE_HZ)
        writer.writeframes(pcm)
    boundary = uuid.uuid4().hex
    fields = {
        "response_format": "verbose_json",
        "timestamp_granularities[]": "word",
        "transcription_delay_ms": str(delay_ms),
    }
    body = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    )
    body += (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    ).encode()
    body += file.getvalue() + f"\r\n--{boundary}--\r\n".encode()
    request = urllib.request.Request(
        f"{base_url}/v1/audio/transcriptions",
        data=body,
        headers={
            **headers,
            "Content-Type": f"multipart/form-data; boundary={boundary}",
        },
    )
    # A proxy of the environment has no business between two processes of one machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as response:
        words = json.load(response)["words"]
    return [TimedWord(word["word"], 1000 * word["end"]) for word in words]


async def open_session(plan: Plan) -> ClientConnection:
    """Connect, and name the model and the delay.

    Raises:
        ServerRefusal: the server says no.
    """
    socket = await connect(
        plan.url,
        additional_headers=plan.headers,
        max_size=None,
        compression=None,
        ping_interval=None,
        open_timeout=_OPEN_TIMEOUT_S,
        proxy=None,
    )
    delay = {} if plan.delay_ms is None else {"transcription_delay_ms": plan.delay_ms}
    await _expect(socket, "session.created")
    await socket.send(json.dumps({"type": "session.update", "model": plan.model, **delay}))
    if delay:
        await _expect(socket, "session.updated")
    # vLLM's cue to begin.
    await socket.send(_COMMIT)
    return socket


async def _expect(socket: ClientConnection, type_: str) -> None:
    event = json.loads(await asyncio.wait_for(socket.recv(), _OPEN_TIMEOUT_S))
    if event["type"] != type_:
        raise ServerRefusal(_error_text(event))


def _error_text(event: dict[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


async def send_audio(socket: ClientConnection, plan: Plan, began_s: float, log: SessionLog) -> None:
    """Send each chunk at the moment when its last sample has been spoken, then the commit."""
    for number, message in enumerate(plan.messages, 1):
        if plan.pace:
            due_s = began_s + min(number * plan.chunk_ms, plan.total_ms) / 1000 / plan.pace
            await asyncio.sleep(due_s - time.perf_counter())
            log.send_lateness_ms.append(1000 * (time.perf_counter() - due_s))
        await socket.send(message)
    await socket.send(_FINAL_COMMIT)


async def receive_text(socket: ClientConnection, began_s: float, log: SessionLog) -> None:
    """Note when each delta comes, until the transcript is done or the server gives up."""
    async for message in socket:
        at_ms = 1000 * (time.perf_counter() - began_s)
        event = json.loads(message)
        match event["type"]:
            case "transcription.delta":
                log.arrivals.append(Arrival(event["delta"], at_ms))
            case "transcription.done":
                log.text, log.usage, log.finished_ms = (
                    event["text"],
                    event["usage"],
                    at_ms,
                )
                return
            case "error":
                log.error = _error_text(event)
                return
    log.error = f"closed: {socket.close_code} {socket.close_reason}"


async def run_session(socket: ClientConnection, plan: Plan, began_s: float) -> SessionLog:
    """Speak and listen at once, to the end of the text."""
    log = SessionLog()
    await asyncio.sleep(began_s - time.perf_counter())
    sender = asyncio.create_task(send_audio(socket, plan, began_s, log))
    try:
        await receive_text(socket, began_s, log)
        if log.error is None:
            await sender
    except (OSError, WebSocketException) as err:
        log.error = repr(err)
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        await socket.close()
    return log


async def run_sessions(plan: Plan, num_sessions: int) -> tuple[list[SessionLog], float]:
    """Open all sessions, then run them. Return their logs and the seconds that they took."""
    sockets: list[ClientConnection] = []
    logs: list[SessionLog] = []
    for _ in range(num_sessions):
        try:
            sockets.append(await open_session(plan))
        except (OSError, WebSocketException, ServerRefusal, TimeoutError) as err:
            logs.append(SessionLog(error=f"not opened: {err}"))
    now_s = time.perf_counter()
    begins_s = [
        now_s + start_ms(index, num_sessions, plan.ramp_ms, plan.chunk_ms) / 1000
        for index in range(len(sockets))
    ]
    runs = (
        run_session(socket, plan, began_s)
        for socket, began_s in zip(sockets, begins_s, strict=True)
    )
    logs += await asyncio.gather(*runs)
    return logs, time.perf_counter() - now_s


def report(
    plan: Plan,
    logs: Sequence[SessionLog],
    wall_s: float,
    cpu_s: float,
    words: Sequence[TimedWord] | None,
) -> Report:
    """Turn logs into figures. Without a reference there are no latencies."""
    done = [log for log in logs if log.error is None]
    timings: list[DeltaTiming] = []
    if words is not None and plan.delay_ms is not None:
        for log in done:
            timings += time_deltas(
                log.arrivals,
                words,
                delay_ms=plan.delay_ms,
                chunk_ms=plan.chunk_ms,
                total_ms=plan.total_ms,
            )
    num_deltas = sum(len(log.arrivals) for log in logs)
    num_done_deltas = sum(len(log.arrivals) for log in done)
    gaps_ms = [
        later.at_ms - earlier.at_ms
        for log in done
        for earlier, later in zip(log.arrivals, log.arrivals[1:], strict=False)
    ]
    firsts_ms = [log.arrivals[0].at_ms for log in done if log.arrivals]
    reference = None if words is None else [word.text for word in words]
    return Report(
        sessions=len(logs),
        audio_s=plan.total_ms / 1000,
        wall_s=wall_s,
        deltas=num_deltas,
        deltas_without_place=0 if words is None else num_done_deltas - len(timings),
        texts_unlike_reference=sum(
            reference is not None and log.text.split() != reference for log in done
        ),
        latency_ms=percentiles(timing.latency_ms for timing in timings),
        lag_ms=percentiles(timing.lag_ms for timing in timings),
        flush_ms=percentiles(log.finished_ms - plan.total_ms for log in done)
        if plan.pace
        else None,
        first_delta_ms=statistics.median(firsts_ms) if firsts_ms else None,
        between_deltas_ms=statistics.median(gaps_ms) if gaps_ms else None,
        send_lateness_ms=percentiles(late for log in logs for late in log.send_lateness_ms),
        generator_cpu_percent=100 * cpu_s / wall_s,
        errors=dict(Counter(log.error for log in logs if log.error is not None)),
        usage=done[0].usage if done else None,
        allowed_ms=None if plan.delay_ms is None else plan.delay_ms + _ALLOWANCE_MS,
    )


def measure(plan: Plan, num_sessions: int, words: Sequence[TimedWord] | None) -> Report:
    """Run once and return its figures."""
    cpu_s = time.process_time()
    logs, wall_s = asyncio.run(run_sessions(plan, num_sessions))
    return report(plan, logs, wall_s, time.process_time() - cpu_s, words)


def print_report(console: Console, result: Report) -> None:
    """Print a table for a person."""
    table = Table(title=f"{result.sessions} sessions of {result.audio_s:.1f} s")
    for column in ("ms", "p50", "p95", "p99", "most"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows = {
        "delta after its audio was spoken (latency)": result.latency_ms,
        "delta after its last sample was sent (lag)": result.lag_ms,
        "done after the commit": result.flush_ms,
        "chunk sent after its time": result.send_lateness_ms,
    }
    for name, values in rows.items():
        if values is not None:
            table.add_row(name, *(f"{value:.0f}" for value in values))
    if table.rows:
        console.print(table)
    console.print(
        f"{result.wall_s:.2f} s wall, {result.times_real_time:.2f} x real time; "
        f"{result.deltas} deltas, {result.deltas_without_place} not in the reference; "
        f"{result.texts_unlike_reference} texts unlike the reference; "
        f"this process took {result.generator_cpu_percent:.0f} % of a core"
    )
    if result.first_delta_ms is not None and result.between_deltas_ms is not None:
        console.print(
            f"first delta after {result.first_delta_ms:.0f} ms, {result.between_deltas_ms:.1f} ms "
            f"between deltas (medians); usage {result.usage}"
        )
    for error, count in result.errors.items():
        console.print(f"{count} x {error}")
    if result.latency_ms is not None:
        verdict = "at most" if result.is_within_limit else "NOT at most"
        console.print(f"p95 of latency: {verdict} {result.allowed_ms} ms, with no errors")


def find_limit(
    console: Console,
    plan: Plan,
    num_sessions: int,
    step: int,
    words: Sequence[TimedWord],
) -> list[Report]:
    """Raise the number of sessions until the limit breaks. Return every run."""
    results: list[Report] = []
    while not results or results[-1].is_within_limit:
        results.append(measure(plan, num_sessions + step * len(results), words))
        print_report(console, results[-1])
    return results


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m voxlite.bench.load_test",
        description="Open real-time sessions on a running server; report how late text comes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--model", default="", help="empty: the one that is served")
    parser.add_argument("--api-key")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--wav", type=Path, default=_SAMPLE, help="PCM16, mono, 16 kHz")
    parser.add_argument("--seconds", type=float, help="loop the audio up to this; else once")
    parser.add_argument("--pause-ms", type=float, default=1000, help="silence after each time")
    parser.add_argument("--chunk-ms", type=float, default=TOKEN_MS)
    parser.add_argument("--delay-ms", type=int, help="480 unless --pace 0: then the server's")
    parser.add_argument("--ramp-s", type=float, help="starts are spread over this; else a loop")
    parser.add_argument("--pace", type=float, default=1, help="1: as spoken; 0: all at once")
    parser.add_argument("--binary", action="store_true", help="send frames of PCM, not JSON")
    parser.add_argument(
        "--find-limit", action="store_true", help="raise --sessions until p95 fails"
    )
    parser.add_argument("--step", type=int, default=8, help="of --find-limit")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.find_limit and args.pace != 1:
        parser.error("--find-limit needs --pace 1")
    return args


def plan_of(args: argparse.Namespace) -> tuple[Plan, bytes]:
    """Return the plan and its audio."""
    pcm = once = read_wav(args.wav)
    if args.seconds is not None:
        pcm = looped(once, args.pause_ms, args.seconds)
    loop_ms = len(once) / _BYTES_PER_MS + args.pause_ms
    ramp_ms = loop_ms if args.ramp_s is None else 1000 * args.ramp_s
    delay_ms = 480 if args.delay_ms is None and args.pace else args.delay_ms
    plan = Plan(
        url=socket_url(args.url),
        model=args.model,
        headers={"Authorization": f"Bearer {args.api_key}"} if args.api_key else {},
        messages=encode(pcm, args.chunk_ms, is_binary=args.binary),
        total_ms=len(pcm) / _BYTES_PER_MS,
        chunk_ms=args.chunk_ms,
        delay_ms=delay_ms,
        ramp_ms=ramp_ms if args.pace else 0.0,
        pace=args.pace,
    )
    return plan, pcm


def main() -> None:
    """Run the command. Exits with 1 where a session failed or p95 is over the limit."""
    args = parse_arguments()
    plan, pcm = plan_of(args)
    console = Console(stderr=args.json)
    words = None
    if args.pace == 1:
        words = reference_words(args.url.rstrip("/"), plan.headers, pcm, plan.delay_ms or 0)
    if args.find_limit and words is not None:
        results = find_limit(console, plan, args.sessions, args.step, words)
        good = [result.sessions for result in results if result.is_within_limit]
        console.print(f"most sessions within the limit: {max(good, default=0)}")
    else:
        results = [measure(plan, args.sessions, words)]
        print_report(console, results[0])
    if args.json:
        print(json.dumps([_as_json(result) for result in results]))
    is_good = results[0].is_within_limit if words is not None else not results[0].errors
    sys.exit(0 if is_good else 1)


def _as_json(result: Report) -> dict[str, Any]:
    """Write a report with its percentiles by name."""
    fields = asdict(result)
    for name, value in fields.items():
        if isinstance(value, Percentiles):
            fields[name] = value._asdict()
    return fields | {"times_real_time": result.times_real_time}


if __name__ == "__main__":
    main()
