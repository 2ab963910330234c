"""`voxlite bench`: everything is measured, on a real or a random model; bad input is said."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.test_weights import config_of
from voxlite.engine import EngineConfig, InvalidInput
from voxlite.engine.config import AudioConfig
from voxlite.server.bundled import bundled_model
from voxlite.server.cli import main
from voxlite.server.commands.benchmark import Replay, decoder_bytes, run_bench
from voxlite.server.commands.random_model import PRESETS, RandomTensors, write_description

REPLAY = Path(__file__).parents[3] / "bench" / "replay.jsonl"


Bench = Callable[..., str]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command in this process; its output, or its error where it ends with one."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["voxlite", "bench", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return err if end.value.code else out

    return run


def test_a_random_model_is_measured_in_memory(bench: Bench) -> None:
    report = json.loads(bench("--preset", "tiny", "--sessions", "1,3", "--seconds", "1", "--json"))
    assert [clips["num_sessions"] for clips in report["clips"]] == [1, 3]
    assert report["clips"][0]["num_steps"] == 13 + 10  # 17 tokens of padding, less the prompt's 7
    assert all(ms > 0 for ms in [*report["decode_ms"].values(), *report["batch_ms"].values()])
    assert report["bandwidth_gb_s"] > 1
    assert report["replay"] is None


def test_a_replay_is_drafted_as_speech_would_be() -> None:
    config = EngineConfig(model=str(bundled_model()), max_num_seqs=1, num_draft_tokens=3)
    report = run_bench(
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "5b"], "preset '5b': one of tiny, small, 4b"),
        (["--preset", "tiny", "--sessions", "two"], "--sessions two: whole numbers from 1"),
        (["--preset", "tiny", "--sessions", "0"], "--sessions 0: whole numbers from 1"),
        (["MODEL", "--preset", "tiny"], "only one can be measured"),
        (["--preset", "tiny", "--draft-tokens", "9"], "num_draft_tokens=9: 0 to 3"),
        (["--preset", "tiny", "--replay", "nowhere.jsonl"], "nowhere.jsonl: not a file of word"),
        (
            ["--preset", "tiny", "--replay", str(REPLAY), "--replay-seconds", "1000"],
            "not 1000.0 s",
        ),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], message: str, bench: Bench) -> None:
    error = bench(*arguments)
    assert error.startswith("voxlite: ")
    assert message in error


def test_a_replay_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text("one two three")
    with pytest.raises(InvalidInput, match="not a file of word times"):
        Replay(path, AudioConfig(), 480, 2.0)
