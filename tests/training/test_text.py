"""One way of writing words, whatever the source wrote."""

import pytest

from training.text import normalize, spell_number


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (10, "ten"),
        (21, "twenty one"),
        (90, "ninety"),
        (105, "one hundred five"),
        (2026, "two thousand twenty six"),
        (999_999, "nine hundred ninety nine thousand nine hundred ninety nine"),
    ],
)
def test_numbers_are_spelled(number: int, words: str) -> None:
    assert spell_number(number) == words


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        spell_number(number)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Press 1, or 12.", "press one or twelve"),
        ("I’d like it", "i'd like it"),
        ("'quoted' words", "quoted words"),
        ("call 007 4711", "call zero zero seven four seven one one"),
        ("... dot [.]", "dot"),
    ],
)
def test_text_is_lower_case_words_without_punctuation(text: str, written: str) -> None:
    assert normalize(text) == written
