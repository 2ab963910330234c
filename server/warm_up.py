"""How fast this machine is: a few steps of live audio, run once before the server is ready.

In: a loaded engine that isn't started. Out: a line in the log that says how many sessions keep up.
"""

from __future__ import annotations

import logging
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from voxlite.engine.config import SessionOptions
from voxlite.engine.engine import Engine

logger = logging.getLogger(__name__)

_NUM_STEPS: Final = 5


def log_speed(engine: Engine) -> None:
    """Measure a step with one session and, if that keeps up, with all; log what it means."""
    token_s = engine.model_config.audio.token_s
    one_s = step_s(engine, 1)
    if one_s > token_s:
        logger.warning(
            "slower than real time: %.0f ms for each %.0f ms of audio with one session. Text will "
            "lag behind by up to %.1f s for each second of speech",
            1000 * one_s,
            1000 * token_s,
            one_s / token_s - 1,
        )
        return
    num_sessions = engine.max_sessions
    all_s = step_s(engine, num_sessions)
    logger.info(
        "%.0f ms of audio take %.1f ms with one session, %.1f ms with %d",
        1000 * token_s,
        1000 * one_s,
        1000 * all_s,
        num_sessions,
    )
    if all_s > token_s:
        keep_up = max(1, int(num_sessions * token_s / all_s))
        logger.warning(
            "%d sessions at once would be slower than real time; about %d keep up: lower "
            "--max-num-seqs",
            num_sessions,
            keep_up,
        )


def step_s(engine: Engine, num_sessions: int) -> float:
    """Return how long a token of audio takes for so many live sessions at once (median)."""
    audio = engine.model_config.audio
    delay_tokens = audio.num_delay_tokens(engine.default_delay_ms)
    first = np.zeros((delay_tokens + 2) * audio.samples_per_token, np.float32)
    token = np.zeros(audio.samples_per_token, np.float32)
    sessions = [engine.open(SessionOptions(), lambda event: None) for _ in range(num_sessions)]
    for session in sessions:
        session.append(first)
    _run(engine)
    times_s = []
    for _ in range(_NUM_STEPS):
        for session in sessions:
            session.append(token)
        started_s = perf_counter()
        _run(engine)
        times_s.append(perf_counter() - started_s)
    for session in sessions:
        session.close()
    _run(engine)
    return median(times_s)


def _run(engine: Engine) -> None:
    while engine.step():
        pass
