"""Ids as real speech has them, put in place of what a random model would choose.

In: the times of words. Out: a choice of tokens for the model runner, so that drafting pads is
measured as it would be on speech.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Final

import torch
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from torch import Tensor

from voxlite.engine.config import STREAMING_PAD_ID, STREAMING_WORD_ID, AudioConfig
from voxlite.engine.errors import InvalidInput

_FIRST_TEXT_ID: Final = 1000


class Replay:
    """The id at each position; in force while `is_on`."""

    def __init__(self, path: Path, audio: AudioConfig, delay_ms: int, seconds: float) -> None:
        """Read word times.

        Args:
            path: JSON lines with `dur`, and `words` as [word, start_s, end_s]; one after the other.
            seconds: how much of them to play, at most what they last.

        Raises:
            InvalidInput: the file can't be read, or lasts less than `seconds`.
        """
        num_delay_tokens = audio.num_delay_tokens(delay_ms)
        first = audio.num_prompt_tokens(num_delay_tokens)
        num_positions = first + ceil(seconds / audio.token_s) + num_delay_tokens + 32
        self.ids = [STREAMING_PAD_ID] * num_positions
        published = importlib.resources.files("mistral_common") / "data/tekken_240911.json"
        tokens = Tekkenizer.from_file(Path(str(published)))
        start_s, next_free = 0.0, first
        try:
            for line in path.read_text().splitlines():
                clip = json.loads(line)
                for word, _, end_s in clip["words"]:
                    spoken = ceil((start_s + end_s) / audio.token_s)
                    at = max(next_free, audio.num_left_pad_tokens + num_delay_tokens + spoken)
                    num_pieces = len(tokens.encode(f" {word}", bos=False, eos=False))
                    ids = [STREAMING_WORD_ID, *[_FIRST_TEXT_ID] * num_pieces]
                    next_free = at + len(ids)
                    self.ids[at:next_free] = ids
                start_s += clip["dur"]
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise InvalidInput(f"{path}: not a file of word times: {err!r}") from err
        if start_s < seconds:
            raise InvalidInput(f"{path}: lasts {start_s:.1f} s, not {seconds:.1f} s")
        self.ids = self.ids[:num_positions]
        self.is_on = False

    def pick(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Choose the replay's token, after the model has done all its work."""
        best = logits.argmax(dim=-1)
        if not self.is_on:
            return best
        # The token generated at a position stands at the next one.
        forced = [self.ids[position + 1] for position in positions]
        return torch.tensor(forced, device=logits.device)
