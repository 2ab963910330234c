"""The vocabulary must load in mistral-common and write any text."""

import json
from pathlib import Path

import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from training.vocabulary import learn_merges, tekken_json


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tekkenizer:
    counts = {" one": 9, " two": 8, " oneness": 2, " espresso": 5}
    path: Path = tmp_path_factory.mktemp("vocabulary") / "tekken.json"
    path.write_text(json.dumps(tekken_json(learn_merges(counts, num_merges=16))))
    return Tekkenizer.from_file(path)


@pytest.mark.parametrize(
    "text", [" one two", " espresso", " i'd", "Zürich 12!", " नमस्ते", "🙂", "  \n", " 한국어 ok"]
)
def test_any_text_survives_encoding(tokenizer: Tekkenizer, text: str) -> None:
    ids = tokenizer.encode(text, bos=False, eos=False)
    assert min(ids) >= 1000
    assert tokenizer.decode(ids) == text


def test_frequent_words_become_single_tokens(tokenizer: Tekkenizer) -> None:
    assert len(tokenizer.encode(" one", bos=False, eos=False)) == 1
    assert len(tokenizer.encode(" two", bos=False, eos=False)) == 1


def test_merges_are_the_same_every_time() -> None:
    counts = {" ab": 3, " ba": 3, " abba": 1}
    assert learn_merges(counts, 6) == learn_merges(dict(reversed(counts.items())), 6)


def test_the_streaming_settings_are_those_of_the_model(tokenizer: Tekkenizer) -> None:
    assert tokenizer.audio is not None
    assert tokenizer.audio.transcription_delay_ms == 480
    assert tokenizer.audio.streaming_n_left_pad_tokens == 32
