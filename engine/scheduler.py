"""Choose what each step works on.

In: the sessions. Out: which of them encode how many tokens, and which decode. It moves no data and
runs no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from voxlite.engine.active_session import ActiveSession
from voxlite.engine.drafting import ROWS_PER_DRAFT

# Up to this many rows an int8 product takes hardly longer than with one.
_MAX_DRAFT_ROWS: Final = 8


class EncodePlan(NamedTuple):
    session: ActiveSession
    num_tokens: int


class DecodePlan(NamedTuple):
    session: ActiveSession
    num_drafts: int


class Scheduler:
    """Encode for sessions whose decoder waits for audio; decode wherever its input is there.

    A session encodes only when its decoder has run dry, and then all audio that is there, up to
    `max_encode_tokens`: live that is one token, with a backlog the encoder's weights are read once
    for many. `max_batched_tokens` bounds a step over all sessions; those that had to wait come
    first in the next.
    """

    def __init__(
        self, *, max_encode_tokens: int, max_batched_tokens: int, num_draft_tokens: int
    ) -> None:
        self._max_encode_tokens = max_encode_tokens
        self._max_batched_tokens = max_batched_tokens
        self._num_draft_tokens = num_draft_tokens
        self._first_session_id = 0

    def to_encode(self, sessions: Iterable[ActiveSession]) -> list[EncodePlan]:
        """Return who encodes how many tokens in this step."""
        plans: list[EncodePlan] = []
        budget = self._max_batched_tokens
        for session in self._in_turn(sessions):
            utterance = session.utterance
            if utterance is None or utterance.can_decode:
                continue
            num_tokens = min(utterance.num_encodable_tokens, self._max_encode_tokens)
            if num_tokens == 0:
                continue
            if num_tokens > budget and plans:
                self._first_session_id = session.session_id
                break
            plans.append(EncodePlan(session, num_tokens))
            budget -= num_tokens
        return plans

    def to_decode(self, sessions: Iterable[ActiveSession]) -> list[DecodePlan]:
        """Return who decodes in this step, every session whose input is there, and who drafts.

        Drafts fill the pass up to 8 rows, shared alike: rows beyond cost time that
        sessions without a backlog would wait.
        """
        ready = [s for s in sessions if s.utterance is not None and s.utterance.can_decode]
        plans = []
        num_rows_left = _MAX_DRAFT_ROWS - len(ready)
        for num_planned, session in enumerate(ready):
            assert session.utterance is not None
            share = max(0, num_rows_left) // (len(ready) - num_planned)
            num_drafts = min(
                self._num_draft_tokens,
                share // ROWS_PER_DRAFT,
                session.utterance.num_draftable_tokens,
            )
            plans.append(DecodePlan(session, num_drafts))
            num_rows_left -= ROWS_PER_DRAFT * num_drafts
        return plans

    def _in_turn(self, sessions: Iterable[ActiveSession]) -> list[ActiveSession]:
        """Order sessions by age, but start where the last step's budget ran out."""
        first = self._first_session_id
        return sorted(sessions, key=lambda s: (s.session_id < first, s.session_id))
