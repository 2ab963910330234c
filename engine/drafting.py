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
from dataclasses import dataclass
from typing import Final

from voxlite.engine.config import STREAMING_PAD_ID, STREAMING_WORD_ID

# A pad, and a word beside it.
ROWS_PER_DRAFT: Final = 2
# Drafts have to give so many tokens more a pass, as rows aren't quite free: seven take a fifth to a
# quarter longer than one.
_MIN_YIELD: Final = 0.25
_YIELD_PASSES: Final = 8


@dataclass(slots=True)
class DraftYield:
    """Whether drafting pays, for one utterance: where it doesn't, it is tried now and then."""

    _mean: float = 2 * _MIN_YIELD  # right drafts of a pass that drafts, over the last ones
    _num_passes_without: int = 0

    @property
    def is_worth_it(self) -> bool:
        return self._mean >= _MIN_YIELD or self._num_passes_without >= _YIELD_PASSES

    def count(self, num_drafts: int, num_right: int) -> None:
        """Take up how one pass fared."""
        if num_drafts == 0:
            self._num_passes_without += 1
            return
        self._num_passes_without = 0
        self._mean += (num_right - self._mean) / _YIELD_PASSES


def default_num_draft_tokens(*, is_int8: bool, is_cpu: bool, is_bfloat16: bool) -> int:
    """Return how many positions to draft: three give two to three tokens a pass in speech.

    On a CPU rows are nearly free up to a tile of a linear layer's: seven rows in int8, which are
    three drafts, and five in bfloat16, which are two. In float32 they aren't.
    """
    if is_int8 or not is_cpu:
        return 3
    return 2 if is_bfloat16 else 0


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
