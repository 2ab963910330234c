"""What a run of `engine_speed` has measured, as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Clips:
    """Files of equal length handed in at once, from the first sample to the last token."""

    num_sessions: int
    seconds: float
    wall_s: float
    num_steps: int
    tokens_per_pass: float

    @property
    def times_real_time(self) -> float:
        """Wall time per second of audio of all sessions: below 1 is faster than speech."""
        return self.wall_s / (self.seconds * self.num_sessions)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One run. Times are medians, in ms unless the name says otherwise."""

    model: str
    weights: str  # dtype, or int8
    num_threads: int
    bandwidth_gb_s: float  # of memory, read between passes
    load_s: float
    weights_gb: float
    decode_ms: dict[int, float]  # one session, by the number of tokens drafted
    batch_ms: dict[int, float]  # by sessions, one row each
    decode_of_bandwidth: float  # a pass that drafts nothing, beside reading its weights alone
    prefill_ms: float
    encode_one_ms: float  # live: one token
    encode_ahead_ms: float  # per token, with a backlog
    num_encode_ahead_tokens: int
    clips: list[Clips]
    replay: Clips | None
    resident_gb: float
    peak_gb: float

    def as_json(self) -> str:
        report = asdict(self)
        for clips, entry in zip(self.clips, report["clips"], strict=True):
            entry["times_real_time"] = clips.times_real_time
        if self.replay is not None:
            report["replay"]["times_real_time"] = self.replay.times_real_time
        return json.dumps(report, indent=1)


def print_report(report: EngineReport) -> None:
    """Print a report as a table."""
    table = Table("measured", title=f"{report.model}, {report.weights}")
    table.add_column("", justify="right")
    table.add_column("note")

    def row(name: str, value: str, note: str = "") -> None:
        table.add_row(name, value, note)

    row("memory", f"{report.bandwidth_gb_s:.1f} GB/s", f"read by {report.num_threads} threads")
    row("load", f"{report.load_s:.1f} s", f"{report.weights_gb:.2f} GB of weights")
    for drafts, ms in report.decode_ms.items():
        share = f"{100 * report.decode_of_bandwidth:.0f} % of the memory's speed"
        row(f"decoder pass, {drafts} drafted", f"{ms:.1f} ms", "" if drafts else share)
    for count, ms in report.batch_ms.items():
        row(f"decoder pass, {count} sessions", f"{ms:.1f} ms")
    row("prompt", f"{report.prefill_ms:.1f} ms")
    row("encoder, live", f"{report.encode_one_ms:.1f} ms", "for one token of 80 ms")
    row(
        "encoder, ahead",
        f"{report.encode_ahead_ms:.1f} ms",
        f"a token, {report.num_encode_ahead_tokens} at once",
    )
    for clips in report.clips:
        row(
            f"{clips.num_sessions} x {clips.seconds:g} s",
            f"{clips.wall_s:.2f} s",
            f"{clips.times_real_time:.2f} x real time in all, {clips.num_steps} steps",
        )
    if (replay := report.replay) is not None:
        row(
            f"replay of {replay.seconds:g} s",
            f"{replay.wall_s:.2f} s",
            f"{replay.times_real_time:.2f} x real time, {replay.tokens_per_pass:.2f} tokens a pass",
        )
    row("resident memory", f"{report.resident_gb:.2f} GB", f"peak {report.peak_gb:.2f} GB")
    Console().print(table)
