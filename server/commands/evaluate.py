"""Word error rate of a manifest through the streaming engine: `voxlite evaluate`.

In: a JSON-lines manifest, one object per clip: `audio` (a path, relative to the manifest), `text`,
and optionally `set`. Out: errors per set, counted with jiwer after both sides were put in lower
case and stripped of punctuation.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jiwer
from rich.progress import track

from voxlite.engine import Engine, InvalidInput, SessionOptions, VoxliteError
from voxlite.server.commands.transcribe import FileJob, FileTranscript, feeding

_NOT_A_WORD: Final = re.compile(r"[^\w']+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One line of a manifest."""

    audio: Path
    text: str
    set_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of one set, in words."""

    set_name: str
    num_clips: int
    num_words: int
    num_substitutions: int
    num_deletions: int
    num_insertions: int

    @property
    def num_errors(self) -> int:
        return self.num_substitutions + self.num_deletions + self.num_insertions

    @property
    def word_error_rate(self) -> float | None:
        """Errors per word of the references; None where these have no words."""
        return self.num_errors / self.num_words if self.num_words else None


def read_manifest(path: Path) -> list[Clip]:
    """Read a manifest.

    Raises:
        InvalidInput: it can't be read, a line isn't such an object, or it is empty.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidInput(f"{path}: {err}") from err
    clips = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            clip = Clip(
                audio=path.parent / row["audio"],
                text=str(row["text"] or ""),
                set_name=str(row.get("set", "all")),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise InvalidInput(
                f'{path}, line {number}: an object with "audio" and "text" is needed ({err!r})'
            ) from err
        clips.append(clip)
    if not clips:
        raise InvalidInput(f"{path} lists no clips")
    return clips


def normalize(text: str) -> str:
    """Put text in lower case and leave nothing but words, with one space between them."""
    return _NOT_A_WORD.sub(" ", text.lower()).strip()


def score(set_name: str, references: Sequence[str], hypotheses: Sequence[str]) -> Score:
    """Count the errors of one set, clip by clip."""
    substitutions = deletions = insertions = num_words = 0
    for reference, hypothesis in zip(
        map(normalize, references), map(normalize, hypotheses), strict=True
    ):
        num_words += len(reference.split())
        if not reference:  # jiwer takes no empty reference: all that was heard is made up
            insertions += len(hypothesis.split())
            continue
        measures = jiwer.process_words(reference, hypothesis)
        substitutions += measures.substitutions
        deletions += measures.deletions
        insertions += measures.insertions
    return Score(
        set_name=set_name,
        num_clips=len(references),
        num_words=num_words,
        num_substitutions=substitutions,
        num_deletions=deletions,
        num_insertions=insertions,
    )


def score_sets(clips: Sequence[Clip], hypotheses: Sequence[str]) -> list[Score]:
    """Score each set by itself, in the order in which they first appear."""
    by_set: dict[str, list[tuple[str, str]]] = {}
    for clip, hypothesis in zip(clips, hypotheses, strict=True):
        by_set.setdefault(clip.set_name, []).append((clip.text, hypothesis))
    return [score(name, *zip(*pairs, strict=True)) for name, pairs in by_set.items()]


def transcripts(
    engine: Engine, clips: Sequence[Clip], options: SessionOptions
) -> Iterator[str | None]:
    """Yield each clip's text in order, as many clips at once as the engine has seats for.

    A clip that can't be read is named on standard error and yields None.
    """
    jobs = [FileJob(engine, str(clip.audio), options) for clip in clips]
    with feeding(jobs, engine.max_sessions):
        for job in track(jobs, description="Transcribing", transient=True):
            transcript = FileTranscript(engine, job.file, options)
            try:
                for event in job.events():
                    transcript.add(event)
            except VoxliteError as err:
                print(f"voxlite: {job.file}: {err}", file=sys.stderr)
                yield None
            else:
                yield transcript.text
