"""The utterances of a session, as items with their text.

In: which utterances begin and end, and the engine's events. Out: session events. Times are moved
from the engine's clock, which runs only while it is given audio, to the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from voxlite.engine.config import STREAMING_PAD_ID
from voxlite.engine.events import TextDelta, UtteranceDone
from voxlite.server.protocol.messages import (
    Committed,
    Completed,
    Delta,
    Failed,
    Fault,
    ItemAdded,
    ItemDone,
    NewId,
    SessionEvent,
    TokenLogprob,
)
from voxlite.server.session.session_config import SessionConfig
from voxlite.server.transcript import Transcript


@dataclass(slots=True)
class Item:
    """One utterance. What the client hasn't asked for is not kept."""

    item_id: str
    clock_shift_s: float
    config: SessionConfig
    transcript: Transcript
    is_announced: bool = False
    is_cleared: bool = False
    has_audio: bool = False
    num_padding_tokens: int = 0
    num_sent_logprobs: int = 0

    def take_unsent_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities since the last delta."""
        unsent = tuple(self.transcript.logprobs[self.num_sent_logprobs :])
        self.num_sent_logprobs += len(unsent)
        return unsent


class Items:
    """A session's items: at most one is open, the others wait for the rest of their text."""

    def __init__(self, new_id: NewId, token_bytes: Callable[[int], bytes]) -> None:
        self._new_id = new_id
        self._token_bytes = token_bytes
        self._items: dict[int, Item] = {}
        self._num_utterances = 0
        self._previous_id: str | None = None
        self.open: Item | None = None

    @property
    def num_committed(self) -> int:
        """Items that wait for the rest of their text."""
        return len(self._items) - (self.open is not None)

    @property
    def are_waiting_for_text(self) -> bool:
        """Whether any of them has audio."""
        return any(item.has_audio for item in self._items.values() if item is not self.open)

    @property
    def has_been_committed(self) -> bool:
        return self._num_utterances > 0

    def begin(self, clock_shift_s: float, config: SessionConfig) -> Item:
        """Begin an item.

        Args:
            clock_shift_s: what to add to the engine's times.
        """
        assert self.open is None
        transcript = Transcript(
            self._token_bytes, keeps_words=config.has_words or config.has_segments
        )
        self.open = Item(self._new_id("item"), clock_shift_s, config, transcript)
        self._items[self._num_utterances] = self.open
        return self.open

    def commit(self) -> Iterator[SessionEvent]:
        """End the open item; its text may still be coming."""
        assert self.open is not None
        item, previous_id = self.open, self._previous_id
        self.open, self._previous_id = None, item.item_id
        self._num_utterances += 1
        yield Committed(item_id=item.item_id, previous_item_id=previous_id)
        if not item.is_announced:
            item.is_announced = True
            yield ItemAdded(item_id=item.item_id, previous_item_id=previous_id)
        yield ItemDone(item_id=item.item_id, previous_item_id=previous_id)

    def clear(self) -> None:
        """End the open item and drop its text, sent or to come."""
        assert self.open is not None
        self.open.is_cleared = True
        self.open = None
        self._num_utterances += 1

    def take_delta(self, event: TextDelta) -> Iterator[SessionEvent]:
        """Take the outcome of a step."""
        item = self._items[event.utterance_id]
        if item.is_cleared:
            return
        _count_padding(item, event.token_ids)
        words = tuple(
            replace(
                word,
                start_s=word.start_s + item.clock_shift_s,
                end_s=word.end_s + item.clock_shift_s,
            )
            for word in event.words
        )
        is_first = not item.transcript.has_text
        item.transcript.add(replace(event, words=words))
        if event.text or (words and item.config.has_words):
            if not item.is_announced:
                item.is_announced = True
                yield ItemAdded(item_id=item.item_id, previous_item_id=self._previous_id)
            yield Delta(
                item_id=item.item_id,
                text=event.text,
                is_first=is_first,
                logprobs=item.take_unsent_logprobs() if item.config.has_logprobs else None,
                words=words if item.config.has_words else (),
            )

    def take_done(self, event: UtteranceDone) -> Iterator[SessionEvent]:
        """Take the end of an utterance."""
        item = self._items.pop(event.utterance_id)
        if not item.is_cleared:
            yield Completed(
                item_id=item.item_id,
                text=item.transcript.text,
                usage=event.usage,
                duration_s=event.end_s - event.start_s,
                logprobs=tuple(item.transcript.logprobs) if item.config.has_logprobs else None,
                words=tuple(item.transcript.words),
                config=item.config,
            )

    def fail(self, fault: Fault, message: str) -> Iterator[SessionEvent]:
        """Give up the items that wait for text."""
        waiting = [item for item in self._items.values() if item is not self.open]
        self._items.clear()
        self.open = None
        for item in waiting:
            if not item.is_cleared:
                yield Failed(item_id=item.item_id, fault=fault, message=message)


def _count_padding(item: Item, token_ids: tuple[int, ...]) -> None:
    for token_id in token_ids:
        is_padding = token_id == STREAMING_PAD_ID
        item.num_padding_tokens = item.num_padding_tokens + 1 if is_padding else 0
