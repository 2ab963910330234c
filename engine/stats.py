"""What the engine says of itself: of each step, and of all steps since the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from voxlite.engine.errors import EngineFailure


class StepStats(NamedTuple):
    """One step, as told to `on_step`."""

    duration_s: float
    num_encoded_tokens: int
    num_decoded_sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counters run since the start; `step_age_s` is None between steps.

    Of the drafted tokens, num_tokens_out - num_passes were right.
    """

    num_sessions: int
    max_sessions: int
    num_steps: int
    num_samples_in: int
    num_tokens_out: int
    num_passes: int  # of a session through the decoder, each for one token or, drafting, several
    num_drafted_tokens: int
    num_free_encoder_blocks: int
    num_free_decoder_blocks: int
    num_given_up_blocks: int  # of the decoder, by sessions whose windows were cut to fit
    step_age_s: float | None
    failure: EngineFailure | None
