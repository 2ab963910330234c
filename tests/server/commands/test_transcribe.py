"""`voxlite transcribe`, run in this process on a tiny random checkpoint."""

import html
import io
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.checkpoints import DecoderShape, EncoderShape, write_checkpoint
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig, SessionOptions
from voxlite.server import cli
from voxlite.server.commands.transcribe import (
    FileJob,
    FileTranscript,
    OutputFormat,
    transcribe_files,
)

OPEN_SPEECH = Path(__file__).parents[3].parent / "shared" / "data" / "open_speech"
FORMATS: tuple[OutputFormat, ...] = ("text", "json", "srt", "vtt")
SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt"}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Outcome]


@pytest.fixture
def run(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command as a shell does, with the tiny model unless another is named."""

    def run(*args: str | Path, stdin: bytes = b"", model: str | Path | None = None) -> Outcome:
        argv = ["voxlite", "transcribe", *map(str, args), "--model", str(model or tiny_checkpoint)]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(leaving.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six short clips, of different rates and lengths."""
    folder = tmp_path_factory.mktemp("clips")
    paths = []
    for i, rate_hz in enumerate((16_000, 16_000, 8_000, 44_100, 16_000, 16_000)):
        path = folder / f"clip{i}.wav"
        soundfile.write(path, speechlike(0.4 + 0.1 * i, seed=i), rate_hz)
        paths.append(path)
    return paths


def write_clip(folder: Path, num_samples: int) -> Path:
    path = folder / f"{num_samples}.wav"
    soundfile.write(path, speechlike(num_samples / 16_000, seed=1), 16_000, subtype="FLOAT")
    return path


def test_json_is_one_object_a_file_with_exactly_the_documented_fields(
    run: Run, clips: list[Path]
) -> None:
    outcome = run(clips[5], "--format", "json")
    (found,) = outcome.objects
    assert outcome.code == 0
    assert list(found) == ["file", "text", "token_ids", "audio_s", "delay_ms", "words", "usage"]
    assert list(found["usage"]) == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert found["words"]
    assert all(list(word) == ["word", "start_s", "end_s"] for word in found["words"])
    assert (found["file"], found["audio_s"], found["delay_ms"]) == (str(clips[5]), 0.9, 480)


def test_16_seconds_at_480_ms_are_39_and_210_tokens(run: Run, tmp_path: Path) -> None:
    (found,) = run(write_clip(tmp_path, 256_000), "--format", "json").objects
    assert found["usage"] == {
        "prompt_tokens": 39,
        "completion_tokens": 210,
        "total_tokens": 249,
    }
    assert (found["audio_s"], len(found["token_ids"])) == (16.0, 210)


@pytest.mark.parametrize("num_samples", [1, 1_280, 1_281, 20_000])
@pytest.mark.parametrize("delay_ms", [80, 480, 1_200, 2_400])
def test_tokens_are_padding_and_audio_less_the_prompt(
    run: Run, tmp_path: Path, delay_ms: int, num_samples: int
) -> None:
    clip = write_clip(tmp_path, num_samples)
    (found,) = run(clip, "--format", "json", "--delay-ms", str(delay_ms)).objects
    num_delay_tokens = delay_ms // 80
    total = 32 + -(-num_samples // 1_280) + (num_delay_tokens + 1 + 10)
    prompt = 1 + 32 + num_delay_tokens
    assert found["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": total - prompt,
        "total_tokens": total,
    }
    assert (found["delay_ms"], len(found["token_ids"])) == (delay_ms, total - prompt)


def test_words_make_up_the_text_and_lie_within_the_audio(run: Run, clips: list[Path]) -> None:
    (found,) = run(clips[5], "--format", "json").objects
    assert "".join(word["word"] for word in found["words"]) == "".join(found["text"].split())
    times = [time for word in found["words"] for time in (word["start_s"], word["end_s"])]
    assert times == sorted(times)
    assert 0 <= times[0] and times[-1] <= found["audio_s"]


def test_text_is_that_of_the_json(run: Run, clips: list[Path]) -> None:
    (found,) = run(clips[5], "--format", "json").objects
    assert found["text"]
    assert run(clips[5]).out.rstrip() == found["text"]


def test_srt_is_numbered_cues(run: Run, clips: list[Path]) -> None:
    first, times, *_ = run(clips[5], "--format", "srt").out.splitlines()
    assert first == "1"
    assert times.startswith("00:00:00,")


def test_vtt_starts_with_its_header(run: Run, clips: list[Path]) -> None:
    header, blank, times, *_ = run(clips[5], "--format", "vtt").out.splitlines()
    assert (header, blank) == ("WEBVTT", "")
    assert " --> 00:00:0" in times


def test_results_come_in_the_order_of_the_files_even_when_there_are_more_than_sessions(
    run: Run, clips: list[Path]
) -> None:
    outcome = run(*clips, "--format", "json")
    assert outcome.code == 0
    assert [found["file"] for found in outcome.objects] == [str(clip) for clip in clips]


def test_files_side_by_side_give_what_each_gives_alone(run: Run, clips: list[Path]) -> None:
    alone = [run(clip, "--format", "json").out for clip in clips[:3]]
    assert run(*clips[:3], "--format", "json").out == "".join(alone)


def test_the_same_file_may_be_given_twice(run: Run, clips: list[Path]) -> None:
    first, second = run(clips[0], clips[0], "--format", "json").objects
    assert first == second


@pytest.mark.parametrize("output_format", FORMATS)
def test_output_to_a_file_is_that_to_the_screen(
    run: Run, clips: list[Path], output_format: str, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    shown = run(*clips[:2], "--format", output_format)
    written = run(*clips[:2], "--format", output_format, "--output", path)
    assert (written.code, written.out) == (0, "")
    assert path.read_text().split() == shown.out.split()


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_folder_as_output_gets_one_file_each(
    run: Run, clips: list[Path], output_format: str, tmp_path: Path
) -> None:
    run(*clips[:2], "--format", output_format, "--output", tmp_path)
    suffix = SUFFIXES[output_format]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"clip0.wav{suffix}",
        f"clip1.wav{suffix}",
    ]


def test_two_files_are_never_written_to_one_place(
    run: Run, clips: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "clip0.wav"
    other.write_bytes(clips[0].read_bytes())
    outcome = run(clips[0], other, "--output", tmp_path)
    assert outcome.code == 1
    assert "clip0.wav.txt: 2 of the files would be written to it" in outcome.err


def test_an_output_that_cannot_be_written_is_a_sentence(
    run: Run, clips: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "out.txt"
    outcome = run(clips[0], "--output", path)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"voxlite: {path} can't be written: No such file or directory\n"


def test_an_input_is_never_overwritten(run: Run, clips: list[Path], tmp_path: Path) -> None:
    same = tmp_path / "same.wav"
    same.symlink_to(clips[0])
    before = clips[0].read_bytes()
    outcome = run(clips[0], "--output", same)
    assert outcome.code == 1
    assert f"{same} is one of the inputs" in outcome.err
    assert clips[0].read_bytes() == before


def test_an_output_from_before_stays_if_nothing_can_be_read(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    output.write_text("from before")
    assert run(tmp_path / "missing.wav", "--output", output).code == 1
    assert output.read_text() == "from before"


def test_a_full_disk_is_a_sentence(run: Run, clips: list[Path]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    outcome = run(clips[0], "--output", full)
    assert outcome.code == 1
    assert "/dev/full can't be written: No space left" in outcome.err


def test_a_wav_file_on_standard_input_is_named(run: Run, clips: list[Path]) -> None:
    outcome = run("-", stdin=clips[0].read_bytes())
    assert outcome.code == 1
    assert "a WAV file where raw PCM16 is read" in outcome.err


def test_standard_input_is_raw_pcm16_at_16_khz(run: Run, tmp_path: Path) -> None:
    samples = (speechlike(0.7, seed=3) * 32_767).astype("<i2")
    soundfile.write(tmp_path / "clip.wav", samples, 16_000)
    (piped,) = run("-", "--format", "json", stdin=samples.tobytes()).objects
    (read,) = run(tmp_path / "clip.wav", "--format", "json").objects
    assert piped == read | {"file": "-"}


def test_standard_input_goes_to_a_file_of_that_name(run: Run, tmp_path: Path) -> None:
    run("-", "--output", tmp_path, stdin=bytes(3_200))
    assert [path.name for path in tmp_path.iterdir()] == ["stdin.txt"]


def test_empty_standard_input_gives_an_empty_transcript(run: Run) -> None:
    outcome = run("-", "--format", "json")
    (found,) = outcome.objects
    assert outcome.code == 0
    assert (found["text"], found["token_ids"], found["audio_s"]) == ("", [], 0.0)
    assert found["usage"]["total_tokens"] == 0


def test_a_bad_file_among_good_ones_is_named_and_leaves_them_alone(
    run: Run, clips: list[Path], tmp_path: Path
) -> None:
    bad = tmp_path / "notes.txt"
    bad.write_text("This is not audio.")
    outcome = run(clips[0], bad, tmp_path / "missing.wav", clips[1], "--format", "json")
    assert outcome.code == 1
    assert [found["file"] for found in outcome.objects] == [str(clips[0]), str(clips[1])]
    first, second = outcome.err.splitlines()
    assert first.startswith(f"voxlite: {bad}: not a readable audio file: ")
    assert second == f"voxlite: {tmp_path / 'missing.wav'}: no such file"


def test_a_file_that_is_damaged_halfway_is_named(run: Run, tmp_path: Path) -> None:
    whole = io.BytesIO()
    soundfile.write(whole, speechlike(3.0, seed=1), 16_000, format="FLAC")
    path = tmp_path / "half.flac"
    path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    outcome = run(path, "--format", "json")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"voxlite: {path}: damaged audio: ")


@pytest.mark.parametrize("delay_ms", ["0", "-80", "500", "1280"])
def test_an_illegal_delay_is_refused_with_the_legal_ones(
    run: Run, clips: list[Path], delay_ms: str
) -> None:
    outcome = run(clips[0], "--delay-ms", delay_ms)
    assert (outcome.code, outcome.out) == (1, "")
    assert f"voxlite: delay of {delay_ms} ms: the model knows 80 to 1200 ms" in outcome.err


def test_a_missing_model_is_named(run: Run, clips: list[Path], tmp_path: Path) -> None:
    model = tmp_path / "no-model"
    outcome = run(clips[0], model=model)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"voxlite: {model}: no such folder")


def test_a_folder_without_a_model_is_named(run: Run, clips: list[Path], tmp_path: Path) -> None:
    outcome = run(clips[0], model=tmp_path)
    assert outcome.code == 1
    assert outcome.err == f"voxlite: {tmp_path / 'tekken.json'} is missing\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running engine with the smallest model, for what needs minutes of audio."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("smallest"),
        encoder=EncoderShape(dim=8, num_layers=1, num_heads=1, hidden_dim=8),
        decoder=DecoderShape(dim=8, num_layers=1, num_heads=1, num_kv_heads=1, hidden_dim=8),
    )
    with Engine(EngineConfig(model=str(folder), max_num_seqs=4)) as engine:
        yield engine


class BrokenPipe(io.StringIO):
    """Standard output whose reader has gone."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_what_is_left_is_cancelled_when_the_output_breaks(
    engine: Engine, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenPipe())
    with pytest.raises(BrokenPipeError):
        transcribe_files(
            engine,
            [str(clip) for clip in clips * 3],
            options=SessionOptions(),
            output_format="json",
            output=None,
        )
    assert engine.stats().num_sessions == 0


def test_a_cancelled_job_ends_its_session(engine: Engine, clips: list[Path]) -> None:
    job = FileJob(engine, str(clips[0]), SessionOptions())
    job.cancel()
    job.feed()
    assert engine.stats().num_sessions == 0


@pytest.fixture(scope="module")
def open_speech(engine: Engine) -> list[FileTranscript]:
    """All real recordings, five minutes in all, transcribed side by side."""
    files = sorted(OPEN_SPEECH.glob("*.wav")) + sorted(OPEN_SPEECH.glob("*.ogg"))
    if not files:
        pytest.skip(f"no recordings in {OPEN_SPEECH}")
    jobs = [FileJob(engine, str(file), SessionOptions()) for file in files]
    transcripts = []
    with ThreadPoolExecutor(engine.max_sessions) as workers:
        for job in jobs:
            workers.submit(job.feed)
        for job in jobs:
            transcript = FileTranscript(engine, job.file, SessionOptions())
            for event in job.events():
                transcript.add(event)
            transcripts.append(transcript)
    return transcripts


def test_every_recording_is_heard_to_its_end(open_speech: list[FileTranscript]) -> None:
    for transcript in open_speech:
        assert transcript.audio_s == pytest.approx(soundfile.info(transcript.file).duration, 1e-4)
        num_audio_tokens = -(-round(transcript.audio_s * 16_000) // 1_280)
        assert len(transcript.token_ids) == num_audio_tokens + 10


def cue_texts(rendered: str, line: int) -> str:
    return "".join(cue.split("\n")[line] for cue in rendered.split("\n\n") if " --> " in cue)


TEXT_OF: dict[OutputFormat, Callable[[str], str]] = {
    "text": str,
    "json": lambda rendered: json.loads(rendered)["text"],
    "srt": lambda rendered: cue_texts(rendered, line=2),
    "vtt": lambda rendered: html.unescape(cue_texts(rendered, line=1)),
}


@pytest.mark.parametrize("output_format", FORMATS)
def test_every_format_holds_all_that_was_heard_in_a_recording(
    open_speech: list[FileTranscript], output_format: OutputFormat
) -> None:
    for transcript in open_speech:
        written = TEXT_OF[output_format](transcript.render(output_format))
        assert "".join(written.split()) == "".join(transcript.text.split())
