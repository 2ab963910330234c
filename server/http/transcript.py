"""What a file's events add up to."""

from __future__ import annotations

from collections.abc import Callable

from voxlite.engine.events import TextDelta, Word
from voxlite.server.formats import ScoredWord
from voxlite.server.protocol.messages import TokenLogprob


class Transcript:
    """The text so far, its words, and, where the session gives them, its log probabilities."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._texts: list[str] = []
        self._has_text = False
        self._first_unworded = 0
        self._token_ids: list[int] = []
        self.words: list[Word] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, event: TextDelta) -> str:
        """Take a step's outcome. Return its text, without white space before the first word."""
        for token_id, logprob in zip(event.token_ids, event.logprobs or (), strict=False):
            token = self._token_bytes(token_id)
            if token:
                text = token.decode(errors="backslashreplace")
                self.logprobs.append(TokenLogprob(text, logprob, tuple(token)))
                self._token_ids.append(token_id)
        for word in event.words:
            self.words.append(self._scored(word))
        text = event.text if self._has_text else event.text.lstrip()
        self._has_text = self._has_text or bool(text)
        self._texts.append(text)
        return text

    def _scored(self, word: Word) -> ScoredWord:
        """Give a word the tokens that came since the last one."""
        first, self._first_unworded = self._first_unworded, len(self._token_ids)
        return ScoredWord(
            text=word.text,
            start_s=word.start_s,
            end_s=word.end_s,
            token_ids=tuple(self._token_ids[first:]),
            logprobs=tuple(token.logprob for token in self.logprobs[first:]),
        )
