"""Run the model on batches: the only place where bookkeeping turns into tensors.

In: jobs, each one session's next stretch of audio or of text positions, with its block table. Out:
one result per job, in order. It changes nothing but the KV cache, at slots that the jobs name, so
that a failed batch can be run again one job at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from voxlite.engine.attention_layout import Part, lay_out
from voxlite.engine.audio.log_mel import LogMel
from voxlite.engine.config import LEGAL_DELAYS_MS, ModelConfig, TransformerConfig
from voxlite.engine.drafting import ROWS_PER_DRAFT, drafted_ids, right_rows
from voxlite.engine.kv_cache_manager import BlockTable, KVCacheSpec
from voxlite.engine.model.attention import KVCache
from voxlite.engine.model.encoder import ConvState
from voxlite.engine.model.int8_cache import Int8Cache
from voxlite.engine.model.layers import Rope
from voxlite.engine.model.weights import TensorSource, load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeJob:
    """Encode the tokens [first_token, first_token + T) of a session."""

    spans: NDArray[np.float32]  # (T, 1520), the samples that each token's mel frames read
    conv_state: ConvState
    first_token: int
    table: BlockTable

    @property
    def num_rows(self) -> int:
        """Rows in a flat batch, counted in tokens."""
        return len(self.spans)


class EncodeResult(NamedTuple):
    adapter: Tensor  # (T, decoder dim)
    conv_state: ConvState


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """Decode the positions [first_position, first_position + n) of a session."""

    adapter: Tensor  # (n + d, decoder dim)
    token_ids: Sequence[int]  # n ids: the prompt, or the last generated one
    num_drafts: int  # d, positions after those, whose ids are guessed: see `drafting`
    delay_ms: int
    first_position: int
    table: BlockTable  # with room for n + 2 d
    logprob: bool

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows in a flat batch."""
        return self.num_known + ROWS_PER_DRAFT * self.num_drafts

    @property
    def num_logit_rows(self) -> int:
        """Rows, at the end, whose next token is wanted: the last known one and the drafts."""
        return self.num_rows - self.num_known + 1

    @property
    def row_ids(self) -> list[int]:
        """The id of each row, (n + 2 d)."""
        return [*self.token_ids, *drafted_ids(self.num_drafts)]

    @property
    def row_adapters(self) -> list[Tensor]:
        """What each row hears: (n + d, decoder dim) and (d, decoder dim)."""
        return [self.adapter, self.adapter[self.num_known :]]


class DecodeResult(NamedTuple):
    """The most probable next token, its logit, and its log probability where that was asked for."""

    token_id: int
    logit: float
    logprob: float | None


# From (R, V) logits, and the position that each row stands at, to (R,) ids of the next tokens.
Pick = Callable[[Tensor, Sequence[int]], Tensor]


def _most_probable(logits: Tensor, positions: Sequence[int]) -> Tensor:
    del positions
    return logits.argmax(dim=-1)


class ModelRunner:
    """Own the model's weights and the KV cache's tensors."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        is_int8: bool = False,
        int8_cache: Int8Cache | None = None,
        pick: Pick | None = None,
    ) -> None:
        """Load the weights.

        Args:
            source: the checkpoint's tensors.
            dtype: None takes the checkpoint's.
            is_int8: quantize the linear layers; `dtype` is then that of everything else.
            int8_cache: where they are kept for the next start.
            pick: chooses tokens instead of the most probable ones.

        Raises:
            CheckpointError: the checkpoint's weights can't be used.
        """
        self._config = config
        self._pick = pick or _most_probable
        self._encoder, self._decoder, self.weight_bytes = load_weights(
            source, config, dtype, device, is_int8=is_int8, cache=int8_cache
        )
        self.dtype, self.device = self._decoder.embedding.dtype, device
        self._log_mel = LogMel(config.audio)
        self._encoder_rope = Rope(config.encoder, device)
        self._decoder_rope = Rope(config.decoder, device)
        self.encoder_cache: KVCache
        self.decoder_cache: KVCache
        self._delay_rows = {delay_ms: row for row, delay_ms in enumerate(LEGAL_DELAYS_MS)}
        with torch.inference_mode():
            self._delay_scales = torch.stack(
                [
                    self._decoder.delay_scales(config.audio.num_delay_tokens(delay_ms))
                    for delay_ms in LEGAL_DELAYS_MS
                ],
                dim=1,
            )  # (layers, delays, dim)

    @property
    def frames_per_token(self) -> int:
        """Encoder frames per token."""
        return self._config.block_pool_size

    def block_bytes(self, transformer: TransformerConfig, spec: KVCacheSpec) -> int:
        """Return what one block costs in all layers of a stack."""
        return spec.elements_per_block * transformer.num_layers * self.dtype.itemsize

    def make_caches(
        self, encoder: tuple[KVCacheSpec, int], decoder: tuple[KVCacheSpec, int]
    ) -> None:
        """Make both KV caches, each from its spec and its number of blocks.

        On a CPU their memory is taken only as blocks are first written.
        """
        self.encoder_cache = self._make_cache(self._config.encoder, *encoder)
        self.decoder_cache = self._make_cache(self._config.decoder, *decoder)

    def initial_conv_state(self) -> ConvState:
        return self._encoder.initial_conv_state()

    def no_adapter_rows(self) -> Tensor:
        """Return (0, decoder dim): an empty queue of adapter outputs."""
        return self._decoder.norm.new_empty(0, self._config.decoder.dim)

    @torch.inference_mode()
    def encode(self, jobs: Sequence[EncodeJob]) -> list[EncodeResult]:
        """Run mel spectrogram, conv stem, encoder and adapter."""
        frames_per_token = self._config.block_pool_size
        counts = [job.num_rows for job in jobs]
        mel = self._log_mel(np.concatenate([job.spans for job in jobs]))  # (T, 8, 128)
        mels = [part.flatten(0, 1) for part in mel.to(self.device, self.dtype).split(counts)]
        x, conv_states = self._encoder.conv_stem(mels, [job.conv_state for job in jobs])
        batch = lay_out(
            [
                Part(job.table, job.first_token * frames_per_token, count * frames_per_token)
                for job, count in zip(jobs, counts, strict=True)
            ],
            self._config.encoder,
            self._encoder_rope,
            self.encoder_cache.layers[0].keys,
        )
        hidden = self._encoder.transformer(x, batch, self.encoder_cache.layers)  # (F, dim)
        adapter = self._encoder.adapter(hidden).split(counts)
        return [EncodeResult(*result) for result in zip(adapter, conv_states, strict=True)]

    @torch.inference_mode()
    def decode(self, jobs: Sequence[DecodeJob]) -> list[list[DecodeResult]]:
        """Run the decoder and pick each session's next token, the most probable one.

        A job with drafts gets a token for each of its drafts that was right, and one more: those
        that it would get one by one. What the wrong ones left in the cache lies beyond the last
        position that counts, where the next job overwrites it.
        """
        token_ids = [token_id for job in jobs for token_id in job.row_ids]
        parts = [
            Part(
                job.table,
                job.first_position,
                job.num_known + job.num_drafts,
                num_alternatives=job.num_drafts,
            )
            for job in jobs
        ]
        positions = [position for part in parts for position in part.row_positions]
        counts = [job.num_rows for job in jobs]
        delay_rows = [
            self._delay_rows[job.delay_ms]
            for job, count in zip(jobs, counts, strict=True)
            for _ in range(count)
        ]
        ends = list(accumulate(counts))
        logit_rows = [
            row
            for job, end in zip(jobs, ends, strict=True)
            for row in range(end - job.num_logit_rows, end)
        ]
        batch = lay_out(
            parts, self._config.decoder, self._decoder_rope, self.decoder_cache.layers[0].keys
        )
        logits = self._decoder(
            torch.cat([adapter for job in jobs for adapter in job.row_adapters]),
            self._ids(token_ids),
            self._delay_scales[:, self._ids(delay_rows)],
            self._ids(logit_rows),
            batch,
            self.decoder_cache.layers,
        )
        best = self._pick(logits, [positions[row] for row in logit_rows])
        best_logits = logits.gather(1, best[:, None])[:, 0]
        logprobs: list[float | None] = [None] * len(logit_rows)
        if any(job.logprob for job in jobs):
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, best[:, None])[:, 0].tolist()
        rows = iter(zip(best.tolist(), best_logits.tolist(), logprobs, strict=True))
        return self._keep_right_rows(
            [(job, list(islice(rows, job.num_logit_rows))) for job in jobs]
        )

    def _keep_right_rows(
        self, found: Sequence[tuple[DecodeJob, list[tuple[int, float, float | None]]]]
    ) -> list[list[DecodeResult]]:
        """Return what counts of each job's rows. A word's key goes where the pad's is.

        Args:
            found: next token, logit and log probability of each row, from the last known one on.
        """
        kept, sources, targets = [], [], []
        for job, rows in found:
            right = right_rows([token_id for token_id, _, _ in rows], job.num_drafts)
            kept.append(
                [
                    DecodeResult(token_id, logit, logprob if job.logprob else None)
                    for token_id, logit, logprob in (rows[i] for i in right)
                ]
            )
            if right[-1] > job.num_drafts:
                last_known = job.first_position + job.num_known - 1
                source = last_known + right[-1]
                target = source - job.num_drafts
                sources += job.table.slots(source, source + 1).tolist()
                targets += job.table.slots(target, target + 1).tolist()
        if sources:
            self.decoder_cache.move(self._ids(sources), self._ids(targets))
        return kept

    def _make_cache(
        self, transformer: TransformerConfig, spec: KVCacheSpec, num_blocks: int
    ) -> KVCache:
        num_slots = num_blocks * spec.frames_per_block
        shape = (2, transformer.num_layers, transformer.num_kv_heads, num_slots, spec.head_size)
        storage = torch.empty(shape, dtype=self.dtype, device=self.device)
        return KVCache(storage, spec.frames_per_block)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
