"""From token ids to text and timed words, one utterance at a time.

In: generated ids in order, each with the time that it speaks of. Out: text deltas that are valid
UTF-8, and words with times. It knows neither audio nor model, only bytes and markers.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from voxlite.engine.config import STREAMING_PAD_ID, STREAMING_WORD_ID
from voxlite.engine.events import Word

# Without white space or pads, text is cut into words of this length, so that none grows for ever.
_MAX_WORD_CHARACTERS: Final = 200


class Detokenizer:
    """Turn the bytes of tokens into text as soon as they make whole characters.

    A character may be spread over tokens, with pads between them. Bytes that can't be UTF-8 give no
    text, so no delta ever holds U+FFFD for them.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    @property
    def is_mid_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that it completes."""
        return self._decoder.decode(self._token_bytes(token_id))


@dataclass(slots=True)
class WordTimer:
    """Cut an utterance's text into words and give each its times.

    A word ends where `[STREAMING_WORD]` stands, which the model writes when the word has been
    spoken; its text follows. It is complete at the next marker, pad or white space:

        token      pad   WORD  " wor"  "ld"  pad
        speaks of  0.72  0.80  0.88    0.96  1.04   (end of its 80 ms)     " world" ends at 0.80 s

    Without a marker (none is promised: words that follow each other closely share one), the word's
    first character takes its place. No word is timed earlier than the word before it.
    """

    token_s: float
    last_end_s: float
    _text: str = ""
    _end_s: float | None = None
    _done: list[Word] = field(default_factory=list)

    def push(self, token_id: int, text: str, end_s: float, *, is_mid_character: bool) -> list[Word]:
        """Take a token with its text and the end of the audio that it speaks of, in seconds.

        Returns:
            The words that it completes.
        """
        if token_id == STREAMING_WORD_ID:
            self._close()
            self._end_s = end_s
        elif token_id == STREAMING_PAD_ID and not is_mid_character:
            self._close()
            self._end_s = None  # a marker belongs to what follows it at once
        for char in text:
            if char.isspace():
                self._close()
            elif self._end_s is None:
                self._end_s = end_s
            self._text += char
            if len(self._text) >= _MAX_WORD_CHARACTERS:
                self._close()
                self._text = ""  # nothing but white space, if anything is left
        return self._take()

    def finish(self) -> list[Word]:
        """End the utterance and return its last word, if one is open."""
        self._close()
        return self._take()

    def _close(self) -> None:
        if self._text.strip():
            assert self._end_s is not None
            end_s = max(self._end_s, self.last_end_s)
            longest_s = self.token_s * len(self._text.strip())
            start_s = max(self.last_end_s, end_s - longest_s)
            self._done.append(Word(text=self._text, start_s=start_s, end_s=end_s))
            self.last_end_s = end_s
            self._text = ""
            self._end_s = None

    def _take(self) -> list[Word]:
        done, self._done = self._done, []
        return done
