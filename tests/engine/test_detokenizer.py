"""Token bytes to text, and text to timed words, with the pads and markers of real output."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlite.engine.config import STREAMING_PAD_ID, STREAMING_WORD_ID
from voxlite.engine.detokenizer import Detokenizer, WordTimer
from voxlite.engine.events import Word
from voxlite.engine.tokenizer import Tokenizer

END_ID = 2
PAD, WORD = [STREAMING_PAD_ID], [STREAMING_WORD_ID]
TOKEN_S = 0.08

TEXTS = {
    "ascii": "Hello, world!",
    "emoji": "🙂 and 👩‍👩‍👧‍👦 and 🇫🇷",
    "hindi": "नमस्ते दुनिया",
    "arabic": "مرحبا بالعالم",
    "korean": "안녕하세요 세계",
    "rare chinese": "龘靐齉爩𠜎𪚥",
    "combining marks": unicodedata.normalize("NFD", "crème brûlée ǘ"),
}

# Without surrogates, which aren't text, and U+FFFD, which would hide a replacement.
any_text = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"))


def ids_of(text: str | bytes) -> list[int]:
    """Spell in single bytes: ids 1000 to 1255 are the bytes 0 to 255."""
    data = text.encode() if isinstance(text, str) else text
    return [1_000 + byte for byte in data]


def token_bytes(token_id: int) -> bytes:
    """As `Tokenizer.token_bytes`, for a vocabulary of the 256 bytes."""
    return bytes([token_id - 1_000]) if 1_000 <= token_id < 1_256 else b""


def deltas_of(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(token_bytes)
    return [detokenizer.push(token_id) for token_id in token_ids]


def words_of(*parts: list[int], start_s: float = 0.0, end_s: float = 1e9) -> list[Word]:
    """Push tokens 80 ms apart; the first speaks of the 80 ms after `start_s`."""
    detokenizer, timer = Detokenizer(token_bytes), WordTimer(TOKEN_S, start_s)
    words = []
    for i, token_id in enumerate([token_id for part in parts for token_id in part], start=1):
        text = detokenizer.push(token_id)
        time_s = min(start_s + i * TOKEN_S, end_s)
        words += timer.push(token_id, text, time_s, is_mid_character=detokenizer.is_mid_character)
    return words + timer.finish()


def texts_of(words: list[Word]) -> list[str]:
    return [word.text for word in words]


def test_the_real_tokenizer_spells_as_these_tests_do(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer(tiny_checkpoint / "tekken.json")
    ids = range(1_256)
    assert [tokenizer.token_bytes(id_) for id_ in ids] == [token_bytes(id_) for id_ in ids]


@pytest.mark.parametrize("num_pads", [0, 1, 20])
@pytest.mark.parametrize("name", TEXTS)
def test_characters_spread_over_tokens_come_out_whole(name: str, num_pads: int) -> None:
    ids = [id_ for byte_id in ids_of(TEXTS[name]) for id_ in [byte_id, *PAD * num_pads]]
    assert "".join(deltas_of(ids)) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_delta_comes_with_the_last_byte_of_its_character(name: str) -> None:
    expected = []
    for character in TEXTS[name]:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert deltas_of(ids_of(TEXTS[name])) == expected


@given(any_text, st.lists(st.sampled_from([*PAD, *WORD, END_ID, 0, 999, -5, 10**9]), max_size=4))
def test_tokens_without_text_change_nothing(text: str, others: list[int]) -> None:
    ids = ids_of(text)
    mixed = [id_ for i, byte_id in enumerate(ids) for id_ in [*others[i % 3 :], byte_id]]
    assert "".join(deltas_of(mixed)) == text


@given(st.binary())
def test_invalid_bytes_give_no_text_and_hide_none(data: bytes) -> None:
    deltas = "".join(deltas_of(ids_of(data)))
    assert deltas == data.decode("utf-8", errors="ignore")


@given(st.binary())
def test_every_delta_is_valid_utf_8(data: bytes) -> None:
    for delta in deltas_of(ids_of(data)):
        delta.encode()


def test_a_character_that_never_ends_gives_no_replacement_character() -> None:
    assert "".join(deltas_of(ids_of("é".encode()[:1] + b" yes" + "🙂".encode()[:3]))) == " yes"


def test_a_word_ends_where_its_marker_stands() -> None:
    (word,) = words_of(PAD * 9, WORD, ids_of(" world"), PAD * 3)
    assert (word.text, word.end_s) == (" world", pytest.approx(0.8))


def test_a_word_is_complete_at_the_next_pad() -> None:
    timer = WordTimer(TOKEN_S, 0.0)
    timer.push(1_000, " yes", 0.8, is_mid_character=False)
    assert texts_of(timer.push(STREAMING_PAD_ID, "", 0.88, is_mid_character=False)) == [" yes"]


def test_a_word_is_complete_at_the_next_marker() -> None:
    timer = WordTimer(TOKEN_S, 0.0)
    timer.push(1_000, " yes", 0.8, is_mid_character=False)
    assert texts_of(timer.push(STREAMING_WORD_ID, "", 0.88, is_mid_character=False)) == [" yes"]


def test_each_word_is_given_once() -> None:
    timer = WordTimer(TOKEN_S, 0.0)
    timer.push(1_000, " yes", 0.8, is_mid_character=False)
    assert len(timer.finish()) == 1
    assert timer.finish() == []


def test_the_last_word_comes_with_the_end() -> None:
    assert texts_of(words_of(WORD, ids_of(" the end."))) == [" the", " end."]


def test_words_that_share_a_marker_end_where_they_are_written() -> None:
    words = words_of(PAD * 9, WORD, ids_of(" a b"), PAD)
    assert [(word.text, round(word.end_s, 2)) for word in words] == [(" a", 0.8), (" b", 1.12)]


def test_a_word_without_a_marker_ends_where_it_is_written() -> None:
    (word,) = words_of(PAD * 9, ids_of("yes"), PAD)
    assert word.end_s == pytest.approx(0.8)


def test_a_marker_without_a_word_does_not_time_a_later_one() -> None:
    (word,) = words_of(WORD, PAD * 9, ids_of("yes"), PAD)
    assert word.end_s == pytest.approx(0.88)


def test_white_space_does_not_time_a_later_word() -> None:
    (word,) = words_of(ids_of(" "), PAD * 9, ids_of("yes"), PAD)
    assert (word.text, word.end_s) == (" yes", pytest.approx(0.88))


def test_white_space_alone_is_no_word() -> None:
    assert words_of(WORD, ids_of(" \n\t "), PAD, ids_of("\u3000")) == []


@pytest.mark.parametrize("name", TEXTS)
def test_pads_between_the_bytes_of_a_character_do_not_split_a_word(name: str) -> None:
    word = TEXTS[name].split()[0]
    first, *rest = word
    spread = [id_ for byte_id in ids_of(first) for id_ in [byte_id, *PAD]][: -len(PAD)]
    assert texts_of(words_of(WORD, spread, ids_of("".join(rest)))) == [word]


@pytest.mark.parametrize("other", [END_ID, 0, 999, 10**9], ids=["end", "unk", "special", "beyond"])
def test_other_tokens_without_text_do_not_split_a_word(other: int) -> None:
    assert texts_of(words_of(WORD, ids_of("wor"), [other], ids_of("ld"), PAD)) == ["world"]


@pytest.mark.parametrize("between", [PAD, WORD, PAD + WORD], ids=["pad", "marker", "both"])
def test_words_of_languages_without_spaces_are_cut_at_pads_and_markers(between: list[int]) -> None:
    assert texts_of(words_of(WORD, ids_of("你好"), between, ids_of("世界"))) == ["你好", "世界"]


@pytest.mark.parametrize("space", [" ", "\n", "\u3000", "\xa0"], ids=repr)
def test_words_are_cut_at_white_space_which_stays_with_the_next(space: str) -> None:
    assert texts_of(words_of(WORD, ids_of(f"one{space}two"), PAD)) == ["one", f"{space}two"]


def test_a_word_starts_where_the_one_before_it_ends() -> None:
    first, second = words_of(WORD, ids_of(" a"), PAD, WORD, ids_of(" longer"), PAD)
    assert second.start_s == first.end_s


def test_after_a_pause_a_word_takes_80_ms_a_character() -> None:
    _, word = words_of(WORD, ids_of(" a"), PAD * 100, WORD, ids_of(" four"), PAD)
    assert word.end_s - word.start_s == pytest.approx(4 * TOKEN_S)


def test_a_word_does_not_start_before_its_utterance() -> None:
    (word,) = words_of(WORD, ids_of(" word"), start_s=12.0)
    assert (word.start_s, word.end_s) == (12.0, pytest.approx(12.08))


scripts = st.lists(
    st.sampled_from([PAD, WORD, [END_ID], ids_of(" "), ids_of("a"), ids_of("né"), ids_of(" 🙂")])
    | st.binary(max_size=3).map(ids_of),
    max_size=40,
)


@given(scripts)
def test_words_make_up_the_text(parts: list[list[int]]) -> None:
    text = "".join(deltas_of([token_id for part in parts for token_id in part]))
    assert "".join(texts_of(words_of(*parts))).rstrip() == text.rstrip()


@given(scripts, st.floats(0, 2))
def test_times_are_in_order_and_within_the_audio(parts: list[list[int]], audio_s: float) -> None:
    words = words_of(*parts, start_s=5.0, end_s=5.0 + audio_s)
    times = [time for word in words for time in (word.start_s, word.end_s)]
    assert times == sorted(times)
    assert all(5.0 <= time <= 5.0 + audio_s for time in times)


@given(scripts)
def test_no_word_is_blank(parts: list[list[int]]) -> None:
    assert all(word.text.strip() for word in words_of(*parts))


@pytest.mark.parametrize("piece", ["a", " ", "\n"], ids=["letters", "spaces", "newlines"])
def test_nothing_grows_without_white_space_or_pads(piece: str) -> None:
    timer = WordTimer(token_s=0.08, last_end_s=0.0)
    words = [
        word
        for position in range(1000)
        for word in timer.push(1000, piece, 0.08 * position, is_mid_character=False)
    ]
    assert len(timer._text) < 200
    assert all(len(word.text) <= 200 for word in words)
