"""`voxlite bench`: how fast the engine is on this machine, beside what its memory allows.

In: a model, or the name of a random one. Out: `Report`, everything measured in one run. The
engine's own thread drives whole clips; single passes are timed on its model runner while that
thread rests.
"""

from __future__ import annotations

import importlib.resources
import json
import queue
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
import psutil
import torch
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from voxlite.engine import Engine, EngineConfig, InvalidInput, SessionEnded, SessionOptions
from voxlite.engine.config import STREAMING_PAD_ID, STREAMING_WORD_ID, AudioConfig, ModelConfig
from voxlite.engine.drafting import ROWS_PER_DRAFT
from voxlite.engine.model_runner import DecodeJob, EncodeJob, Pick
from voxlite.engine.own_thread import on_own_thread
from voxlite.server.commands.random_model import PRESETS, RandomTensors, write_description

_NUM_REPEATS: Final = 7
_NUM_TURNS: Final = 15
_NUM_DRAFTS: Final = (0, 1, 2, 3)
_BANDWIDTH_BYTES: Final = 2**28  # far more than caches hold
_FIRST_TEXT_ID: Final = 1000


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
class Report:
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


@contextmanager
def _engine_of(config: EngineConfig, preset: str | None, pick: Pick | None) -> Iterator[Engine]:
    if preset is None:
        yield Engine(config, pick=pick)
        return
    if preset not in PRESETS:
        raise InvalidInput(f"preset {preset!r}: one of {', '.join(PRESETS)}")
    with tempfile.TemporaryDirectory() as folder:
        write_description(PRESETS[preset], Path(folder))
        yield Engine(replace(config, model=folder), weights=RandomTensors(), pick=pick)


class Replay:
    """Ids as real speech has them, put in place of what a random model would choose."""

    def __init__(self, path: Path, audio: AudioConfig, delay_ms: int, seconds: float) -> None:
        """Read word times.

        Args:
            path: JSON lines with `dur`, and `words` as [word, start_s, end_s]; one after the other.
            seconds: how much of them to play, at most what they last.

        Raises:
            InvalidInput: the file can't be read, or lasts less than `seconds`.
        """
        num_delay_tokens = audio.num_delay_tokens(delay_ms)
        first = audio.num_prompt_tokens(num_delay_tokens)
        num_positions = first + ceil(seconds / audio.token_s) + num_delay_tokens + 32
        self.ids = [STREAMING_PAD_ID] * num_positions
        published = importlib.resources.files("mistral_common") / "data/tekken_240911.json"
        tokens = Tekkenizer.from_file(Path(str(published)))
        start_s, next_free = 0.0, first
        try:
            for line in path.read_text().splitlines():
                clip = json.loads(line)
                for word, _, end_s in clip["words"]:
                    spoken = ceil((start_s + end_s) / audio.token_s)
                    at = max(next_free, audio.num_left_pad_tokens + num_delay_tokens + spoken)
                    num_pieces = len(tokens.encode(f" {word}", bos=False, eos=False))
                    ids = [STREAMING_WORD_ID, *[_FIRST_TEXT_ID] * num_pieces]
                    next_free = at + len(ids)
                    self.ids[at:next_free] = ids
                start_s += clip["dur"]
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise InvalidInput(f"{path}: not a file of word times: {err!r}") from err
        if start_s < seconds:
            raise InvalidInput(f"{path}: lasts {start_s:.1f} s, not {seconds:.1f} s")
        self.ids = self.ids[:num_positions]
        self.is_on = False

    def pick(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Choose the replay's token, after the model has done all its work."""
        best = logits.argmax(dim=-1)
        if not self.is_on:
            return best
        # The token generated at a position stands at the next one.
        forced = [self.ids[position + 1] for position in positions]
        return torch.tensor(forced, device=logits.device)


def run_bench(
    config: EngineConfig,
    *,
    preset: str | None,
    sessions: Sequence[int],
    seconds: float,
    replay_path: Path | None,
    replay_seconds: float,
) -> Report:
    """Measure everything.

    Raises:
        InvalidInput: the preset is unknown, or the replay can't be played.
        CheckpointError: the model can't be loaded.
    """
    num_threads = torch.get_num_threads()
    replay = None
    if replay_path is not None:
        replay = Replay(replay_path, AudioConfig(), AudioConfig().default_delay_ms, replay_seconds)
    started_s = perf_counter()
    with _engine_of(config, preset, None if replay is None else replay.pick) as engine:
        load_s = perf_counter() - started_s
        runner, model = engine.runner, engine.model_config
        pass_bytes = decoder_bytes(model, config.quantization, runner.dtype)
        passes = on_own_thread(
            lambda: _measure_passes(engine, pass_bytes, config.max_encode_tokens, sessions)
        )
        report: dict[str, Any] = passes | dict(
            model=preset or config.model,
            weights="int8" if config.quantization == "int8" else str(runner.dtype),
            num_threads=num_threads,
            load_s=load_s,
            weights_gb=runner.weight_bytes / 1e9,
            num_encode_ahead_tokens=config.max_encode_tokens,
        )
        with engine:
            clips = [_clips(engine, count, seconds) for count in sessions]
            replayed = None
            if replay is not None:
                replay.is_on = True
                replayed = _clips(engine, 1, replay_seconds)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Report(
        **report,
        clips=clips,
        replay=replayed,
        resident_gb=_resident_gb(),
        peak_gb=usage.ru_maxrss * 1024 / 1e9,
    )


def decoder_bytes(model: ModelConfig, quantization: str, dtype: torch.dtype) -> int:
    """Return the bytes of weights that a decoder pass must read: layers and output head."""
    decoder = model.decoder
    queries, keys = (
        heads * decoder.head_size for heads in (decoder.num_heads, decoder.num_kv_heads)
    )
    layer = decoder.dim * (2 * queries + 2 * keys + 3 * decoder.hidden_dim)
    num_weights = decoder.num_layers * layer + model.vocab_size * decoder.dim
    return num_weights * (1 if quantization == "int8" else dtype.itemsize)


def _measure_passes(
    engine: Engine, pass_bytes: int, max_encode_tokens: int, sessions: Sequence[int]
) -> dict[str, Any]:
    passes = _Passes(engine, max_encode_tokens)
    try:
        bandwidth_gb_s, decode_of_bandwidth = passes.beside_memory(pass_bytes)
        return dict(
            bandwidth_gb_s=bandwidth_gb_s,
            decode_of_bandwidth=decode_of_bandwidth,
            decode_ms={drafts: passes.decode_ms(1, drafts) for drafts in _NUM_DRAFTS},
            batch_ms={count: passes.decode_ms(count, 0) for count in sessions},
            prefill_ms=passes.prefill_ms(),
            encode_one_ms=passes.encode_ms(1),
            encode_ahead_ms=passes.encode_ms(max_encode_tokens) / max_encode_tokens,
        )
    finally:
        passes.close()


class _Passes:
    """Single passes of the model runner, for sessions that exist in the KV cache alone."""

    def __init__(self, engine: Engine, max_encode_tokens: int) -> None:
        self._runner, self._kv_cache = engine.runner, engine.kv_cache
        audio = engine.model_config.audio
        self._span_samples = audio.span_samples
        self._noise = np.random.default_rng(0)
        self._delay_ms = engine.default_delay_ms
        num_delay_tokens = audio.num_delay_tokens(self._delay_ms)
        self._num_prompt_tokens = audio.num_prompt_tokens(num_delay_tokens)
        self._max_sessions = engine.max_sessions
        for session_id in range(self._max_sessions):
            self._kv_cache.admit(session_id)
        self._adapter = self._encode(max_encode_tokens)

    def beside_memory(self, pass_bytes: int) -> tuple[float, float]:
        """Compare a decoder pass of one row with reading memory.

        They take turns, since the memory of a shared machine is now faster, now slower.

        Args:
            pass_bytes: what the pass has to read.

        Returns:
            GB/s of reading memory with all threads, and what share of it the pass reaches: medians.
        """
        memory = torch.ones(_BANDWIDTH_BYTES // 8, dtype=torch.int64)
        jobs = self._jobs(1, 0)
        rates, shares = [], []
        self._runner.decode(jobs)
        for _ in range(_NUM_TURNS):
            rates.append(_BANDWIDTH_BYTES / 1e9 / _seconds(memory.sum))
            shares.append(
                pass_bytes / 1e9 / _seconds(lambda: self._runner.decode(jobs)) / rates[-1]
            )
        return median(rates), median(shares)

    def decode_ms(self, num_sessions: int, num_drafts: int) -> float:
        """Time a pass of the decoder with so many sessions, each of which drafts."""
        jobs = self._jobs(num_sessions, num_drafts)
        return 1000 * median(_times_s(lambda: self._runner.decode(jobs)))

    def prefill_ms(self) -> float:
        ids = [STREAMING_PAD_ID] * self._num_prompt_tokens
        job = self._job(0, 0, ids, 0)
        return 1000 * median(_times_s(lambda: self._runner.decode([job])))

    def encode_ms(self, num_tokens: int) -> float:
        return 1000 * median(_times_s(lambda: self._encode(num_tokens)))

    def close(self) -> None:
        for session_id in range(self._max_sessions):
            self._kv_cache.release(session_id)

    def _encode(self, num_tokens: int) -> Tensor:
        # Behind a full window, as most of a stream is.
        first = self._kv_cache.encoder.spec.past_tokens
        self._kv_cache.encoder.make_room(0, 0, first)
        job = EncodeJob(
            spans=self._noise.standard_normal((num_tokens, self._span_samples), np.float32),
            conv_state=self._runner.initial_conv_state(),
            first_token=first,
            table=self._kv_cache.encoder.make_room(0, first, num_tokens),
        )
        adapter = self._runner.encode([job])[0].adapter
        self._kv_cache.encoder.reset(0)
        return adapter

    def _jobs(self, num_sessions: int, num_drafts: int) -> list[DecodeJob]:
        if num_sessions > self._max_sessions:
            raise InvalidInput(
                f"{num_sessions} sessions at once: room was made for {self._max_sessions}"
            )
        return [
            self._job(session_id, self._num_prompt_tokens, [STREAMING_PAD_ID], num_drafts)
            for session_id in range(num_sessions)
        ]

    def _job(self, session_id: int, first: int, ids: Sequence[int], num_drafts: int) -> DecodeJob:
        return DecodeJob(
            adapter=self._adapter[: len(ids) + num_drafts],
            token_ids=ids,
            num_drafts=num_drafts,
            delay_ms=self._delay_ms,
            first_position=first,
            table=self._kv_cache.decoder.make_room(
                session_id, first, len(ids) + ROWS_PER_DRAFT * num_drafts
            ),
            logprob=False,
        )


def _clips(engine: Engine, num_sessions: int, seconds: float) -> Clips:
    """Hand in one clip per session at once, and wait for the last token of all."""
    samples = np.random.default_rng(0).standard_normal(
        int(seconds * engine.model_config.audio.sampling_rate_hz), np.float32
    )
    ended: queue.SimpleQueue[SessionEnded] = queue.SimpleQueue()

    def on_event(event: object) -> None:
        if isinstance(event, SessionEnded):
            ended.put(event)

    before = engine.stats()
    started_s = perf_counter()
    for _ in range(num_sessions):
        session = engine.open(SessionOptions(), on_event)
        session.append(0.1 * samples)
        session.finish()
    for _ in range(num_sessions):
        if error := ended.get().error:
            raise error
    wall_s = perf_counter() - started_s
    after = engine.stats()
    return Clips(
        num_sessions=num_sessions,
        seconds=seconds,
        wall_s=wall_s,
        num_steps=after.num_steps - before.num_steps,
        tokens_per_pass=(after.num_tokens_out - before.num_tokens_out)
        / (after.num_passes - before.num_passes),
    )


def _times_s(run: Callable[[], object]) -> list[float]:
    run()  # touches memory for the first time
    return [_seconds(run) for _ in range(_NUM_REPEATS)]


def _seconds(run: Callable[[], object]) -> float:
    started_s = perf_counter()
    run()
    return perf_counter() - started_s


def _resident_gb() -> float:
    rss: int = psutil.Process().memory_info().rss
    return rss / 1e9


def print_report(report: Report) -> None:
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
