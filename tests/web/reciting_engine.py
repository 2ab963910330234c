"""An engine that recites a text while somebody speaks, whatever is said.

Every 320 ms of sound gives the next word; the word's times come one token after its letters, as the
real engine's do. What is heard may be resampled and shifted on its way, as a browser does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.server.fake_engine import AUDIO, FIRST_TEXT_ID, FakeEngine
from voxlite.engine.config import STREAMING_PAD_ID
from voxlite.engine.events import TextDelta, Word

TOKENS_PER_WORD = 4
TEXT = (
    "The quick brown fox jumps over the lazy dog. "
    "Pack my box with five dozen liquor jugs. "
    "How vexingly quick daft zebras jump!"
)
_QUIET_RMS = 0.01


class RecitingEngine(FakeEngine):
    """Recites `text` anew in each session."""

    def __init__(self, text: str = TEXT, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.words = text.split()
        self._states: dict[int, _Recital] = {}

    def _write_token(self, id_: int, session: Any) -> None:
        recital = self._states.setdefault(id_, _Recital())
        start = session.num_written * AUDIO.samples_per_token
        heard = session.audio[start : start + AUDIO.samples_per_token]
        end_s = (session.first_sample + start) / AUDIO.sampling_rate_hz + AUDIO.token_s
        session.num_written += 1
        words, recital.untimed = recital.untimed, ()
        text = ""
        if len(heard) and np.sqrt(np.mean(np.square(heard))) > _QUIET_RMS:
            recital.num_loud += 1
            number, rest = divmod(recital.num_loud, TOKENS_PER_WORD)
            if rest == 0 and number <= len(self.words):
                text = " " + self.words[number - 1]
                start_s = end_s - TOKENS_PER_WORD * AUDIO.token_s
                recital.untimed = (Word(text=text, start_s=start_s, end_s=end_s),)
        session.on_event(
            TextDelta(
                session_id=id_,
                utterance_id=session.num_utterances,
                token_ids=(FIRST_TEXT_ID if text else STREAMING_PAD_ID,),
                text=text,
                logprobs=None,
                words=words,
            )
        )


class _Recital:
    """How far one session's recital has come."""

    def __init__(self) -> None:
        self.num_loud = 0
        self.untimed: tuple[Word, ...] = ()
