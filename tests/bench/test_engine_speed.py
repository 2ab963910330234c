"""What `voxlite bench` measures with: random models, word times put in place of tokens, bounds."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.test_weights import config_of
from voxlite.bench.engine_speed import decoder_bytes, measure_engine
from voxlite.bench.random_model import PRESETS, RandomTensors, write_description
from voxlite.bench.replay import Replay
from voxlite.engine import EngineConfig, InvalidInput
from voxlite.engine.config import AudioConfig
from voxlite.server.bundled import bundled_model

REPLAY = Path(__file__).parents[2] / "bench" / "replay.jsonl"


def test_a_replay_is_drafted_as_speech_would_be() -> None:
    config = EngineConfig(model=str(bundled_model()), max_num_seqs=1, num_draft_tokens=3)
    report = measure_engine(
        config, preset="tiny", sessions=[1], seconds=1.0, replay_path=REPLAY, replay_seconds=20.0
    )
    assert report.replay is not None
    assert 1.3 < report.replay.tokens_per_pass < 3


def test_a_replay_has_a_word_where_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text(json.dumps({"dur": 2.0, "words": [["one", 0.1, 0.3], ["two", 0.9, 1.0]]}))
    ids = Replay(path, AudioConfig(), 480, 2.0).ids
    # 32 of padding, 6 of delay, and the word's end in tokens of 80 ms: 3.75 and 12.5, rounded up
    assert [p for p, token_id in enumerate(ids) if token_id == 33] == [42, 51]
    assert set(ids[:42] + ids[44:51]) == {32}


def test_the_bound_counts_layers_and_head() -> None:
    folder = bundled_model()
    config = config_of(folder)
    decoder = config.decoder
    layer = 2 * decoder.num_heads * decoder.head_size + 2 * decoder.num_kv_heads * decoder.head_size
    layer += 3 * decoder.hidden_dim
    expected = decoder.dim * (decoder.num_layers * layer + config.vocab_size)
    assert decoder_bytes(config, "int8", torch.bfloat16) == expected
    assert decoder_bytes(config, "none", torch.bfloat16) == 2 * expected


def test_random_tensors_are_the_same_each_time_and_sane() -> None:
    first, second = RandomTensors(), RandomTensors()
    weight = first.read("layers.0.attention.wq.weight", 2048, 3072)
    assert torch.equal(weight, second.read("layers.0.attention.wq.weight", 2048, 3072))
    assert weight.dtype is torch.bfloat16
    assert weight.float().std() == pytest.approx(3072**-0.5, rel=0.01)
    assert first.read("norm.weight", 100).float().mean() == pytest.approx(1, abs=0.1)


def test_the_4b_preset_has_the_published_sizes(tmp_path: Path) -> None:
    write_description(PRESETS["4b"], tmp_path)
    config = config_of(tmp_path)
    assert (config.decoder.dim, config.decoder.num_layers, config.vocab_size) == (3072, 26, 131_072)
    assert (config.encoder.window, config.decoder.window) == (750, 8192)
    assert decoder_bytes(config, "none", torch.bfloat16) == pytest.approx(6.86e9, rel=0.01)


def test_a_replay_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text("one two three")
    with pytest.raises(InvalidInput, match="not a file of word times"):
        Replay(path, AudioConfig(), 480, 2.0)
