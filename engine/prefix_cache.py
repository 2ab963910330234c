"""The start that all utterances share: computed once, and its whole blocks held in common.

Every utterance begins with silence, and its prompt with the same tokens. Until the first sample
can be heard, what the encoder makes of that is always the same, and what the decoder makes of it
depends on the delay alone: 31 of a prompt's 39 tokens at 480 ms.

In: sessions whose utterance begins. Out: their block tables, with that start's keys and values.
"""

from __future__ import annotations

import numpy as np
import torch

from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.config import AudioConfig, prompt_ids
from voxlite.engine.kv_cache_manager import BlockTable, KVCacheManager, SlidingWindowManager
from voxlite.engine.model.attention import KVCache
from voxlite.engine.model_runner import DecodeJob, EncodeJob, EncodeResult, ModelRunner

_ENCODER_KEY = 0


class PrefixCache:
    """The shared start, kept from the first utterance that computes it."""

    def __init__(self, runner: ModelRunner, kv_cache: KVCacheManager, audio: AudioConfig) -> None:
        self._runner, self._kv_cache, self._audio = runner, kv_cache, audio
        self.num_tokens = audio.num_shared_tokens
        self._encoded: EncodeResult | None = None
        self._delays_ms: set[int] = set()  # for which the decoder's part is computed

    @property
    def is_encoded(self) -> bool:
        """Whether an utterance has computed the encoder's part."""
        return self._encoded is not None

    def encode(self, session_id: int) -> EncodeResult:
        """Begin an utterance with the encoder's first `num_tokens` tokens.

        Returns:
            (num_tokens, decoder dim) adapter outputs, and the conv stem's state after them.
        """
        manager = self._kv_cache.encoder
        prefix = manager.prefix(_ENCODER_KEY, self.num_tokens)
        if self._encoded is None:
            stream = AudioStream(self._audio, num_right_pad_tokens=0)
            stream.append(np.zeros(self._audio.look_ahead_samples, np.float32))
            job = EncodeJob(
                spans=stream.take(self.num_tokens),
                conv_state=self._runner.initial_conv_state(),
                first_token=0,
                table=prefix,
            )
            (self._encoded,) = self._runner.encode([job])
        self._start_behind(prefix, session_id, manager, self._runner.encoder_cache)
        return self._encoded

    def decode(self, session_id: int, delay_ms: int) -> None:
        """Begin an utterance with the decoder's first `num_tokens` positions."""
        manager = self._kv_cache.decoder
        prefix = manager.prefix(delay_ms, self.num_tokens)
        if delay_ms not in self._delays_ms:
            assert self._encoded is not None
            job = DecodeJob(
                adapter=self._encoded.adapter,
                token_ids=prompt_ids(self.num_tokens),
                num_drafts=0,
                delay_ms=delay_ms,
                first_position=0,
                table=prefix,
                logprob=False,
            )
            self._runner.decode([job])
            self._delays_ms.add(delay_ms)
        self._start_behind(prefix, session_id, manager, self._runner.decoder_cache)

    def _start_behind(
        self, prefix: BlockTable, session_id: int, manager: SlidingWindowManager, cache: KVCache
    ) -> None:
        """Share whole blocks, and copy what the last one holds if it isn't full."""
        table = manager.start_behind(session_id, prefix, self.num_tokens)
        first = table.num_shared * manager.spec.frames_per_block
        end = self.num_tokens * manager.spec.block_pool_size
        sources, targets = (torch.from_numpy(t.slots(first, end)) for t in (prefix, table))
        if len(sources) > 0:
            cache.move(sources.to(self._runner.device), targets.to(self._runner.device))
