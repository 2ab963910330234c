"""Segments, SubRip, WebVTT and verbose JSON from timed words."""

from __future__ import annotations

import json

import pytest

from voxlite.engine.events import Word
from voxlite.server.formats import (
    ScoredWord,
    SegmentRules,
    segments_of,
    to_srt,
    to_verbose_json,
    to_vtt,
)


def words_of(text: str, start_s: float = 0.0, word_s: float = 0.4) -> list[Word]:
    """Each word lasts `word_s` and starts where the last one ended."""
    return [
        Word(text=f" {word}", start_s=start_s + i * word_s, end_s=start_s + (i + 1) * word_s)
        for i, word in enumerate(text.split())
    ]


def test_no_words_give_no_segments() -> None:
    assert segments_of([]) == []
    assert to_srt([]) == ""
    assert to_vtt([]) == "WEBVTT\n\n"


def test_a_sentence_ends_a_segment() -> None:
    segments = segments_of(words_of("this is one. this is two"))
    assert [segment.text for segment in segments] == ["this is one.", "this is two"]


def test_an_abbreviation_does_not_end_a_segment() -> None:
    segments = segments_of(words_of("Dr. Smith is here"))
    assert [segment.text for segment in segments] == ["Dr. Smith is here"]


def test_a_pause_ends_a_segment() -> None:
    segments = segments_of([*words_of("one two"), *words_of("three", start_s=2.0)])
    assert [(s.text, s.start_s, s.end_s) for s in segments] == [
        ("one two", 0.0, 0.8),
        ("three", 2.0, 2.4),
    ]


def test_a_segment_stays_within_its_limits() -> None:
    rules = SegmentRules()
    segments = segments_of(words_of("word " * 100), rules)
    assert sum(len(segment.words) for segment in segments) == 100
    for segment in segments:
        assert segment.end_s - segment.start_s <= rules.max_segment_s + 1e-9
        assert len(segment.text) <= rules.max_characters


@pytest.mark.parametrize("text", ["你好。世界", "a b. c? d! e", "नमस्ते। दुनिया"])
def test_no_word_is_lost(text: str) -> None:
    words = words_of(text, word_s=1.5)
    assert [word for segment in segments_of(words) for word in segment.words] == words


def test_srt() -> None:
    segments = segments_of([*words_of("hello there"), *words_of("again", start_s=3723.4567)])
    assert to_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:00,800\nhello there\n\n"
        "2\n01:02:03,457 --> 01:02:03,857\nagain\n\n"
    )


def test_vtt_escapes_markup() -> None:
    assert to_vtt(segments_of(words_of("a<b & c-->d"))) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.200\na&lt;b &amp; c--&gt;d\n\n"
    )


def test_verbose_json_holds_what_was_asked_for() -> None:
    segments = segments_of(words_of("hello there"))
    both = json.loads(to_verbose_json("hello there", segments, duration_s=1.0))
    assert both["text"] == "hello there"
    assert both["duration"] == 1.0
    assert both["words"] == [
        {"word": "hello", "start": 0.0, "end": 0.4},
        {"word": "there", "start": 0.4, "end": 0.8},
    ]
    assert both["segments"][0]["avg_logprob"] is None
    words_only = to_verbose_json("hello there", segments, duration_s=1.0, granularities=("word",))
    assert "segments" not in json.loads(words_only)


def test_scored_words_give_tokens_and_their_mean_log_probability() -> None:
    words = [
        ScoredWord(text=" a", start_s=0, end_s=0.1, token_ids=(1000,), logprobs=(-0.5,)),
        ScoredWord(text=" bc", start_s=0.1, end_s=0.2, token_ids=(7, 8), logprobs=(-1.0, -1.5)),
    ]
    segment = json.loads(to_verbose_json("a bc", segments_of(words), duration_s=0.2))["segments"][0]
    assert segment["tokens"] == [1000, 7, 8]
    assert segment["avg_logprob"] == pytest.approx(-1.0)
