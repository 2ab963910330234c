"""Token ids to bytes, and what is said of a tekken.json that can't be used."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tekken
from voxlite.engine.errors import CheckpointError
from voxlite.engine.tokenizer import Tokenizer

VOCAB_SIZE = 1_400
Json = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer(tiny_checkpoint / "tekken.json")


def test_text_ids_give_the_bytes_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    vocab = tekken(VOCAB_SIZE)["vocab"]
    expected = [base64.b64decode(entry["token_bytes"]) for entry in vocab]
    assert [tokenizer.token_bytes(id_) for id_ in range(1_000, VOCAB_SIZE)] == expected


def test_special_ids_give_no_bytes(tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_bytes(id_) for id_ in range(1_000)} == {b""}


@pytest.mark.parametrize("token_id", [-1, -(2**40), VOCAB_SIZE, 131_072, 2**40])
def test_ids_out_of_range_give_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""


def test_the_vocabulary_counts_special_ids_too(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_padding_and_delay_come_from_the_file(tmp_path: Path) -> None:
    contents = tekken(VOCAB_SIZE, delay_ms=960)
    contents["audio"]["streaming_n_left_pad_tokens"] = 20
    audio = read(tmp_path, contents).audio_config
    assert (audio.num_left_pad_tokens, audio.default_delay_ms) == (20, 960)


def read(folder: Path, contents: object) -> Tokenizer:
    path = folder / "tekken.json"
    path.write_text(json.dumps(contents))
    return Tokenizer(path)


def without(name: str) -> Callable[[Json], None]:
    return lambda contents: contents.pop(name)


def with_audio(name: str, value: object) -> Callable[[Json], None]:
    return lambda contents: contents["audio"].update({name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(without("config"), "config", id="no config"),
        pytest.param(without("vocab"), "vocab", id="no vocabulary"),
        pytest.param(without("special_tokens"), "pecial", id="no special tokens"),
        pytest.param(without("audio"), "no audio section", id="no audio"),
        pytest.param(lambda c: c["config"].update(version="v99"), "v99", id="unknown version"),
        pytest.param(lambda c: c.update(vocab=[]), ".", id="empty vocabulary"),
        pytest.param(lambda c: c.update(vocab=[{"rank": 0}]), ".", id="vocabulary without bytes"),
        pytest.param(lambda c: c.update(audio=7), ".", id="audio that is a number"),
        pytest.param(
            lambda c: c["audio"].pop("audio_encoding_config"), ".", id="audio without spectrogram"
        ),
        pytest.param(
            with_audio("streaming_n_left_pad_tokens", None), "streaming", id="not for streaming"
        ),
        pytest.param(with_audio("transcription_delay_ms", None), "delay", id="no delay"),
        pytest.param(with_audio("transcription_delay_ms", 1_280), "1280 ms", id="illegal delay"),
        pytest.param(with_audio("frame_rate", 0), ".", id="no tokens a second"),
        pytest.param(with_audio("frame_rate", 13.0), ".", id="token not of whole mel frames"),
    ],
)
def test_an_unusable_tokenizer_is_a_sentence_that_names_the_file(
    tmp_path: Path, change: Callable[[Json], None], said: str
) -> None:
    contents = tekken(VOCAB_SIZE)
    change(contents)
    with pytest.raises(CheckpointError, match=said) as refusal:
        read(tmp_path, contents)
    assert str(tmp_path / "tekken.json") in str(refusal.value)


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"config": {', id="cut short"),
        pytest.param(b"\x00\xff\xfe" * 100, id="binary"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="an empty object"),
        pytest.param(b'{"version": "1.0", "model": {"type": "BPE"}}', id="another tokenizer"),
    ],
)
def test_a_file_that_is_not_tekken_is_named(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "tekken.json"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match="tekken.json: not a tekken tokenizer"):
        Tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tekken\.json is missing"):
        Tokenizer(tmp_path / "tekken.json")
