"""The utterances of one session: each is one of the engine's and an item of the client's.

In: where an utterance begins and ends in the client's audio, and its samples. Out: commands to the
engine, and the events that say so to the client. It doesn't know what decides where they end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from voxlite.engine.errors import Overloaded
from voxlite.server.async_engine import EngineSession
from voxlite.server.protocol.messages import SessionEvent
from voxlite.server.session.audio_decoder import SAMPLE_RATE_HZ
from voxlite.server.session.engine_feed import EngineFeed
from voxlite.server.session.held_audio import AudioPiece
from voxlite.server.session.items import Item, Items
from voxlite.server.session.session_config import SessionConfig

_MAX_WAITING_ITEMS: Final = 256


class Utterances:
    """Begin, feed and end a session's utterances. At most one is open."""

    def __init__(
        self,
        engine_session: EngineSession,
        items: Items,
        config: SessionConfig,
        emit: Callable[[SessionEvent], None],
    ) -> None:
        self.items = items
        self.config = config  # of the utterances that begin from now on
        self.engine_feed = EngineFeed(engine_session)
        self._engine_session = engine_session
        self._emit = emit

    @property
    def open(self) -> Item | None:
        """The open one's item."""
        return self.items.open

    def begin(self, position: int) -> Item:
        """Begin an utterance at a position of the client's audio."""
        clock_shift_s = (position - self.engine_feed.num_samples) / SAMPLE_RATE_HZ
        return self.items.begin(clock_shift_s, self.config)

    async def feed(self, audio: AudioPiece, deadline_s: float) -> None:
        """Give the engine samples of the open utterance, which begins here if there is none.

        Raises:
            Overloaded: the engine had no room before the deadline.
            SessionClosed: the session has ended.
        """
        if len(audio.samples) == 0:
            return
        item = self.open or self.begin(audio.position)
        item.has_audio = True
        await self.engine_feed.append(audio.samples, deadline_s)

    def commit(self, position: int) -> None:
        """End the open utterance, or, where there is none, an empty one that begins here."""
        if self.open is None:
            self.begin(position)
        self._engine_session.commit()
        for event in self.items.commit():
            self._emit(event)

    def discard(self) -> None:
        """End the open utterance, if there is one, and drop its text."""
        if self.open is not None:
            self._engine_session.discard()
            self.items.clear()

    async def wait_for_fewer(self, deadline_s: float) -> None:
        """Wait until one more utterance may wait for its text.

        Raises:
            Overloaded: too many of them waited until the deadline.
        """
        while (num_items := self.items.num_committed) >= _MAX_WAITING_ITEMS:
            if not await self.engine_feed.wait_for_progress(deadline_s):
                raise Overloaded(
                    f"{num_items} utterances are waiting for their text, the most at once"
                )
