"""Timed words in; segments, SubRip, WebVTT and OpenAI's verbose JSON out.

Pure functions, shared by the HTTP side and the command line. They don't know where the words come
from, nor which model said them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from voxlite.engine.events import Word

_SENTENCE_ENDS: Final = (".", "?", "!", "…", "。", "？", "！", "؟", "।")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredWord(Word):
    """A word with the text tokens that it was written with and their log probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRules:
    """When a segment ends: at a sentence's end, at a pause, or before it gets too long to read.

    A sentence's end counts only after `min_sentence_s`, so that "Dr." is not a segment. The limits
    on length are those of subtitles: two lines of 42 characters, 7 s.
    """

    max_pause_s: float = 0.8
    min_sentence_s: float = 1.0
    max_segment_s: float = 7.0
    max_characters: int = 84


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of words that is read at once. Never empty."""

    words: tuple[Word, ...]

    @property
    def start_s(self) -> float:
        return self.words[0].start_s

    @property
    def end_s(self) -> float:
        return self.words[-1].end_s

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words).strip()

    @property
    def token_ids(self) -> list[int]:
        """The text tokens of the words that have them."""
        scored = (word for word in self.words if isinstance(word, ScoredWord))
        return [token_id for word in scored for token_id in word.token_ids]

    @property
    def avg_logprob(self) -> float | None:
        """The mean log probability of the text tokens, None where none is known."""
        scored = (word for word in self.words if isinstance(word, ScoredWord))
        logprobs = [logprob for word in scored for logprob in word.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else None


_DEFAULT_RULES: Final = SegmentRules()


def segments_of(words: Iterable[Word], rules: SegmentRules = _DEFAULT_RULES) -> list[Segment]:
    """Cut words, in the order of their times, into segments. No word is lost or changed."""
    segments: list[Segment] = []
    run: list[Word] = []
    for word in words:
        if run and _ends_before(run, word, rules):
            segments.append(Segment(words=tuple(run)))
            run = []
        run.append(word)
    if run:
        segments.append(Segment(words=tuple(run)))
    return segments


def _ends_before(run: list[Word], word: Word, rules: SegmentRules) -> bool:
    duration_s = run[-1].end_s - run[0].start_s
    if word.start_s - run[-1].end_s > rules.max_pause_s:
        return True
    if run[-1].text.rstrip().endswith(_SENTENCE_ENDS) and duration_s >= rules.min_sentence_s:
        return True
    num_characters = sum(len(each.text) for each in run) + len(word.text)
    return (
        num_characters > rules.max_characters or word.end_s - run[0].start_s > rules.max_segment_s
    )


def to_srt(segments: Iterable[Segment]) -> str:
    """Write SubRip: a number, times with a comma, the text, an empty line."""
    return "".join(
        f"{number}\n{_clock(segment.start_s, ',')} --> {_clock(segment.end_s, ',')}\n"
        f"{_one_line(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def to_vtt(segments: Iterable[Segment]) -> str:
    """Write WebVTT: its header, then times with a point and the text, `&<>` escaped."""
    cues = (
        f"{_clock(segment.start_s, '.')} --> {_clock(segment.end_s, '.')}\n"
        f"{_vtt_escape(_one_line(segment.text))}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def to_verbose_json(
    text: str,
    segments: Iterable[Segment],
    *,
    duration_s: float,
    granularities: Collection[str] = ("segment", "word"),
) -> str:
    """Write OpenAI's verbose_json. What this model can't tell is null: language, no_speech_prob.

    Args:
        text: the whole text.
        segments: the same text, cut.
        duration_s: the length of the audio.
        granularities: which of "segment" and "word" to include.
    """
    segments = list(segments)
    body: dict[str, object] = {
        "task": "transcribe",
        "language": None,
        "duration": round(duration_s, 3),
        "text": text,
    }
    if "segment" in granularities:
        body["segments"] = [_segment_json(id_, segment) for id_, segment in enumerate(segments)]
    if "word" in granularities:
        body["words"] = [
            {
                "word": word.text.strip(),
                "start": round(word.start_s, 3),
                "end": round(word.end_s, 3),
            }
            for segment in segments
            for word in segment.words
        ]
    body["usage"] = {"type": "duration", "seconds": round(duration_s, 3)}
    return json.dumps(body, ensure_ascii=False)


def _segment_json(id_: int, segment: Segment) -> dict[str, object]:
    text = segment.text.encode()
    return {
        "id": id_,
        "seek": 0,
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": 0.0,
        "avg_logprob": segment.avg_logprob,
        # Whisper's measure of repetition: bytes of the text per byte of its zlib stream.
        "compression_ratio": round(len(text) / len(zlib.compress(text)), 4),
        "no_speech_prob": None,
    }


def _clock(time_s: float, decimal_mark: str) -> str:
    time_ms = round(max(time_s, 0.0) * 1000)
    hours, time_ms = divmod(time_ms, 3_600_000)
    minutes, time_ms = divmod(time_ms, 60_000)
    seconds, time_ms = divmod(time_ms, 1000)
    return f"{hours:02}:{minutes:02}:{seconds:02}{decimal_mark}{time_ms:03}"


def _vtt_escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _one_line(text: str) -> str:
    """Join lines: an empty line inside a cue would end it."""
    return " ".join(text.split())
