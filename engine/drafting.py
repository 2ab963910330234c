"""Guess the next tokens of a session with a backlog, so that one pass of the decoder gives several.

Most tokens are pads, so that a chain of them is one guess; the first that isn't is nearly always
`[STREAMING_WORD]`, so that beside each pad of the chain a row guesses that, and finds the word's
first piece. With two drafts after an id at position 7:

    row          0        1        2        3        4
    id           known    pad      pad      word     word
    position     7        8        9        8        9
    cache slot   7        8        9        10       11      (of the stream)

In: positions and ids. Out: rows to compute, and which of them were right. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import STREAMING_PAD_ID, STREAMING_WORD_ID


def drafted_ids(num_drafts: int) -> list[int]:
    """Return the ids of the rows behind the known ones: a chain of pads, and words beside it."""
    return [STREAMING_PAD_ID] * num_drafts + [STREAMING_WORD_ID] * num_drafts


def right_rows(next_ids: Sequence[int], num_drafts: int) -> list[int]:
    """Return the rows whose next ids are those that would come one by one, in that order.

    Args:
        next_ids: what the model says after the last known row and each row of `drafted_ids`.
    """
    rows = [0]
    for draft in range(1, num_drafts + 1):
        next_id = next_ids[rows[-1]]
        if next_id == STREAMING_WORD_ID:
            rows.append(num_drafts + draft)
            break
        if next_id != STREAMING_PAD_ID:
            break
        rows.append(draft)
    return rows
