"""Forced alignment: when is each word of a known text spoken?

A thin layer over pocketsphinx, whose English model is part of its package. Needed for recordings
without word times and for synthesisers that do not report them.
"""

from pathlib import Path

import numpy as np
from pocketsphinx import Decoder, get_model_path

from training.clip_bank import SAMPLE_RATE, Samples, Word

_FRAMES_PER_SECOND = 100
_SILENCE = ("<s>", "</s>", "<sil>", "[NOISE]", "[SPEECH]")


class WordAligner:
    """Finds word times; holds one pocketsphinx decoder with beams wide enough for odd voices."""

    def __init__(self) -> None:
        self._decoder = Decoder(
            lm=None, beam=1e-80, pbeam=1e-80, wbeam=1e-60, loglevel="FATAL", samprate=SAMPLE_RATE
        )

    def align(self, samples: Samples, text: str) -> tuple[Word, ...] | None:
        """Return the words of `text` with their times, or None where they can't be found.

        Args:
            samples: the recording, -1 to 1, at 16 kHz.
            text: its words, lower case, separated by spaces.
        """
        expected = text.split()
        if any(self._decoder.lookup_word(word) is None for word in expected):
            return None
        pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16).tobytes()
        self._decoder.set_align_text(text)
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        self._decoder.end_utt()
        segments = self._decoder.seg()
        if segments is None:
            return None
        words = []
        for segment in segments:
            name = segment.word.split("(")[0]
            if name in _SILENCE or not name:
                continue
            start_s = segment.start_frame / _FRAMES_PER_SECOND
            end_s = (segment.end_frame + 1) / _FRAMES_PER_SECOND
            words.append(Word(text=name, start_s=start_s, end_s=end_s))
        return tuple(words) if [word.text for word in words] == expected else None


def pronunciation_dictionary() -> Path:
    """Return the path of the pronunciation dictionary that comes with the aligner."""
    return Path(get_model_path()) / "en-us" / "cmudict-en-us.dict"
