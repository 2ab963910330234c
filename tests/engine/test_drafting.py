"""Tokens are drafted where audio waits: fewer passes, the same tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.engine.harness import Listener, open_session, run_until_idle, transcribe
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig, InvalidInput, SessionOptions
from voxlite.engine.audio.audio_file import read_audio
from voxlite.engine.config import STREAMING_PAD_ID as PAD
from voxlite.engine.config import STREAMING_WORD_ID as WORD
from voxlite.engine.drafting import DraftYield, drafted_ids, right_rows
from voxlite.engine.model_runner import Pick
from voxlite.server.bundled import bundled_model

Samples = NDArray[np.float32]
TEXT = 1_000 + ord("a")


def engine_of(
    num_draft_tokens: int | None, model: Path | None = None, pick: Pick | None = None
) -> Engine:
    """Make an engine on the bundled model, whose text really is mostly pads."""
    return Engine(
        EngineConfig(
            model=str(model or bundled_model()),
            dtype="float32",
            num_draft_tokens=num_draft_tokens,
            poison_freed_blocks=True,
            max_num_seqs=4,
        ),
        pick=pick,
    )


@pytest.fixture(scope="module")
def sample() -> Samples:
    return np.concatenate(list(read_audio(bundled_model() / "sample.wav")))


@pytest.fixture(scope="module")
def expected(sample: Samples) -> Listener:
    return transcribe(engine_of(0), [sample], steps_between=False)


@pytest.fixture(scope="module", params=[1, 2, 3])
def drafting(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param)


@pytest.fixture
def engine(drafting: Engine) -> Iterator[Engine]:
    yield drafting
    drafting.check_integrity()
    assert drafting.stats().num_sessions == 0


def test_a_file_takes_fewer_passes_and_gives_the_same(
    engine: Engine, sample: Samples, expected: Listener
) -> None:
    before = engine.stats()
    listener = transcribe(engine, [sample], steps_between=False)
    assert listener.ids() == expected.ids()
    assert [d.words for d in listener.deltas()] == [d.words for d in expected.deltas()]
    assert [done.usage for done in listener.done] == [done.usage for done in expected.done]
    after = engine.stats()
    num_tokens = after.num_tokens_out - before.num_tokens_out
    num_passes = after.num_passes - before.num_passes
    assert num_tokens == len(expected.ids())
    assert num_passes < 0.8 * num_tokens
    assert num_tokens - num_passes <= after.num_drafted_tokens - before.num_drafted_tokens


def test_live_audio_is_not_drafted(engine: Engine, sample: Samples, expected: Listener) -> None:
    before = engine.stats().num_drafted_tokens
    chunks = np.array_split(sample, len(sample) // 1_280)
    session, listener = open_session(engine)
    for chunk in chunks:
        session.append(chunk)
        run_until_idle(engine)
    assert engine.stats().num_drafted_tokens == before
    session.finish()  # the flush is a backlog of silence
    run_until_idle(engine)
    assert listener.ids() == expected.ids()


def test_neighbours_with_and_without_a_backlog_get_their_own_text(
    engine: Engine, sample: Samples, expected: Listener
) -> None:
    live, live_listener = open_session(engine)
    files = []
    for start, chunk in enumerate(np.array_split(sample, 60)):
        live.append(chunk)
        if start in (5, 6, 30):
            session, listener = open_session(engine)
            session.append(sample)
            session.finish()
            files.append(listener)
        engine.step()
        engine.check_integrity()
    live.finish()
    run_until_idle(engine)
    assert [listener.ids() for listener in (live_listener, *files)] == [expected.ids()] * 4


def test_drafts_that_are_mostly_wrong_change_nothing(tiny_checkpoint: Path) -> None:
    """Few tokens of a random model are pads; its windows are short enough to be passed."""
    samples = speechlike(8.0, seed=3)
    plain = transcribe(engine_of(0, tiny_checkpoint), [samples], steps_between=False).ids()
    engine = engine_of(3, tiny_checkpoint)
    drafted = transcribe(engine, [samples], steps_between=False).ids()
    assert drafted == plain
    stats = engine.stats()
    num_right = stats.num_tokens_out - stats.num_passes
    assert 0 < num_right < 0.5 * stats.num_drafted_tokens


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_words_that_were_foreseen_leave_the_keys_of_words(
    num_draft_tokens: int, tiny_checkpoint: Path
) -> None:
    """A random model writes ids as speech has them, far beyond its windows."""
    script = [PAD, PAD, WORD, TEXT, TEXT, PAD, WORD, TEXT, *[PAD] * 4, WORD, TEXT, WORD, TEXT]

    def pick(logits: Tensor, positions: Sequence[int]) -> Tensor:
        assert len(positions) == len(logits)
        return torch.tensor([script[position % len(script)] for position in positions])

    listeners, passes = [], []
    for count in (0, num_draft_tokens):
        engine, listener = engine_of(count, tiny_checkpoint, pick), Listener()
        session = engine.open(SessionOptions(logprobs=True), listener)
        session.append(speechlike(20.0, seed=4))
        session.finish()
        run_until_idle(engine)
        engine.check_integrity()
        listeners.append(listener)
        passes.append(engine.stats().num_passes)
    plain, drafted = listeners
    assert drafted.ids() == plain.ids()
    assert set(plain.ids()) == {PAD, WORD, TEXT}
    logprobs = [[p for d in x.deltas() for p in d.logprobs or ()] for x in listeners]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    # Passes of the script's 16 tokens: each pass ends with a text token, or with its last draft.
    per_script = {1: 9, 2: 7, 3: 6}[num_draft_tokens]
    assert passes[1] / passes[0] == pytest.approx(per_script / len(script), abs=0.03)


@pytest.mark.parametrize(
    ("next_ids", "num_drafts", "rows"),
    [
        ([PAD], 0, [0]),
        ([TEXT, PAD, PAD], 1, [0]),
        ([PAD, TEXT, TEXT], 1, [0, 1]),
        ([WORD, PAD, TEXT], 1, [0, 2]),
        ([PAD, PAD, PAD, TEXT, TEXT], 2, [0, 1, 2]),
        ([PAD, WORD, PAD, TEXT, WORD], 2, [0, 1, 4]),
        ([WORD, PAD, PAD, PAD, PAD, WORD, TEXT], 3, [0, 4]),
    ],
)
def test_rows_count_as_far_as_they_were_foreseen(
    next_ids: list[int], num_drafts: int, rows: list[int]
) -> None:
    assert len(next_ids) == 1 + len(drafted_ids(num_drafts))
    assert right_rows(next_ids, num_drafts) == rows


def test_log_probabilities_are_those_of_single_passes(sample: Samples) -> None:
    texts = []
    for num_draft_tokens in (0, 3):
        engine, listener = engine_of(num_draft_tokens), Listener()
        session = engine.open(SessionOptions(logprobs=True), listener)
        session.append(sample)
        session.finish()
        run_until_idle(engine)
        texts.append([p for delta in listener.deltas() for p in delta.logprobs or ()])
    assert len(texts[0]) > 60
    assert texts[1] == pytest.approx(texts[0], abs=1e-4)


@pytest.mark.parametrize(("quantization", "expected"), [("none", 2), ("int8", 3)])
def test_what_is_drafted_by_itself_suits_the_weights(
    quantization: str, expected: int, sample: Samples
) -> None:
    config = EngineConfig(
        model=str(bundled_model()), device="cpu", quantization=quantization, max_num_seqs=1
    )
    engine = Engine(config)
    transcribe(engine, [sample], steps_between=False)
    stats = engine.stats()
    most = expected * stats.num_passes
    assert most * 0.5 <= stats.num_drafted_tokens <= most


def test_drafting_is_only_tried_where_it_never_pays(tiny_checkpoint: Path) -> None:
    def pick(logits: Tensor, positions: Sequence[int]) -> Tensor:
        return torch.full((len(logits),), TEXT)

    engine = engine_of(3, tiny_checkpoint, pick)
    transcribe(engine, [speechlike(20.0, seed=3)], steps_between=False)
    stats = engine.stats()
    assert stats.num_passes == stats.num_tokens_out
    assert stats.num_drafted_tokens / 3 == pytest.approx(stats.num_passes / 9, abs=8)


def test_drafting_that_pays_again_is_taken_up_again() -> None:
    draft_yield = DraftYield()
    assert draft_yield.is_worth_it
    for _ in range(20):
        draft_yield.count(3, 0)
    assert not draft_yield.is_worth_it
    for _ in range(8):
        draft_yield.count(0, 0)
    assert draft_yield.is_worth_it
    for _ in range(3):
        draft_yield.count(3, 3)
    assert draft_yield.is_worth_it
    draft_yield.count(0, 0)
    assert draft_yield.is_worth_it


@pytest.mark.parametrize("num_draft_tokens", [-1, 4])
def test_more_drafts_than_a_pass_has_room_for_are_refused(num_draft_tokens: int) -> None:
    with pytest.raises(InvalidInput, match=f"num_draft_tokens={num_draft_tokens}: 0 to 3"):
        EngineConfig(model="x", num_draft_tokens=num_draft_tokens)
