"""The bundled model really transcribes: its sample, real speech held out from training, silence."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import VoxtralRealtimeForConditionalGeneration

from tests.checkpoints import write_hugging_face_checkpoint
from tests.engine.harness import transcribe
from tests.reference import greedy_ids, load_reference, mel_features
from training.manifests import robustness
from training.prepare_data import is_validation
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.audio.audio_file import read_audio
from voxlite.server.bundled import bundled_model
from voxlite.server.commands.evaluate import normalize, score

DATA = Path(__file__).parents[2] / "shared" / "data"
NUM_UTTERANCES = 40  # half orders, half digit strings
MAX_DIFFERENCE = 0.02
MAX_LEVEL_DIFFERENCE = 0.04  # of words that are wrong as it is: one in sixteen of the speaker's

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no real speech beside this checkout")
Samples = NDArray[np.float32]
Utterances = Callable[[], Iterator[tuple[str, Samples]]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model=str(bundled_model()), max_buffered_seconds=600))


def load(path: Path) -> Samples:
    return np.concatenate(list(read_audio(path)))


def sounds(samples: Samples) -> NDArray[np.int64]:
    """Return where samples are no silence."""
    return np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())


def text_of(engine: Engine, samples: Samples, delay_ms: int | None = None) -> str:
    return normalize(transcribe(engine, [samples], delay_ms=delay_ms).text())


@pytest.fixture(scope="module")
def sample() -> Samples:
    return load(bundled_model() / "sample.wav")


@pytest.fixture(scope="module")
def sample_text() -> str:
    return normalize((bundled_model() / "sample.txt").read_text())


def test_the_sample_is_transcribed_exactly(
    engine: Engine, sample: Samples, sample_text: str
) -> None:
    assert text_of(engine, sample) == sample_text


def test_the_sample_in_odd_chunks_is_transcribed_exactly(
    engine: Engine, sample: Samples, sample_text: str
) -> None:
    chunks = np.array_split(sample, 177)
    assert normalize(transcribe(engine, chunks).text()) == sample_text


@pytest.mark.parametrize("gain", [0.1, 3.0])
def test_level_changes_no_word(
    engine: Engine, sample: Samples, sample_text: str, gain: float
) -> None:
    assert text_of(engine, sample * np.float32(gain)) == sample_text


@pytest.mark.parametrize("shift_ms", [3, 11, 20, 29, 37, 46, 55, 64, 72, 79])
def test_where_a_token_begins_changes_no_word(
    engine: Engine, sample: Samples, sample_text: str, shift_ms: int
) -> None:
    shift = np.zeros(shift_ms * 16, np.float32)
    assert text_of(engine, np.concatenate([shift, sample])) == sample_text


def test_a_clip_that_starts_on_its_first_sound_keeps_its_first_word(
    engine: Engine, sample: Samples, sample_text: str
) -> None:
    assert text_of(engine, sample[sounds(sample)[0] :]) == sample_text


@pytest.mark.parametrize("rest_ms", [0, 20, 40, 79])
def test_a_clip_that_ends_with_its_last_sound_keeps_its_last_word(
    engine: Engine, sample: Samples, sample_text: str, rest_ms: int
) -> None:
    end = sounds(sample)[-1] + 1 + rest_ms * 16
    assert text_of(engine, sample[:end]) == sample_text


@pytest.mark.parametrize("level", [0.0, 10 ** (-50 / 20)], ids=["digital silence", "noise"])
def test_where_nothing_is_said_nothing_is_written(engine: Engine, level: float) -> None:
    noise = np.random.default_rng(0).standard_normal(20 * 16_000)
    assert text_of(engine, (level * noise).astype(np.float32)) == ""


@pytest.mark.slow
def test_fifteen_minutes_without_speech_give_at_most_one_word(engine: Engine) -> None:
    """Five each of digital silence, noise at -50 dBFS and tone sweeps."""
    texts = [text_of(engine, item.samples) for item in robustness(np.random.default_rng(0))]
    assert len(" ".join(texts).split()) <= 1


def held_out_orders() -> Iterator[tuple[str, Samples]]:
    rows = map(json.loads, (DATA / "orders" / "manifest.jsonl").read_text().splitlines())
    for row in rows:
        if is_validation("order", row):
            yield row["text"], load(DATA / "orders" / row["audio"])


def held_out_digit_strings() -> Iterator[tuple[str, Samples]]:
    """Five digits of the speaker that training never heard, 0.2 s apart."""
    rows = [
        row
        for row in map(json.loads, (DATA / "digits" / "manifest.jsonl").read_text().splitlines())
        if row["speaker"] == "george"
    ]
    rng = np.random.default_rng(0)
    pause = np.zeros(3200, np.float32)
    while True:
        chosen = [rows[i] for i in rng.integers(len(rows), size=5)]
        parts = [[pause, load(DATA / "digits" / row["audio"])] for row in chosen]
        yield (
            " ".join(row["text"] for row in chosen),
            np.concatenate([p for pair in parts for p in pair] + [pause]),
        )


def card_word_error_rate(set_name: str) -> float:
    """Read a set's figure at 480 ms from the model card's first table."""
    card = (bundled_model() / "MODEL_CARD.md").read_text()
    row = re.search(rf"^\| {set_name}.*\| ([\d.]+) % \|$", card, re.MULTILINE)
    assert row is not None
    return float(row.group(1)) / 100


@needs_data
@pytest.mark.parametrize(
    ("set_name", "utterances"),
    [("coffee orders", held_out_orders), ("digit strings, unseen", held_out_digit_strings)],
    ids=["orders", "digits"],
)
def test_real_speech_is_within_two_points_of_the_model_card(
    engine: Engine, set_name: str, utterances: Utterances
) -> None:
    pairs = [pair for _, pair in zip(range(NUM_UTTERANCES // 2), utterances(), strict=False)]
    result = score(
        set_name, [text for text, _ in pairs], [text_of(engine, samples) for _, samples in pairs]
    )
    assert result.word_error_rate is not None
    assert result.word_error_rate <= card_word_error_rate(set_name) + MAX_DIFFERENCE


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.1, 3.0])
@pytest.mark.parametrize("utterances", [held_out_orders, held_out_digit_strings])
def test_level_changes_few_words_of_held_out_speech(
    engine: Engine, utterances: Utterances, gain: float
) -> None:
    clips = [samples for _, (_, samples) in zip(range(NUM_UTTERANCES), utterances(), strict=False)]
    texts = [text_of(engine, clip) for clip in clips]
    others = [text_of(engine, np.clip(np.float32(gain) * clip, -1, 1)) for clip in clips]
    result = score("levels", texts, others)
    assert result.num_errors <= MAX_LEVEL_DIFFERENCE * result.num_words


@needs_data
@pytest.mark.slow
def test_real_digits_that_start_at_once_keep_the_first(engine: Engine) -> None:
    """Without the pause before it, the first digit comes out as it did with it."""
    pairs = [pair for _, pair in zip(range(NUM_UTTERANCES), held_out_digit_strings(), strict=False)]
    num_lost = 0
    for _, samples in pairs:
        first, second = (text_of(engine, samples[start:]).split()[:1] for start in (0, 3200))
        num_lost += first != second
    assert num_lost <= MAX_DIFFERENCE * NUM_UTTERANCES


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> VoxtralRealtimeForConditionalGeneration:
    folder = tmp_path_factory.mktemp("hugging_face")
    write_hugging_face_checkpoint(folder, bundled_model())
    return load_reference(folder, dtype=torch.float32)


def reference_ids(
    model: VoxtralRealtimeForConditionalGeneration, engine: Engine, samples: Samples
) -> list[int]:
    audio = engine.model_config.audio
    num_delay_tokens = audio.num_delay_tokens(480)
    prompt = [1] + [32] * (audio.num_prompt_tokens(num_delay_tokens) - 1)
    features = mel_features(audio, samples, num_delay_tokens)
    return greedy_ids(model, features, prompt, num_delay_tokens)[len(prompt) :]


@pytest.fixture(scope="module")
def float32_engine() -> Engine:
    return Engine(EngineConfig(model=str(bundled_model()), dtype="float32"))


def test_ids_of_the_sample_equal_transformers(
    float32_engine: Engine, reference: VoxtralRealtimeForConditionalGeneration, sample: Samples
) -> None:
    ids = transcribe(float32_engine, [sample]).ids()
    assert ids == reference_ids(reference, float32_engine, sample)


@needs_data
@pytest.mark.slow
def test_ids_of_50_real_utterances_equal_transformers(
    float32_engine: Engine, reference: VoxtralRealtimeForConditionalGeneration
) -> None:
    orders, digits = held_out_orders(), held_out_digit_strings()
    clips = [next(source)[1] for _ in range(25) for source in (orders, digits)]
    for clip in clips:
        ids = transcribe(float32_engine, [clip]).ids()
        assert ids == reference_ids(reference, float32_engine, clip)
