"""Sessions: utterances, ends, limits, and what one must never do to another."""

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.engine.harness import (
    Listener,
    held_for_good,
    open_session,
    run_until_idle,
    scatter_blocks,
    transcribe,
)
from tests.speechlike import speechlike
from voxlite.engine import (
    Engine,
    EngineConfig,
    EngineFailure,
    Event,
    InvalidInput,
    Overloaded,
    SessionClosed,
    SessionEnded,
    SessionOptions,
    StepStats,
    TextDelta,
    Usage,
)
from voxlite.engine.model_runner import DecodeJob, DecodeResult, ModelRunner

CLIPS = [speechlike(seconds, seed) for seed, seconds in enumerate((1.3, 0.7, 1.0))]
MAX_SESSIONS = 3


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint: Path) -> Engine:
    engine = Engine(
        EngineConfig(
            model=str(tiny_checkpoint), max_num_seqs=MAX_SESSIONS, poison_freed_blocks=True
        )
    )
    scatter_blocks(engine)
    return engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine without a thread, which must be empty again after each test."""
    yield shared_engine
    stats = shared_engine.stats()
    assert (stats.num_sessions, stats.failure) == (0, None)
    assert held_for_good(shared_engine)


@pytest.fixture(scope="module")
def alone(shared_engine: Engine) -> list[Listener]:
    """Each clip transcribed in a session of its own."""
    return [transcribe(shared_engine, [clip]) for clip in CLIPS]


# Utterances


def test_an_utterance_after_a_commit_is_what_it_would_be_alone(
    engine: Engine, alone: list[Listener]
) -> None:
    session, listener = open_session(engine)
    for clip in CLIPS:
        session.append(clip)
        session.commit()
        run_until_idle(engine)
    session.finish()
    run_until_idle(engine)
    assert [listener.ids(i) for i in range(3)] == [each.ids() for each in alone]


def test_commits_and_audio_may_queue_up_while_an_utterance_decodes(
    engine: Engine, alone: list[Listener]
) -> None:
    session, listener = open_session(engine)
    for clip in CLIPS:
        session.append(clip)
        session.commit()
    session.finish()
    run_until_idle(engine)
    assert [listener.ids(i) for i in range(3)] == [each.ids() for each in alone]
    assert [done.utterance_id for done in listener.done] == [0, 1, 2, 3]
    assert listener.done[3].usage == Usage(prompt_tokens=0, completion_tokens=0)


def test_a_commit_without_audio_is_an_empty_utterance(engine: Engine) -> None:
    session, listener = open_session(engine)
    session.commit()
    session.append(np.zeros(0, np.float32))
    session.commit()
    run_until_idle(engine)
    assert [done.usage.total_tokens for done in listener.done] == [0, 0]
    assert engine.stats().num_sessions == 1
    session.close()
    run_until_idle(engine)


def test_silence_is_an_utterance_and_the_next_one_works(
    engine: Engine, alone: list[Listener]
) -> None:
    session, listener = open_session(engine)
    session.append(np.zeros(16_000, np.float32))
    session.commit()
    session.append(CLIPS[0])
    session.finish()
    run_until_idle(engine)
    assert len(listener.done) == 2
    assert listener.ids(1) == alone[0].ids()


def test_times_run_on_over_utterances(engine: Engine) -> None:
    session, listener = open_session(engine)
    for clip in CLIPS:
        session.append(clip)
        session.commit()
    session.finish()
    run_until_idle(engine)
    ends_s = np.cumsum([len(clip) / 16_000 for clip in CLIPS])
    assert [done.end_s for done in listener.done[:3]] == pytest.approx(ends_s)
    assert [done.start_s for done in listener.done[1:3]] == pytest.approx(ends_s[:2])
    words = [word for delta in listener.deltas() for word in delta.words]
    assert words
    times = [time for word in words for time in (word.start_s, word.end_s)]
    assert times == sorted(times)
    for delta in listener.deltas():
        done = listener.done[delta.utterance_id]
        assert all(done.start_s <= w.start_s <= w.end_s <= done.end_s for w in delta.words)


def test_words_add_up_to_the_text(engine: Engine) -> None:
    listener = transcribe(engine, [CLIPS[0]])
    words = [word for delta in listener.deltas() for word in delta.words]
    assert "".join(word.text for word in words).split() == listener.text().split()


def test_options_change_with_the_next_utterance(engine: Engine, alone: list[Listener]) -> None:
    session, listener = open_session(engine)
    session.append(CLIPS[0][:8000])
    run_until_idle(engine)
    session.configure(SessionOptions(delay_ms=80, logprobs=True))
    session.append(CLIPS[0][8000:])
    session.commit()
    session.append(CLIPS[1])
    session.finish()
    run_until_idle(engine)
    assert listener.ids(0) == alone[0].ids()
    assert [done.usage.prompt_tokens for done in listener.done] == [39, 34]
    assert [delta.logprobs is None for delta in listener.deltas()].index(False) == len(
        listener.deltas(0)
    )


@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_a_discarded_utterance_is_not_computed_further_and_the_next_is_what_it_would_be_alone(
    engine: Engine, alone: list[Listener], num_steps: int
) -> None:
    session, listener = open_session(engine)
    long = np.tile(CLIPS[0], 8)  # more than the engine takes up at once
    session.append(long)
    for _ in range(num_steps):
        engine.step()
    num_tokens = len(listener.ids())
    session.discard()
    engine.step()
    assert held_for_good(engine)
    assert session.num_buffered_samples == 0
    session.append(CLIPS[1])
    session.finish()
    run_until_idle(engine)
    assert len(listener.ids(0)) == num_tokens
    assert listener.ids(1) == alone[1].ids()
    discarded, done = listener.done
    assert discarded.usage.completion_tokens == num_tokens
    assert (discarded.start_s, discarded.end_s) == (0.0, len(long) / 16_000)
    assert done.end_s - done.start_s == pytest.approx(len(CLIPS[1]) / 16_000)


def test_a_discard_leaves_committed_utterances_and_changes_of_options_alone(
    engine: Engine, alone: list[Listener]
) -> None:
    session, listener = open_session(engine)
    session.append(CLIPS[0])
    session.commit()
    session.append(CLIPS[1])
    session.configure(SessionOptions(delay_ms=80))
    session.append(CLIPS[1])
    session.discard()
    session.append(CLIPS[2])
    session.finish()
    run_until_idle(engine)
    assert listener.ids(0) == alone[0].ids()
    assert not listener.ids(1)
    assert [done.usage.prompt_tokens for done in listener.done] == [39, 0, 34]
    ends_s = np.cumsum([len(CLIPS[0]), 2 * len(CLIPS[1]), len(CLIPS[2])]) / 16_000
    assert [done.end_s for done in listener.done] == pytest.approx(ends_s)


def test_a_discard_without_audio_is_an_empty_utterance(engine: Engine) -> None:
    session, listener = open_session(engine)
    session.discard()
    session.discard()
    session.finish()
    run_until_idle(engine)
    assert [done.usage.total_tokens for done in listener.done] == [0, 0, 0]
    with pytest.raises(SessionClosed):
        session.discard()


def test_end_tokens_in_mid_stream_are_tokens_like_any_other(engine: Engine) -> None:
    """FAULTS 12: the tiny model says </s> now and then; it is fed back and gives no text."""
    listener = transcribe(engine, [speechlike(6.0, seed=0)])
    ids = listener.ids()
    assert 2 in ids[:-1]
    assert len(ids) == listener.done[0].usage.completion_tokens
    assert "</s>" not in listener.text()


# Ends


def test_a_finished_session_ends_with_one_event_and_takes_no_more(engine: Engine) -> None:
    session, listener = open_session(engine)
    session.append(CLIPS[1])
    session.finish()
    with pytest.raises(SessionClosed):
        session.append(CLIPS[1])
    with pytest.raises(SessionClosed):
        session.commit()
    run_until_idle(engine)
    assert listener.ended == [SessionEnded(session_id=session.session_id, error=None)]
    assert listener.events[-1] == listener.ended[0]


def test_close_drops_what_was_to_come_and_may_be_called_twice(engine: Engine) -> None:
    session, listener = open_session(engine)
    session.append(CLIPS[0])
    engine.step()
    session.close()
    session.close()
    run_until_idle(engine)
    assert len(listener.ended) == 1
    assert not listener.done


def test_a_session_that_vanishes_leaves_its_neighbours_text_alone(
    engine: Engine, alone: list[Listener]
) -> None:
    """FAULTS 1, at every moment of the vanished session's life."""
    for num_steps in range(0, 12, 3):
        doomed, _ = open_session(engine)
        neighbour, listener = open_session(engine)
        doomed.append(CLIPS[2])
        neighbour.append(CLIPS[0])
        for _ in range(num_steps):
            engine.step()
        doomed.close()
        neighbour.finish()
        run_until_idle(engine)
        assert listener.ids() == alone[0].ids()


def test_a_listener_that_raises_ends_its_own_session_only(
    engine: Engine, alone: list[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[SessionEnded] = []

    def broken(event: Event) -> None:
        if isinstance(event, SessionEnded):
            ended.append(event)
        elif isinstance(event, TextDelta):
            raise RuntimeError("no")

    doomed = engine.open(SessionOptions(), broken)
    neighbour, listener = open_session(engine)
    doomed.append(CLIPS[0])
    neighbour.append(CLIPS[0])
    neighbour.finish()
    run_until_idle(engine)
    assert listener.ids() == alone[0].ids()
    assert isinstance(ended[0].error, EngineFailure)
    assert "RuntimeError" in caplog.text
    with pytest.raises(SessionClosed):
        doomed.append(CLIPS[0])


def test_filling_up_and_ending_in_every_way_gives_every_seat_back(engine: Engine) -> None:
    """FAULTS 6."""
    for round_ in range(50):
        opened = [open_session(engine) for _ in range(MAX_SESSIONS)]
        with pytest.raises(Overloaded, match=f"all {MAX_SESSIONS} sessions are in use"):
            open_session(engine)
        for number, (session, _) in enumerate(opened):
            session.append(CLIPS[1][:1280])
            if (round_ + number) % 3 == 0:
                engine.step()
            if (round_ + number) % 2:
                session.finish()
            else:
                session.close()
        run_until_idle(engine)
        assert all(len(listener.ended) == 1 for _, listener in opened)


# Input


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((2, 2), np.float32), "(2, 2)"),
        (np.zeros(2, np.int16), "int16"),
        (np.array([0, np.nan], np.float32), "sample 1 is nan"),
        (np.array([-np.inf], np.float32), "sample 0 is -inf"),
        (np.array([1e30], np.float32), "numbers up to 1e+06 are possible"),
    ],
    ids=["two dimensions", "integers", "NaN", "infinity", "too loud"],
)
def test_samples_that_cannot_be_used_are_refused_and_the_session_goes_on(
    engine: Engine, alone: list[Listener], samples: np.ndarray, message: str
) -> None:
    session, listener = open_session(engine)
    session.append(CLIPS[0])
    with pytest.raises(InvalidInput) as caught:
        session.append(samples)
    session.finish()
    run_until_idle(engine)
    assert message in str(caught.value)
    assert listener.ids() == alone[0].ids()


def test_commits_beyond_the_bound_are_refused(engine: Engine) -> None:
    session, listener = open_session(engine)
    with pytest.raises(Overloaded, match="10000 of at most 10000 appends, commits and changes"):
        for _ in range(10_001):
            session.commit()
    run_until_idle(engine)
    assert len(listener.done) == 10_000
    session.commit()
    session.close()
    run_until_idle(engine)


def test_a_delay_that_is_no_whole_number_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput):
        engine.open(SessionOptions(delay_ms=480.0), Listener())  # type: ignore[arg-type]


@pytest.mark.parametrize("delay_ms", [0, 40, 481, 1280, 2401, -80])
def test_delays_the_model_was_not_trained_for_are_refused(engine: Engine, delay_ms: int) -> None:
    with pytest.raises(InvalidInput, match=f"delay of {delay_ms} ms"):
        open_session(engine, delay_ms)


def test_samples_are_copied_when_handed_in(engine: Engine, alone: list[Listener]) -> None:
    session, listener = open_session(engine)
    reused = CLIPS[0].copy()
    session.append(reused)
    reused[:] = 0
    session.finish()
    run_until_idle(engine)
    assert listener.ids() == alone[0].ids()


def test_audio_beyond_the_bound_is_refused_and_nothing_of_it_taken(tiny_checkpoint: Path) -> None:
    engine = Engine(
        EngineConfig(model=str(tiny_checkpoint), max_num_seqs=1, max_buffered_seconds=1)
    )
    session, _ = open_session(engine)
    session.append(np.zeros(10_000, np.float32))
    with pytest.raises(Overloaded, match="10000 of at most 16000"):
        session.append(np.zeros(6_001, np.float32))
    with pytest.raises(InvalidInput, match="16001 samples at once: at most 16000"):
        session.append(np.zeros(16_001, np.float32))
    assert session.num_buffered_samples == 10_000
    session.append(np.zeros(6_000, np.float32))
    run_until_idle(engine)
    assert session.num_buffered_samples == 0


def test_memory_for_a_session_does_not_grow_with_its_length(engine: Engine) -> None:
    session, listener = open_session(engine)
    sizes = []
    for _ in range(4):
        for _ in range(10):
            session.append(np.zeros(16_000, np.float32))
            run_until_idle(engine)
        [active] = engine._sessions.values()
        assert active.utterance is not None
        sizes.append(
            (
                len(active.utterance.audio._buffer),
                len(active.utterance.adapter),
                len(active.commands),
            )
        )
        listener.events.clear()
    assert len(set(sizes)) == 1
    session.close()
    run_until_idle(engine)


# Faults


class FailingRunner:
    """A model runner that fails whenever a batch holds the first decoder step of `delay_ms`."""

    def __init__(self, runner: ModelRunner, delay_ms: int) -> None:
        self._runner = runner
        self._delay_ms = delay_ms

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def decode(self, jobs: Sequence[DecodeJob]) -> list[list[DecodeResult]]:
        if any(job.delay_ms == self._delay_ms for job in jobs):
            raise RuntimeError("out of memory")
        return self._runner.decode(jobs)


def test_a_session_that_breaks_a_batch_ends_alone(
    tiny_checkpoint: Path, alone: list[Listener]
) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoint), max_num_seqs=3))
    engine._runner = FailingRunner(engine._runner, delay_ms=80)  # type: ignore[assignment]
    opened = [open_session(engine, delay_ms) for delay_ms in (480, 80, 480)]
    for (session, _), clip in zip(opened, CLIPS, strict=True):
        session.append(clip)
        session.finish()
    run_until_idle(engine)
    [(_, first), (_, culprit), (_, third)] = opened
    assert [first.ids(), third.ids()] == [alone[0].ids(), alone[2].ids()]
    assert isinstance(culprit.ended[0].error, EngineFailure)
    assert "out of memory" in str(culprit.ended[0].error)


def test_a_fault_outside_any_session_ends_the_engine_loudly(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(stats: StepStats) -> None:
        raise RuntimeError("no more")

    ended = threading.Event()
    listener = Listener()

    def on_event(event: Event) -> None:
        listener(event)
        if isinstance(event, SessionEnded):
            ended.set()

    engine = Engine(EngineConfig(model=str(tiny_checkpoint), max_num_seqs=1), on_step=broken)
    engine.start()
    engine.open(SessionOptions(), on_event).append(CLIPS[0])
    assert ended.wait(60)
    engine.stop()
    assert isinstance(listener.ended[0].error, EngineFailure)
    assert "the engine has failed" in caplog.text
    assert isinstance(engine.stats().failure, EngineFailure)
    with pytest.raises(EngineFailure, match="no more"):
        open_session(engine)


class NotANumberRunner(FailingRunner):
    """A model runner whose logits of one delay aren't finite."""

    def decode(self, jobs: Sequence[DecodeJob]) -> list[list[DecodeResult]]:
        return [
            [r._replace(logit=math.nan) for r in results]
            if job.delay_ms == self._delay_ms
            else results
            for job, results in zip(jobs, self._runner.decode(jobs), strict=True)
        ]


def test_output_that_is_no_number_ends_its_session_and_says_so(
    tiny_checkpoint: Path, alone: list[Listener]
) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoint), max_num_seqs=2))
    engine._runner = NotANumberRunner(engine._runner, delay_ms=80)  # type: ignore[assignment]
    opened = [open_session(engine, delay_ms) for delay_ms in (480, 80)]
    for session, _ in opened:
        session.append(CLIPS[0])
        session.finish()
    run_until_idle(engine)
    [(_, neighbour), (_, culprit)] = opened
    assert neighbour.ids() == alone[0].ids()
    assert "the model's output is nan" in str(culprit.ended[0].error)


def test_a_listener_that_ends_the_thread_ends_the_engine_loudly(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even SystemExit leaves no session waiting."""

    def leave(event: Event) -> None:
        if isinstance(event, TextDelta):
            raise SystemExit

    engine = Engine(EngineConfig(model=str(tiny_checkpoint), max_num_seqs=2))
    engine.start()
    _, neighbour = open_session(engine)
    engine.open(SessionOptions(), leave).append(CLIPS[0])
    engine._thread.join(60)  # type: ignore[union-attr]
    assert isinstance(neighbour.ended[0].error, EngineFailure)
    assert isinstance(engine.stats().failure, EngineFailure)


# The engine's thread


def test_sessions_of_many_threads_each_get_their_own_text(
    tiny_checkpoint: Path, alone: list[Listener]
) -> None:
    results: dict[int, list[int]] = {}

    def client(engine: Engine, number: int) -> None:
        ended = threading.Event()
        listener = Listener()

        def on_event(event: Event) -> None:
            listener(event)
            if isinstance(event, SessionEnded):
                ended.set()

        session = engine.open(SessionOptions(), on_event)
        for start in range(0, len(CLIPS[number]), 1000):
            session.append(CLIPS[number][start : start + 1000], timeout_s=30)
        session.finish()
        assert ended.wait(60)
        results[number] = listener.ids()

    with Engine(EngineConfig(model=str(tiny_checkpoint), max_num_seqs=3)) as engine:
        threads = [threading.Thread(target=client, args=(engine, n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: each.ids() for number, each in enumerate(alone)}


def test_stopping_ends_every_session_and_refuses_new_ones(tiny_checkpoint: Path) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoint), max_num_seqs=2))
    with engine:
        _, listener = open_session(engine)
    assert [type(event.error) for event in listener.ended] == [SessionClosed]
    with pytest.raises(EngineFailure, match="stopped"):
        open_session(engine)


def test_waiting_for_room_ends_when_the_session_ends(tiny_checkpoint: Path) -> None:
    """A feeder blocked on a full inbox must not hang on a session that is gone."""
    engine = Engine(
        EngineConfig(model=str(tiny_checkpoint), max_num_seqs=1, max_buffered_seconds=1)
    )
    session, _ = open_session(engine)
    session.append(np.zeros(16_000, np.float32))
    outcome: list[BaseException] = []

    def feed() -> None:
        try:
            session.append(np.zeros(16_000, np.float32), timeout_s=60)
        except SessionClosed as err:
            outcome.append(err)

    feeder = threading.Thread(target=feed)
    feeder.start()
    engine.stop()
    feeder.join(60)
    assert len(outcome) == 1


def test_room_for_the_kv_cache_that_no_session_fits_in_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(InvalidInput, match="one session of this model needs"):
        Engine(EngineConfig(model=str(tiny_checkpoint), kv_cache_gib=1e-6))


def test_the_kv_cache_bounds_the_number_of_sessions(tiny_checkpoint: Path) -> None:
    one = EngineConfig(model=str(tiny_checkpoint), kv_cache_gib=0.0012, max_num_seqs=100)
    engine = Engine(one)
    assert 1 <= engine.max_sessions < 100
    sessions = [open_session(engine)[0] for _ in range(engine.max_sessions)]
    for session in sessions:
        session.append(CLIPS[1])
        session.finish()
    run_until_idle(engine)
    assert engine.stats().num_sessions == 0
