"""Words must be written at the right position, whole, and in order."""

import pytest

from training.clip_bank import Word
from training.targets import target_ids, word_position
from voxlite.engine.config import BOS_ID, STREAMING_PAD_ID, STREAMING_WORD_ID, AudioConfig

AUDIO = AudioConfig()
ONE, TWO = 1001, 1002
IDS = {"one": [ONE], "two": [TWO], "twenty": [ONE, TWO]}


def targets(words: list[Word], num_delay_tokens: int = 6, num_positions: int = 60) -> list[int]:
    return target_ids(AUDIO, words, num_delay_tokens, num_positions, lambda word: IDS[word])


def word(text: str, end_s: float) -> Word:
    return Word(text=text, start_s=max(0.0, end_s - 0.2), end_s=end_s)


def test_the_prompt_is_bos_and_pads() -> None:
    ids = targets([])
    assert ids[0] == BOS_ID
    assert ids[1:] == [STREAMING_PAD_ID] * 59


@pytest.mark.parametrize(
    ("end_s", "position"),
    [(0.01, 39), (0.08, 39), (0.0801, 40), (0.24, 41), (0.3, 42), (1.6, 58)],
)
def test_a_word_starts_at_the_first_position_after_its_end_and_the_delay(
    end_s: float, position: int
) -> None:
    assert word_position(AUDIO, word("one", end_s), num_delay_tokens=6) == position
    ids = targets([word("one", end_s)])
    assert ids[position : position + 2] == [STREAMING_WORD_ID, ONE]
    assert ids.count(STREAMING_PAD_ID) == 60 - 3


@pytest.mark.parametrize("num_delay_tokens", [1, 6, 15, 30])
def test_the_delay_moves_words_by_whole_tokens(num_delay_tokens: int) -> None:
    ids = targets([word("one", 0.3)], num_delay_tokens, num_positions=90)
    assert ids.index(STREAMING_WORD_ID) == 32 + num_delay_tokens + 4


def test_a_word_queues_behind_the_one_being_written() -> None:
    ids = targets([word("twenty", 0.30), word("one", 0.31), word("two", 1.0)])
    assert ids[42:48] == [STREAMING_WORD_ID, ONE, TWO, STREAMING_WORD_ID, ONE, STREAMING_PAD_ID]
    assert ids[51:53] == [STREAMING_WORD_ID, TWO]


def test_a_word_at_the_end_of_the_audio_fits_into_the_right_padding() -> None:
    num_audio_tokens = 20
    num_positions = 32 + num_audio_tokens + AUDIO.num_right_pad_tokens(6)
    ids = targets([word("twenty", num_audio_tokens * 0.08)], 6, num_positions)
    assert ids[-11:-8] != ids[-3:]
    assert ids[32 + 20 + 6 :][:3] == [STREAMING_WORD_ID, ONE, TWO]
    assert len(ids) == num_positions
