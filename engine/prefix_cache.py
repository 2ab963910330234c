"""The start that all utterances share: computed once, then copied.

Every utterance begins with silence, and its prompt with the same tokens. Until the first sample
can be heard, what the encoder makes of that is always the same, and what the decoder makes of it
depends on the delay alone: 31 of a prompt's 39 tokens at 480 ms.

In: block tables of utterances at their very start. Out: the same tables with that start's keys and
values written.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.config import AudioConfig, prompt_ids
from voxlite.engine.kv_cache_manager import BlockTable
from voxlite.engine.model.attention import LayerCache
from voxlite.engine.model_runner import DecodeJob, EncodeJob, EncodeResult, ModelRunner


class PrefixCache:
    """Keys and values of the shared start, kept from the first utterance that computes it."""

    def __init__(self, runner: ModelRunner, audio: AudioConfig) -> None:
        self._runner, self._audio = runner, audio
        # The last token of the left padding reads 40 samples of what follows it.
        self.num_tokens = audio.num_left_pad_tokens - 1
        self._encoded: tuple[EncodeResult, list[LayerCache]] | None = None
        self._decoded: dict[int, list[LayerCache]] = {}

    @property
    def is_encoded(self) -> bool:
        """Whether an utterance has computed the encoder's part."""
        return self._encoded is not None

    def encode(self, table: BlockTable) -> EncodeResult:
        """Write the encoder's keys and values of the first `num_tokens` tokens.

        Returns:
            (num_tokens, decoder dim) adapter outputs, and the conv stem's state after them.
        """
        cache = self._runner.encoder_cache
        slots = self._slots(table, self.num_tokens * self._runner.frames_per_token)
        if self._encoded is None:
            stream = AudioStream(self._audio, num_right_pad_tokens=0)
            stream.append(np.zeros(self._audio.look_ahead_samples, np.float32))
            job = EncodeJob(
                spans=stream.take(self.num_tokens),
                conv_state=self._runner.initial_conv_state(),
                first_token=0,
                table=table,
            )
            (result,) = self._runner.encode([job])
            self._encoded = result, cache.copy_out(slots)
        else:
            cache.copy_in(slots, self._encoded[1])
        return self._encoded[0]

    def decode(self, table: BlockTable, delay_ms: int) -> None:
        """Write the decoder's keys and values of the first `num_tokens` positions."""
        cache = self._runner.decoder_cache
        slots = self._slots(table, self.num_tokens)
        if delay_ms in self._decoded:
            cache.copy_in(slots, self._decoded[delay_ms])
            return
        assert self._encoded is not None
        job = DecodeJob(
            adapter=self._encoded[0].adapter,
            token_ids=prompt_ids(self.num_tokens),
            num_drafts=0,
            delay_ms=delay_ms,
            first_position=0,
            table=table,
            logprob=False,
        )
        self._runner.decode([job])
        self._decoded[delay_ms] = cache.copy_out(slots)

    def _slots(self, table: BlockTable, num_frames: int) -> Tensor:
        slots = [slot for run in table.slot_runs(0, num_frames) for slot in run]
        return torch.tensor(slots, device=self._runner.device)
