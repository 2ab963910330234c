"""The start that all utterances share is computed once, and changes no text."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.harness import open_session, run_until_idle, scatter_blocks, transcribe
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.model_runner import (
    DecodeJob,
    DecodeResult,
    EncodeJob,
    EncodeResult,
    ModelRunner,
)

NUM_SHARED = 31
CLIP = speechlike(2.0, seed=4)


class Recorder:
    """A model runner that notes where each job starts and how long it is."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.encoded: list[tuple[int, int]] = []
        self.decoded: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def encode(self, jobs: Sequence[EncodeJob]) -> list[EncodeResult]:
        self.encoded += [(job.first_token, job.num_rows) for job in jobs]
        return self._runner.encode(jobs)

    def decode(self, jobs: Sequence[DecodeJob]) -> list[list[DecodeResult]]:
        self.decoded += [(job.first_position, len(job.token_ids)) for job in jobs]
        return self._runner.decode(jobs)


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(
        model=str(tiny_checkpoint), dtype="float32", poison_freed_blocks=True, max_num_seqs=3
    )
    engine = Engine(config)
    scatter_blocks(engine)
    return engine


@pytest.fixture
def jobs(engine: Engine) -> Recorder:
    recorder = Recorder(engine.runner)
    engine._runner = recorder  # type: ignore[assignment]
    engine._prefix._runner = recorder  # type: ignore[assignment]
    return recorder


def test_the_second_utterance_starts_behind_it(engine: Engine, jobs: Recorder) -> None:
    first = transcribe(engine, [CLIP], steps_between=False)
    assert (jobs.encoded[0], jobs.decoded[0]) == ((0, NUM_SHARED), (0, NUM_SHARED))
    assert (jobs.encoded[1][0], jobs.decoded[1]) == (NUM_SHARED, (NUM_SHARED, 8))
    jobs.encoded.clear()
    jobs.decoded.clear()
    second = transcribe(engine, [CLIP], steps_between=False)
    assert min(jobs.encoded)[0] == min(jobs.decoded)[0] == NUM_SHARED
    assert second.ids() == first.ids()
    assert second.done[0].usage == first.done[0].usage


def test_each_delay_has_a_decoders_part_of_its_own(engine: Engine, jobs: Recorder) -> None:
    texts = [
        transcribe(engine, [CLIP], delay_ms=delay_ms, steps_between=False).ids()
        for delay_ms in (480, 960, 480, 960)
    ]
    assert jobs.encoded.count((0, NUM_SHARED)) == 1
    assert jobs.decoded.count((0, NUM_SHARED)) == 2
    assert texts[0] == texts[2] != texts[1] == texts[3]


def test_utterances_that_start_together_share_it(engine: Engine) -> None:
    expected = transcribe(engine, [CLIP], steps_between=False).ids()
    opened = [open_session(engine) for _ in range(3)]
    for session, _ in opened:
        session.append(CLIP)
        session.finish()
    run_until_idle(engine)
    assert [listener.ids() for _, listener in opened] == [expected] * 3


def test_every_utterance_of_a_session_starts_from_it(engine: Engine, jobs: Recorder) -> None:
    session, listener = open_session(engine)
    for _ in range(3):
        session.append(CLIP)
        session.commit()
    session.finish()
    run_until_idle(engine)
    assert jobs.encoded.count((0, NUM_SHARED)) == 1
    assert listener.ids(0) == listener.ids(1) == listener.ids(2)


def test_steps_smaller_than_it_do_without(tiny_checkpoint: Path, engine: Engine) -> None:
    config = EngineConfig(model=str(tiny_checkpoint), dtype="float32", max_encode_tokens=7)
    small = Engine(config)
    expected = transcribe(engine, [CLIP], steps_between=False).ids()
    for _ in range(2):
        assert transcribe(small, [CLIP], steps_between=False).ids() == expected
