"""Digits are cut out of a spoken string only where silence parts them from their neighbours."""

import numpy as np

from training.clip_bank import SAMPLE_RATE, Samples, Word
from training.synthesize import cut_words


def spoken(*sound_s: tuple[float, float], duration_s: float) -> Samples:
    """A tone in each of the given times, silence elsewhere."""
    time = np.arange(int(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    is_sound = np.any([(start <= time) & (time < end) for start, end in sound_s], axis=0)
    samples: Samples = (0.5 * np.sin(2 * np.pi * 300 * time) * is_sound).astype(np.float32)
    return samples


def test_words_with_pauses_around_them_are_cut_out_and_trimmed() -> None:
    samples = spoken((0.1, 0.4), (0.6, 1.0), duration_s=1.1)
    # The aligner gives the pause to the first word.
    words = [
        Word(text="one", start_s=0.1, end_s=0.58),
        Word(text="two", start_s=0.58, end_s=1.0),
    ]
    cut = dict(cut_words(samples, words))
    assert list(cut) == ["one", "two"]
    # 20 ms of silence are left at each end, as far as there are any.
    assert abs(len(cut["one"]) / SAMPLE_RATE - 0.34) < 0.002
    assert abs(len(cut["two"]) / SAMPLE_RATE - 0.44) < 0.002


def test_words_that_run_into_each_other_are_not_cut() -> None:
    samples = spoken((0.1, 1.0), (1.3, 1.7), duration_s=1.8)
    words = [
        Word(text="one", start_s=0.1, end_s=0.5),
        Word(text="two", start_s=0.5, end_s=1.1),
        Word(text="three", start_s=1.1, end_s=1.7),
    ]
    assert [text for text, _ in cut_words(samples, words)] == ["three"]


def test_a_word_that_was_not_spoken_is_left_out() -> None:
    samples = spoken((0.1, 0.5), duration_s=1.5)
    words = [
        Word(text="one", start_s=0.1, end_s=0.7),
        Word(text="two", start_s=0.7, end_s=1.4),
    ]
    assert [text for text, _ in cut_words(samples, words)] == ["one"]
