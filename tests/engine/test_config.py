"""Configuration: every dimension from the file, every number derived, what can't work refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import DecoderShape, EncoderShape, hugging_face_config, mistral_params
from voxlite.engine.config import (
    LEGAL_DELAYS_MS,
    AudioConfig,
    EngineConfig,
    ModelConfig,
    TransformerConfig,
    read_model_config,
)
from voxlite.engine.errors import CheckpointError, InvalidInput

AUDIO = AudioConfig()
ENCODER = EncoderShape(dim=24, num_layers=5, num_heads=3, head_dim=10, hidden_dim=77, window=29)
DECODER = DecoderShape(
    dim=36,
    num_layers=7,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    hidden_dim=55,
    vocab_size=1_234,
    window=17,
)
Json = dict[str, Any]


def params() -> Json:
    """No two dimensions are the same, so that none can be taken for another."""
    out = mistral_params(DECODER, ENCODER) | {"rope_theta": 2e5, "norm_eps": 1e-4}
    encoder_args(out).update(rope_theta=3e5, norm_eps=1e-3)
    return out


def encoder_args(params: Json) -> Json:
    args: Json = params["multimodal"]["whisper_model_args"]["encoder_args"]
    return args


def hugging_face() -> Json:
    out: Json = json.loads(hugging_face_config(params(), 6).to_json_string(use_diff=False))
    return out


def read(folder: Path, name: str, contents: object) -> ModelConfig:
    (folder / name).write_text(json.dumps(contents))
    return read_model_config(folder, AUDIO)


def test_every_dimension_comes_from_params_json(tmp_path: Path) -> None:
    assert read(tmp_path, "params.json", params()) == ModelConfig(
        audio=AUDIO,
        encoder=TransformerConfig(
            dim=24,
            num_layers=5,
            num_heads=3,
            num_kv_heads=3,
            head_size=10,
            hidden_dim=77,
            window=29,
            norm_eps=1e-3,
            rope_theta=3e5,
        ),
        decoder=TransformerConfig(
            dim=36,
            num_layers=7,
            num_heads=8,
            num_kv_heads=4,
            head_size=6,
            hidden_dim=55,
            window=17,
            norm_eps=1e-4,
            rope_theta=2e5,
        ),
        block_pool_size=4,
        vocab_size=1_234,
        ada_norm_dim=32,
        is_mistral_format=True,
    )


def test_both_formats_describe_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "mistral").mkdir()
    mistral = read(tmp_path / "mistral", "params.json", params())
    assert read(tmp_path, "config.json", hugging_face()) == replace(
        mistral, is_mistral_format=False
    )


def test_mistrals_format_is_taken_where_both_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hugging_face()))
    assert read(tmp_path, "params.json", params()).is_mistral_format


def test_the_fixed_maximum_of_the_mel_comes_from_params_json(tmp_path: Path) -> None:
    contents = params()
    encoder_args(contents)["audio_encoding_args"]["global_log_mel_max"] = 2.5
    assert read(tmp_path, "params.json", contents).audio.global_log_mel_max == 2.5


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither params.json nor config.json") as refusal:
        read_model_config(tmp_path, AUDIO)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("name", ["params.json", "config.json"])
@pytest.mark.parametrize(
    "contents", [b"", b'{"dim": 3', b"\xff\xfe\x00", b"[]", b"7", b"null", b"{}"], ids=repr
)
def test_a_damaged_config_is_named(tmp_path: Path, name: str, contents: bytes) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CheckpointError, match=name):
        read_model_config(tmp_path, AUDIO)


STACK = ["dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "sliding_window"]
REALS = ["norm_eps", "rope_theta"]
HUGGING_FACE_STACK = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "sliding_window",
]


@pytest.mark.parametrize("field", [*STACK, *REALS, "multimodal", "vocab_size"])
def test_a_field_missing_from_params_json_is_named(tmp_path: Path, field: str) -> None:
    contents = params()
    del contents[field]
    with pytest.raises(CheckpointError, match=rf"params\.json: field '{field}' is missing"):
        read(tmp_path, "params.json", contents)


@pytest.mark.parametrize("field", [*STACK, *REALS, "audio_encoding_args"])
def test_a_field_missing_from_the_encoder_is_named(tmp_path: Path, field: str) -> None:
    contents = params()
    del encoder_args(contents)[field]
    with pytest.raises(CheckpointError, match=rf"params\.json: field '{field}' is missing"):
        read(tmp_path, "params.json", contents)


@pytest.mark.parametrize("stack", ["audio_config", "text_config"])
@pytest.mark.parametrize("field", [*HUGGING_FACE_STACK, "rms_norm_eps", "rope_parameters"])
def test_a_field_missing_from_config_json_is_named(tmp_path: Path, stack: str, field: str) -> None:
    contents = hugging_face()
    del contents[stack][field]
    with pytest.raises(CheckpointError, match=rf"config\.json: field '{field}' is missing"):
        read(tmp_path, "config.json", contents)


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "64", [4], {}], ids=repr)
@pytest.mark.parametrize("field", STACK)
def test_a_dimension_that_is_no_number_is_named(tmp_path: Path, field: str, value: object) -> None:
    ours = {"head_dim": "head_size", "sliding_window": "window"}.get(field, field[2:])
    with pytest.raises(CheckpointError, match=rf"params\.json: .*{ours}.* is needed"):
        read(tmp_path, "params.json", params() | {field: value})


@pytest.mark.parametrize("value", [None, 0, -1.0, "1e6"], ids=repr)
@pytest.mark.parametrize("field", REALS)
def test_a_constant_that_is_no_number_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"params\.json: {field}="):
        read(tmp_path, "params.json", params() | {field: value})


@pytest.mark.parametrize("model_type", [None, "voxtral", "whisper"])
def test_another_model_is_named(tmp_path: Path, model_type: str | None) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: model_type={model_type!r}"):
        read(tmp_path, "config.json", hugging_face() | {"model_type": model_type})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda p: p.update(n_heads=7), "num_heads=7", id="heads that can't share"),
        pytest.param(lambda p: p.update(head_dim=5), "head_size=5 is odd", id="odd head"),
        pytest.param(
            lambda p: p["multimodal"]["whisper_model_args"]["downsample_args"].update(
                downsample_factor=8
            ),
            "downsample_factor=8",
            id="pooling that isn't a token",
        ),
        pytest.param(
            lambda p: encoder_args(p)["audio_encoding_args"].update(num_mel_bins=80),
            r"num_mel_bins=80, but tekken\.json says 128",
            id="other mel bins than the tokenizer's",
        ),
    ],
)
def test_an_impossible_model_is_refused(
    tmp_path: Path, change: Callable[[Json], None], said: str
) -> None:
    contents = params()
    change(contents)
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, "params.json", contents)


def test_derived_numbers_of_the_audio_are_the_models() -> None:
    assert {
        "samples a token": AUDIO.samples_per_token,
        "mel frames a token": AUDIO.mel_frames_per_token,
        "look-ahead": AUDIO.look_ahead_samples,
        "ms": AUDIO.token_ms,
        "prompt at 480 ms": AUDIO.num_prompt_tokens(6),
        "right padding at 480 ms": AUDIO.num_right_pad_tokens(6),
    } == {
        "samples a token": 1_280,
        "mel frames a token": 8,
        "look-ahead": 40,
        "ms": 80,
        "prompt at 480 ms": 39,
        "right padding at 480 ms": 17,
    }


def test_legal_delays_are_those_of_the_training() -> None:
    assert LEGAL_DELAYS_MS == (
        *(80, 160, 240, 320, 400, 480, 560, 640, 720, 800, 880, 960, 1_040, 1_120, 1_200),
        2_400,
    )


@pytest.mark.parametrize("delay_ms", LEGAL_DELAYS_MS)
def test_a_legal_delay_is_a_number_of_tokens(delay_ms: int) -> None:
    assert AUDIO.num_delay_tokens(delay_ms) * 80 == delay_ms


@pytest.mark.parametrize("delay_ms", [-80, 0, 1, 79, 81, 500, 1_280, 1_201, 2_320, 2_480, 10**9])
def test_any_other_delay_is_refused_with_the_legal_ones(delay_ms: int) -> None:
    with pytest.raises(InvalidInput, match=rf"{delay_ms} ms: .* 80 to 1200 ms .* 2400 ms"):
        AUDIO.num_delay_tokens(delay_ms)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8"},
        {"device": "tpu"},
        {"max_num_seqs": 0},
        {"block_size": 0},
        {"max_encode_tokens": 0},
        {"kv_cache_gib": 0.0},
        {"max_buffered_seconds": 0.5},
    ],
    ids=str,
)
def test_an_impossible_engine_option_is_refused_with_its_name(wrong: Json) -> None:
    (name,) = wrong
    with pytest.raises(InvalidInput, match=name):
        EngineConfig(model="x", **wrong)
