"""Transcribe files through the engine: `voxlite transcribe`.

In: paths, or raw PCM16 on standard input. Out: text as it is decoded, or JSON, SubRip or WebVTT.
Each file is a session of its own, so several run at once; results come in the order of the files,
and a file that fails says so and leaves the others alone.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from voxlite.engine import (
    Engine,
    Event,
    InvalidInput,
    Session,
    SessionClosed,
    SessionEnded,
    SessionOptions,
    TextDelta,
    Usage,
    UtteranceDone,
    VoxliteError,
)
from voxlite.engine.audio.audio_file import AudioFile, read_pcm16
from voxlite.server.formats import segments_of, to_srt, to_vtt
from voxlite.server.transcript import Transcript

OutputFormat = Literal["text", "json", "srt", "vtt"]
STDIN: Final = "-"
# A bar is of use where one has to wait.
_LONG_AUDIO_S: Final = 20.0
_MAX_JOIN_S: Final = 1.0
_SUFFIXES: Final = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt"}


class FileTranscript:
    """All that the engine said of one file, and what it is written as."""

    def __init__(self, engine: Engine, file: str, options: SessionOptions) -> None:
        self.file = file
        self._delay_ms = options.delay_ms or engine.default_delay_ms
        self._transcript = Transcript(engine.tokenizer.token_bytes)
        self.token_ids: list[int] = []
        self._usage = Usage(prompt_tokens=0, completion_tokens=0)
        self.audio_s = 0.0

    def add(self, event: Event) -> str:
        """Take an event. Return its text, without white space before the first word."""
        match event:
            case TextDelta():
                self.token_ids.extend(event.token_ids)
                return self._transcript.add(event)
            case UtteranceDone():
                self._usage = event.usage
                self.audio_s = event.end_s - event.start_s
        return ""

    @property
    def text(self) -> str:
        return self._transcript.text.strip()

    def render(self, output_format: OutputFormat) -> str:
        """Write it in a format, ending with a newline."""
        match output_format:
            case "text":
                return self.text + "\n"
            case "srt":
                return to_srt(segments_of(self._transcript.words))
            case "vtt":
                return to_vtt(segments_of(self._transcript.words))
            case "json":
                return json.dumps(self._as_json(), ensure_ascii=False) + "\n"

    def _as_json(self) -> dict[str, object]:
        return {
            "file": self.file,
            "text": self.text,
            "token_ids": self.token_ids,
            "audio_s": round(self.audio_s, 4),
            "delay_ms": self._delay_ms,
            "words": [
                {
                    "word": word.text.strip(),
                    "start_s": round(word.start_s, 3),
                    "end_s": round(word.end_s, 3),
                }
                for word in self._transcript.words
            ],
            "usage": {
                "prompt_tokens": self._usage.prompt_tokens,
                "completion_tokens": self._usage.completion_tokens,
                "total_tokens": self._usage.total_tokens,
            },
        }


class FileJob:
    """One file on its way through the engine: a worker thread feeds it, `events` yields."""

    def __init__(self, engine: Engine, file: str, options: SessionOptions) -> None:
        self.file = file
        self.audio_s: float | None = None  # an estimate, known once the file is open
        self.token_s = engine.model_config.audio.token_s
        self._engine = engine
        self._options = options
        self._outbox: SimpleQueue[Event | Exception] = SimpleQueue()
        self._has_ended = threading.Event()
        self._session: Session | None = None
        self._is_cancelled = False

    def feed(self) -> None:
        """Open the file and hand all of it to a session, at the engine's pace."""
        if self._is_cancelled:
            return
        try:
            self._feed(self._open_audio())
        except SessionClosed:
            pass  # the session's own last event says why
        except Exception as err:  # whatever it is, `events` must not wait for ever
            self._outbox.put(err)
            if self._session is not None:
                self._session.close()
        if self._session is not None:
            self._has_ended.wait()  # its seat is free only then

    def cancel(self) -> None:
        """End the session, if there is one; from any thread."""
        self._is_cancelled = True
        if self._session is not None:
            self._session.close()

    def events(self) -> Iterator[Event]:
        """Yield the session's events to its end.

        Raises:
            VoxliteError: the file can't be read, or its session failed.
        """
        while True:
            match event := self._outbox.get():
                case Exception():
                    raise event
                case SessionEnded(error=None):
                    return
                case SessionEnded(error=error):
                    assert error is not None
                    raise error
                case _:
                    yield event

    def _feed(self, pieces: Iterator[NDArray[np.float32]]) -> None:
        self._session = self._engine.open(self._options, self._take)
        if self._is_cancelled:
            self._session.close()
        for piece in pieces:
            self._session.append(piece, timeout_s=float("inf"))
        self._session.finish()

    def _take(self, event: Event) -> None:
        self._outbox.put(event)
        if isinstance(event, SessionEnded):
            self._has_ended.set()

    def _open_audio(self) -> Iterator[NDArray[np.float32]]:
        if self.file == STDIN:
            if sys.stdin is None:
                raise InvalidInput("standard input is closed")
            return read_pcm16(sys.stdin.buffer)
        audio = AudioFile(self.file)
        rate = self._engine.model_config.audio.sampling_rate_hz
        self.audio_s = None if audio.num_samples is None else audio.num_samples / rate
        return audio.pieces()


def transcribe_files(
    engine: Engine,
    files: Sequence[str],
    *,
    options: SessionOptions,
    output_format: OutputFormat,
    output: Path | None,
) -> int:
    """Transcribe files and write the results. Return how many failed.

    Args:
        output: a file, or a folder that gets one file for each; None writes to standard output.
    """
    num_failed = 0
    jobs = [FileJob(engine, file, options) for file in files]
    with _Writer(output, output_format, files) as out, feeding(jobs, engine.max_sessions):
        for job in jobs:
            transcript = FileTranscript(engine, job.file, options)
            try:
                for event in _with_progress(job, is_hidden=out.is_live):
                    out.show(transcript.add(event))
                out.write(transcript)
            except VoxliteError as err:
                num_failed += 1
                out.fail()
                print(f"voxlite: {job.file}: {err}", file=sys.stderr)
    return num_failed


@contextmanager
def feeding(jobs: Sequence[FileJob], max_at_once: int) -> Iterator[None]:
    """Feed jobs in their order inside the `with`; cancel what is left of them at its end.

    The threads are daemons: one that waits for standard input can't be woken, and is left behind.
    """
    waiting = iter(jobs)
    lock = threading.Lock()

    def feed() -> None:
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            job.feed()

    threads = [
        threading.Thread(target=feed, name="feeder", daemon=True)
        for _ in range(min(max_at_once, len(jobs)))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for job in jobs:
            job.cancel()
        for thread in threads:
            thread.join(_MAX_JOIN_S)


class _Writer:
    """Where transcripts go: live to a terminal or pipe, into one file, or one file each.

    One file is written as a whole at the end, so that one from before stays until then.
    """

    def __init__(
        self, output: Path | None, output_format: OutputFormat, files: Sequence[str]
    ) -> None:
        """Check the output.

        Raises:
            InvalidInput: it can't be written, it is one of the inputs, or two of the files would go
                to the same place.
        """
        self._format = output_format
        self._folder = output if output is not None and output.is_dir() else None
        self._file = output if self._folder is None else None
        self._rendered: list[str] = []
        self.is_live = output is None and output_format == "text"
        self._has_shown = False
        if self._folder is not None:
            for path, count in Counter(map(self._path, files)).items():
                if count > 1:
                    raise InvalidInput(f"{path}: {count} of the files would be written to it")
        targets = [self._file] if self._folder is None else [self._path(file) for file in files]
        for target in targets:
            if target is not None:
                _check_target(target, files)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None and self._rendered:
            _write(self._file, "".join(self._rendered))

    def show(self, text: str) -> None:
        """Print text as it comes."""
        if self.is_live and text:
            self._has_shown = True
            print(text, end="", flush=True)

    def fail(self) -> None:
        """End the line of a transcript that broke off."""
        if self._has_shown:
            print(flush=True)
        self._has_shown = False

    def write(self, transcript: FileTranscript) -> None:
        """Take a whole transcript.

        Raises:
            InvalidInput: its file can't be written.
        """
        if self.is_live:
            print(flush=True)
            self._has_shown = False
            return
        text = transcript.render(self._format)
        if self._folder is not None:
            _write(self._path(transcript.file), text)
        elif self._file is not None:
            self._rendered.append(text)
        else:
            print(text, end="", flush=True)

    def _path(self, file: str) -> Path:
        assert self._folder is not None
        name = "stdin" if file == STDIN else Path(file).name
        return self._folder / (name + _SUFFIXES[self._format])


def _check_target(target: Path, files: Sequence[str]) -> None:
    if any(file != STDIN and _is_same(target, Path(file)) for file in files):
        raise InvalidInput(f"{target} is one of the inputs; it would be overwritten")
    existed = target.exists()
    try:
        target.open("a").close()  # changes nothing of a file that is there
    except OSError as err:
        raise InvalidInput(f"{target} can't be written: {err.strerror}") from err
    if not existed:
        target.unlink()


def _is_same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise InvalidInput(f"{path} can't be written: {err.strerror}") from err


def _with_progress(job: FileJob, *, is_hidden: bool) -> Iterable[Event]:
    """Yield the job's events, with a bar on standard error where it takes long."""
    console = Console(stderr=True)
    if is_hidden or not console.is_terminal:
        yield from job.events()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(Path(job.file).name, visible=False)
        decoded_s = 0.0
        for event in job.events():
            if isinstance(event, TextDelta):
                decoded_s += job.token_s * len(event.token_ids)
            is_long = job.audio_s is not None and job.audio_s > _LONG_AUDIO_S
            progress.update(task, completed=decoded_s, total=job.audio_s, visible=is_long)
            yield event
