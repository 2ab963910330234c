"""Time single passes of the model runner, for sessions that exist in the KV cache alone.

In: an engine whose thread doesn't run. Out: milliseconds, and the speed of memory beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from voxlite.engine import Engine, InvalidInput
from voxlite.engine.config import STREAMING_PAD_ID
from voxlite.engine.drafting import ROWS_PER_DRAFT
from voxlite.engine.model_runner import DecodeJob, EncodeJob

_NUM_REPEATS: Final = 7
_NUM_TURNS: Final = 15
_BANDWIDTH_BYTES: Final = 2**28  # far more than caches hold


class Passes:
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

        Both are measured in turn, since on a shared machine the memory's speed changes meanwhile.

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
            rates.append(_BANDWIDTH_BYTES / 1e9 / _time_s(memory.sum))
            shares.append(pass_bytes / 1e9 / _time_s(lambda: self._runner.decode(jobs)) / rates[-1])
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
        for block in self._kv_cache.encoder.make_room(0, 0, first).blocks:
            self._runner.encoder_cache.fill(block, 0)
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


def _times_s(run: Callable[[], object]) -> list[float]:
    run()  # touches memory for the first time
    return [_time_s(run) for _ in range(_NUM_REPEATS)]


def _time_s(run: Callable[[], object]) -> float:
    started_s = perf_counter()
    run()
    return perf_counter() - started_s
