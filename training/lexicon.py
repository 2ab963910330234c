"""Pronunciations, as labels for the encoder's helper loss.

Words share their sounds, so a helper loss on sounds lets every speaker of any sentence teach the
encoder something about every other word.
"""

from pathlib import Path

# How long a sound lasts within its word, relative to the others.
_VOWEL_WEIGHT = 1.5
_VOWELS = frozenset("AEIOU")


class Lexicon:
    """Maps words to sound ids; 0 is silence, ids above are the dictionary's phones."""

    def __init__(self, dictionary: Path) -> None:
        self._phones: dict[str, list[str]] = {}
        with dictionary.open() as lines:
            for line in lines:
                word, *phones = line.split()
                # Alternative pronunciations are marked "word(2)"; the first one will do.
                if "(" not in word:
                    self._phones[word] = phones
        names = sorted({phone for phones in self._phones.values() for phone in phones})
        self._ids = {name: index for index, name in enumerate(names, start=1)}

    @property
    def num_sounds(self) -> int:
        """Number of sound ids, silence included."""
        return len(self._ids) + 1

    def sounds(self, word: str) -> list[tuple[int, float]] | None:
        """Return (sound id, share of the word's duration) in order, or None for unknown words."""
        phones = self._phones.get(word)
        if phones is None:
            return None
        weights = [_VOWEL_WEIGHT if phone[0] in _VOWELS else 1.0 for phone in phones]
        total = sum(weights)
        return [(self._ids[p], w / total) for p, w in zip(phones, weights, strict=True)]
