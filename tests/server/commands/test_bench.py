"""`voxlite bench`: everything is measured, on a real or a random model; bad input is said."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from voxlite.server.cli import main

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
