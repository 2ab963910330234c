"""What a session says: frozen records handed to its `on_event` callback on the engine thread.

For each utterance: `TextDelta` once per decoder step (most have empty text, since most tokens are
pads), then one `UtteranceDone`. After everything else of a session: exactly one `SessionEnded`.
Times are in seconds on the session's clock, which starts with its first sample and runs on over
utterances.
"""

from __future__ import annotations

from dataclasses import dataclass

from voxlite.engine.errors import VoxliteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word as it stands in the text, leading white space included, with its times.

    The model marks where words end. The start is the previous word's end, or, after a pause, one
    token (80 ms) per character before the end.
    """

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The outcome of one decoder step of one session.

    `text` is valid UTF-8 and append-only: the sum of all deltas of an utterance is its text.
    `token_ids` holds every generated id, pads included; `logprobs` the natural-log probability of
    each, or None where the session didn't ask. `words` are those that this step completed.
    """

    session_id: int
    utterance_id: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None
    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one utterance, counted as vLLM and transformers do."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class UtteranceDone:
    """An utterance was flushed and all its text has been sent, or it was discarded.

    `start_s` and `end_s` span its audio, without padding. An utterance without audio has usage 0;
    a discarded one, what had been computed.
    """

    session_id: int
    utterance_id: int
    usage: Usage
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """The last event of a session: `error` is None unless it failed."""

    session_id: int
    error: VoxliteError | None


Event = TextDelta | UtteranceDone | SessionEnded
