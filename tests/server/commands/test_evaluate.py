"""Manifests, scores, and `voxlite evaluate` end to end."""

import json
from pathlib import Path

import pytest
import soundfile
from typer.testing import CliRunner

from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig, InvalidInput, SessionOptions
from voxlite.server.cli import app
from voxlite.server.commands.evaluate import (
    Clip,
    normalize,
    read_manifest,
    score,
    score_sets,
    transcripts,
)


def test_a_manifest_gives_clips_with_paths_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"audio": "a.wav", "text": "one", "set": "digits"}\n\n{"audio": "/b", "text": null}\n'
    )
    assert read_manifest(path) == [
        Clip(audio=tmp_path / "a.wav", text="one", set_name="digits"),
        Clip(audio=Path("/b"), text="", set_name="all"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "lists no clips"),
        ("nonsense", "line 1"),
        ('{"audio": "a"}', "line 1"),
        ("[1]", "line 1"),
    ],
    ids=["empty", "not JSON", "no text", "not an object"],
)
def test_a_manifest_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        read_manifest(path)


def test_case_and_punctuation_are_no_errors() -> None:
    assert normalize(" Don't worry -- about  HIM.") == "don't worry about him"


def test_errors_are_counted_by_kind() -> None:
    result = score("s", ["one two three four", "five"], ["one too three", "five six"])
    counts = (
        result.num_words,
        result.num_substitutions,
        result.num_deletions,
        result.num_insertions,
    )
    assert counts == (5, 1, 1, 1)
    assert result.word_error_rate == pytest.approx(3 / 5)


def test_words_heard_in_silence_are_insertions_without_a_rate() -> None:
    result = score("silence", ["", ""], ["well", ""])
    assert (result.num_insertions, result.word_error_rate) == (1, None)


def test_sets_are_scored_apart() -> None:
    clips = [Clip(audio=Path("a"), text=text, set_name=name) for text, name in ("1x", "2y", "3x")]
    scores = score_sets(clips, ["1", "", "3"])
    assert [(s.set_name, s.num_clips, s.num_errors) for s in scores] == [("x", 2, 0), ("y", 1, 1)]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    lines = []
    for seed in range(3):
        soundfile.write(tmp_path / f"{seed}.wav", speechlike(0.6, seed), 16_000)
        lines.append(json.dumps({"audio": f"{seed}.wav", "text": "one two", "set": "random"}))
    path = tmp_path / "manifest.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_texts_come_in_the_manifests_order(tiny_checkpoint: Path, manifest: Path) -> None:
    clips = read_manifest(manifest)
    config = EngineConfig(model=str(tiny_checkpoint), max_num_seqs=2)
    with Engine(config) as engine:
        together = list(transcripts(engine, clips, SessionOptions()))
        alone = [next(transcripts(engine, [clip], SessionOptions())) for clip in clips]
    assert together == alone


def test_the_command_prints_a_row_per_set(tiny_checkpoint: Path, manifest: Path) -> None:
    result = CliRunner().invoke(
        app, ["evaluate", str(manifest), "--model", str(tiny_checkpoint), "--show-errors"]
    )
    assert result.exit_code == 0, result.output
    assert "random" in result.output
    assert "said:  one two" in result.output


def test_a_clip_that_is_missing_is_named_and_the_others_are_scored(
    tiny_checkpoint: Path, manifest: Path
) -> None:
    manifest.write_text('{"audio": "missing.wav", "text": "one"}\n' + manifest.read_text())
    result = CliRunner().invoke(app, ["evaluate", str(manifest), "--model", str(tiny_checkpoint)])
    assert result.exit_code == 1
    assert "missing.wav: no such file" in result.output
    assert "random" in result.output
