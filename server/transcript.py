"""What the engine says of one utterance, put together: its text, words and log probabilities.

In: the engine's events. Out: what they add up to. The socket, the file upload and the command line
write it, each in its own form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from voxlite.engine.events import TextDelta, Word
from voxlite.server.formats import ScoredWord
from voxlite.server.protocol.messages import TokenLogprob


class Transcript:
    """The text so far, its words, and, where the session gives them, its log probabilities."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, keeps_words: bool = True) -> None:
        self._token_bytes = token_bytes
        self._keeps_words = keeps_words
        self._texts: list[str] = []
        self._first_unworded = 0
        self._token_ids: list[int] = []
        self.has_text = False  # other than white space
        self.words: list[Word] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """The text as the model writes it: with a space before its first word."""
        return "".join(self._texts)

    def add(self, event: TextDelta) -> str:
        """Take a step's outcome. Return its text, without white space before the first word."""
        self._add_logprobs(event)
        if self._keeps_words:
            self._add_words(event.words)
        text = event.text if self.has_text else event.text.lstrip()
        self.has_text = self.has_text or bool(text)
        self._texts.append(event.text)
        return text

    def _add_logprobs(self, event: TextDelta) -> None:
        for token_id, logprob in zip(event.token_ids, event.logprobs or (), strict=False):
            token = self._token_bytes(token_id)
            if token:
                # A token may end within a character.
                text = token.decode(errors="backslashreplace")
                self.logprobs.append(TokenLogprob(text, logprob, tuple(token)))
                self._token_ids.append(token_id)

    def _add_words(self, words: Iterable[Word]) -> None:
        """Give each word the tokens that came since the last one."""
        for word in words:
            first, self._first_unworded = self._first_unworded, len(self._token_ids)
            self.words.append(
                ScoredWord(
                    text=word.text,
                    start_s=word.start_s,
                    end_s=word.end_s,
                    token_ids=tuple(self._token_ids[first:]),
                    logprobs=tuple(token.logprob for token in self.logprobs[first:]),
                )
            )
