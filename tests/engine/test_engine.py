"""The engine's text against the oracle's, however the audio comes and whoever else is there."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.checkpoints import DecoderShape, EncoderShape, write_checkpoint
from tests.engine.harness import Listener, cut, open_session, run_until_idle, transcribe
from tests.oracle import Generation, Oracle
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig, SessionOptions

# The best logit leads by more than float32 could move it: the oracle computes in float64.
MIN_MARGIN = 1e-3


class Case:
    """A checkpoint, its oracle, and an engine on it that poisons freed blocks."""

    def __init__(self, folder: Path, block_size: int = 16, max_encode_tokens: int = 48) -> None:
        self.oracle = Oracle(folder)
        self.engine = Engine(
            EngineConfig(
                model=str(folder),
                dtype="float32",
                poison_freed_blocks=True,
                block_size=block_size,
                max_encode_tokens=max_encode_tokens,
                max_buffered_seconds=200,
            )
        )
        self._known: dict[tuple[bytes, int], Generation] = {}

    def expected(self, samples: NDArray[np.float32], delay_ms: int = 480) -> Generation:
        key = (samples.tobytes(), delay_ms)
        if key not in self._known:
            generation = self.oracle.generate(samples, delay_ms // 80)
            assert min(generation.margins) > MIN_MARGIN, "a near tie: choose another clip"
            self._known[key] = generation
        return self._known[key]


@pytest.fixture(scope="module")
def case(tiny_checkpoint: Path) -> Case:
    return Case(tiny_checkpoint)


@pytest.fixture(autouse=True)
def nothing_is_left(case: Case) -> Iterator[None]:
    yield
    case.engine.check_integrity()
    stats = case.engine.stats()
    assert stats.num_sessions == 0
    assert stats.failure is None


CLIP = speechlike(2.5, seed=1)


def random_sizes(seed: int, count: int = 400) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.exp(rng.uniform(0, np.log(5000), count)).astype(int).tolist()


@pytest.mark.parametrize(
    "sizes",
    [[159] * 300, [160] * 300, [161] * 300, [1279] * 50, [1281] * 50, random_sizes(1), []],
    ids=["159", "160", "161", "1279", "1281", "random", "all at once"],
)
def test_every_feeding_plan_gives_the_oracles_ids(case: Case, sizes: list[int]) -> None:
    listener = transcribe(case.engine, cut(CLIP, sizes))
    assert listener.ids() == case.expected(CLIP).ids


def test_sample_by_sample_gives_the_oracles_ids(case: Case) -> None:
    samples = CLIP[:4000]
    listener = transcribe(case.engine, cut(samples, [1] * 4000))
    assert listener.ids() == case.expected(samples).ids


def test_audio_that_waits_gives_the_same_ids_as_audio_that_trickles(case: Case) -> None:
    listener = transcribe(case.engine, cut(CLIP, [1600] * 50), steps_between=False)
    assert listener.ids() == case.expected(CLIP).ids


@pytest.mark.parametrize("delay_ms", [80, 400, 480, 960, 1200, 2400])
def test_every_delay_gives_the_oracles_ids(case: Case, delay_ms: int) -> None:
    listener = transcribe(case.engine, [CLIP], delay_ms=delay_ms)
    assert listener.ids() == case.expected(CLIP, delay_ms).ids


@pytest.mark.parametrize("num_samples", [1, 1279, 1280, 1281, 16000])
@pytest.mark.parametrize("delay_ms", [80, 480, 2400])
def test_tokens_are_counted_as_the_model_card_counts_them(
    case: Case, num_samples: int, delay_ms: int
) -> None:
    """FAULTS 13: decode steps = audio steps + padding, never more."""
    listener = transcribe(case.engine, [CLIP[:num_samples]], delay_ms=delay_ms)
    num_delay = delay_ms // 80
    total = 32 + -(-num_samples // 1280) + num_delay + 1 + 10
    [done] = listener.done
    assert done.usage.prompt_tokens == 1 + 32 + num_delay
    assert done.usage.total_tokens == total
    assert len(listener.ids()) == done.usage.completion_tokens == total - (33 + num_delay)


def test_16_seconds_at_480_ms_are_39_210_249(case: Case) -> None:
    [done] = transcribe(case.engine, [np.zeros(256_000, np.float32)]).done
    usage = done.usage
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts == (39, 210, 249)


def test_logprobs_are_the_oracles(case: Case) -> None:
    listener = Listener()
    session = case.engine.open(SessionOptions(logprobs=True), listener)
    session.append(CLIP)
    session.finish()
    run_until_idle(case.engine)
    logprobs = [x for delta in listener.deltas() for x in delta.logprobs or ()]
    np.testing.assert_allclose(logprobs, case.expected(CLIP).logprobs, atol=1e-4)


def test_sessions_of_ages_3_50_and_1000_in_one_batch_equal_each_one_alone(case: Case) -> None:
    """FAULTS 23, with a different delay each: all three decode together from the third's start."""
    ages_tokens, delays_ms = (1000, 50, 3), (480, 80, 2400)
    clips = [speechlike(0.08 * age + 1.5, seed=7) for age in ages_tokens]
    alone = [
        transcribe(case.engine, [clip], delay_ms=delay_ms).ids()
        for clip, delay_ms in zip(clips, delays_ms, strict=True)
    ]
    opened = []
    for clip, age, delay_ms in zip(clips, ages_tokens, delays_ms, strict=True):
        session, listener = open_session(case.engine, delay_ms)
        session.append(clip[: age * 1280], timeout_s=0)
        run_until_idle(case.engine)
        opened.append((session, listener, clip[age * 1280 :]))
    for start in range(0, 24_000, 1280):
        for session, _, rest in opened:
            session.append(rest[start : start + 1280])
        run_until_idle(case.engine)
    for session, _, _ in opened:
        session.finish()
    run_until_idle(case.engine)
    assert [listener.ids() for _, listener, _ in opened] == alone


def test_freed_blocks_of_an_old_session_never_reach_a_new_one(case: Case) -> None:
    """FAULTS 24: freed blocks hold NaN, which no result could hide."""
    for seed in range(3):
        clip = speechlike(1.0, seed=seed)
        session, _ = open_session(case.engine)
        session.append(clip)
        run_until_idle(case.engine)
        session.close()
        run_until_idle(case.engine)
    assert transcribe(case.engine, [CLIP]).ids() == case.expected(CLIP).ids


@pytest.mark.parametrize(
    ("window_frames", "block_size", "max_encode_tokens"),
    [(30, 1, 1), (29, 4, 48), (31, 4, 5), (28, 16, 3), (7, 2, 48), (1, 3, 2)],
)
def test_windows_blocks_and_chunks_of_any_size_give_the_oracles_ids(
    tmp_path: Path, window_frames: int, block_size: int, max_encode_tokens: int
) -> None:
    folder = write_checkpoint(
        tmp_path, encoder=EncoderShape(window=window_frames), decoder=DecoderShape(window=9)
    )
    small = Case(folder, block_size, max_encode_tokens)
    clip = speechlike(1.6, seed=2)
    assert transcribe(small.engine, [clip]).ids() == small.expected(clip).ids


def test_odd_chunks_leave_nothing_behind(case: Case) -> None:
    """FAULTS 27: a clip after 200 sessions of odd chunk sizes is as it was at first."""
    for size in range(1, 400, 2):
        session, _ = open_session(case.engine)
        for chunk in cut(CLIP[:3000], [size] * 4):
            session.append(chunk)
        engine_steps = size % 3
        for _ in range(engine_steps):
            case.engine.step()
        session.close()
        run_until_idle(case.engine)
    assert transcribe(case.engine, [CLIP]).ids() == case.expected(CLIP).ids
