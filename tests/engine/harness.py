"""Drive an engine step by step, without its thread, and collect what its sessions say."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from voxlite.engine import (
    Engine,
    Event,
    Session,
    SessionEnded,
    SessionOptions,
    TextDelta,
    UtteranceDone,
)


@dataclass(slots=True)
class Listener:
    """A session's `on_event`: keeps everything."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def deltas(self, utterance_id: int | None = None) -> list[TextDelta]:
        return [
            event
            for event in self.events
            if isinstance(event, TextDelta) and utterance_id in (None, event.utterance_id)
        ]

    def ids(self, utterance_id: int | None = None) -> list[int]:
        return [i for delta in self.deltas(utterance_id) for i in delta.token_ids]

    def text(self, utterance_id: int | None = None) -> str:
        return "".join(delta.text for delta in self.deltas(utterance_id))

    @property
    def done(self) -> list[UtteranceDone]:
        return [event for event in self.events if isinstance(event, UtteranceDone)]

    @property
    def ended(self) -> list[SessionEnded]:
        return [event for event in self.events if isinstance(event, SessionEnded)]


def scatter_blocks(engine: Engine, seed: int = 0) -> None:
    """Shuffle the free lists, so that neighbours in a stream aren't neighbours in the pool."""
    for manager in (engine.kv_cache.encoder, engine.kv_cache.decoder):
        random.Random(seed).shuffle(manager.pool._free)


def held_for_good(engine: Engine) -> bool:
    """Whether no blocks are held but those of starts that sessions share."""
    engine.check_integrity()
    managers = (engine.kv_cache.encoder, engine.kv_cache.decoder)
    return all(each.pool.num_held_blocks == each.num_prefix_blocks for each in managers)


def open_session(engine: Engine, delay_ms: int | None = None) -> tuple[Session, Listener]:
    listener = Listener()
    return engine.open(SessionOptions(delay_ms=delay_ms), listener), listener


def run_until_idle(engine: Engine) -> int:
    """Step until nothing is left to do, checking every block after each step. Return the steps."""
    num_steps = 0
    while engine.step():
        engine.check_integrity()
        num_steps += 1
    return num_steps


def cut(samples: NDArray[np.float32], sizes: Iterable[int]) -> list[NDArray[np.float32]]:
    """Cut samples into chunks of the given sizes, the last one taking the rest."""
    chunks = []
    start = 0
    for size in sizes:
        if start >= len(samples):
            break
        chunks.append(samples[start : start + size])
        start += size
    if start < len(samples):
        chunks.append(samples[start:])
    return chunks


def transcribe(
    engine: Engine,
    chunks: Sequence[NDArray[np.float32]],
    *,
    delay_ms: int | None = None,
    steps_between: bool = True,
) -> Listener:
    """Feed chunks to a new session and run it to its end, with or without steps in between."""
    session, listener = open_session(engine, delay_ms)
    for chunk in chunks:
        session.append(chunk)
        if steps_between:
            run_until_idle(engine)
    session.finish()
    run_until_idle(engine)
    return listener
