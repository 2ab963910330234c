"""Measure how fast the engine is on this machine, beside what its memory allows: `voxlite bench`.

In: a model, or the name of a random one. Out: an `EngineReport`, everything measured in one run.
The engine's own thread drives whole clips; single passes are timed on its model runner while that
thread rests.
"""

from __future__ import annotations

import queue
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import psutil
import torch

from voxlite.bench.engine_report import Clips, EngineReport
from voxlite.bench.passes import Passes
from voxlite.bench.random_model import PRESETS, RandomTensors, write_description
from voxlite.bench.replay import Replay
from voxlite.engine import Engine, EngineConfig, InvalidInput, SessionEnded, SessionOptions
from voxlite.engine.config import AudioConfig, ModelConfig
from voxlite.engine.model_runner import Pick
from voxlite.engine.own_thread import on_own_thread

_NUM_DRAFTS: Final = (0, 1, 2, 3)


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


def measure_engine(
    config: EngineConfig,
    *,
    preset: str | None,
    sessions: Sequence[int],
    seconds: float,
    replay_path: Path | None,
    replay_seconds: float,
) -> EngineReport:
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
    return EngineReport(
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
    passes = Passes(engine, max_encode_tokens)
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


def _resident_gb() -> float:
    rss: int = psutil.Process().memory_info().rss
    return rss / 1e9
