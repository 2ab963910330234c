"""Size the KV cache: how many sessions fit into memory, and how many blocks each pool has.

In: the configuration and the loaded model. Out: the KV cache, its tensors made, and how many
sessions it has room for. It runs once, at the start.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import psutil
import torch

from voxlite.engine.block_pool import BlockPool
from voxlite.engine.config import (
    LEGAL_DELAYS_MS,
    MAX_NUM_DRAFT_TOKENS,
    EngineConfig,
    ModelConfig,
    cdiv,
)
from voxlite.engine.drafting import ROWS_PER_DRAFT
from voxlite.engine.errors import InvalidInput
from voxlite.engine.kv_cache_manager import (
    KVCacheManager,
    KVCacheSpec,
    SlidingWindowManager,
    make_kv_cache_spec,
)
from voxlite.engine.model_runner import ModelRunner

_GIB: Final = 2**30
# What a KV cache of no given size may take of the memory, weights included.
_MEMORY_SHARE: Final = 0.9


class SizedKVCache(NamedTuple):
    max_sessions: int
    manager: KVCacheManager


class _Stack(NamedTuple):
    """What a pool is sized by."""

    spec: KVCacheSpec
    block_bytes: int
    num_prefix_blocks: int  # for the starts that utterances share
    guaranteed_blocks: int  # what every session can count on
    most_blocks: int  # what one can hold

    def num_blocks(self, num_sessions: int, budget_bytes: float) -> int:
        """Return the blocks of so many sessions, within the budget but for what is guaranteed."""
        num_guaranteed = self.num_prefix_blocks + num_sessions * self.guaranteed_blocks
        num_most = self.num_prefix_blocks + num_sessions * self.most_blocks
        return max(num_guaranteed, min(num_most, int(budget_bytes // self.block_bytes)))


def make_kv_cache(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> SizedKVCache:
    """Size both pools, and make the cache's tensors in `runner`.

    As many sessions fit as can be guaranteed the encoder's whole window and
    `config.min_window_tokens` of the decoder's. The rest of the budget goes to the decoder's pool,
    up to whole windows for all.

    Raises:
        InvalidInput: not even one session fits.
    """
    encoder, decoder = _encoder(config, model, runner), _decoder(config, model, runner)
    budget_bytes = _budget_bytes(config, runner)
    max_sessions = _num_sessions_that_fit(config, budget_bytes, encoder, decoder)
    num_encoder_blocks = encoder.num_blocks(max_sessions, 0)
    budget_bytes -= num_encoder_blocks * encoder.block_bytes
    num_decoder_blocks = decoder.num_blocks(max_sessions, budget_bytes)
    runner.make_caches((encoder.spec, num_encoder_blocks), (decoder.spec, num_decoder_blocks))
    managers = []
    for stack, num_blocks, cache in (
        (encoder, num_encoder_blocks, runner.encoder_cache),
        (decoder, num_decoder_blocks, runner.decoder_cache),
    ):
        manager = SlidingWindowManager(stack.spec, BlockPool(num_blocks), stack.guaranteed_blocks)
        if config.poison_freed_blocks:
            for block in range(num_blocks):
                cache.fill(block, torch.nan)
            manager.on_free = partial(cache.fill, value=torch.nan)
        managers.append(manager)
    return SizedKVCache(max_sessions, KVCacheManager(*managers))


def _encoder(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> _Stack:
    spec = make_kv_cache_spec(model.encoder, config.block_size, model.block_pool_size)
    most_blocks = spec.max_admission_blocks_per_request(config.max_encode_tokens, None)
    return _Stack(
        spec,
        runner.block_bytes(model.encoder, spec),
        num_prefix_blocks=cdiv(model.audio.num_shared_tokens, config.block_size),
        guaranteed_blocks=most_blocks,
        most_blocks=most_blocks,
    )


def _decoder(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> _Stack:
    spec = make_kv_cache_spec(model.decoder, config.block_size)
    shorter = replace(spec, window_frames=min(spec.sliding_window, config.min_window_tokens))
    num_shared, longest_delay = model.audio.num_shared_tokens, LEGAL_DELAYS_MS[-1]
    num_prompt = model.audio.num_prompt_tokens(longest_delay // model.audio.token_ms)

    def blocks(spec: KVCacheSpec) -> int:
        """Blocks of the prompt, or later of a window with a token and its drafts."""
        num_rows = 1 + ROWS_PER_DRAFT * MAX_NUM_DRAFT_TOKENS
        window = spec.max_admission_blocks_per_request(num_rows, None)
        return max(window, cdiv(num_prompt, spec.block_size))

    return _Stack(
        spec,
        runner.block_bytes(model.decoder, spec),
        num_prefix_blocks=len(LEGAL_DELAYS_MS) * cdiv(num_shared, config.block_size),
        guaranteed_blocks=blocks(shorter),
        most_blocks=blocks(spec),
    )


def _budget_bytes(config: EngineConfig, runner: ModelRunner) -> float:
    if config.kv_cache_gib is not None:
        return config.kv_cache_gib * _GIB
    return _memory_bytes(runner.device) * _MEMORY_SHARE - runner.weight_bytes


def _num_sessions_that_fit(config: EngineConfig, budget_bytes: float, *stacks: _Stack) -> int:
    prefix_bytes = sum(stack.num_prefix_blocks * stack.block_bytes for stack in stacks)
    session_bytes = sum(stack.guaranteed_blocks * stack.block_bytes for stack in stacks)
    num_sessions = min(config.max_num_seqs, int((budget_bytes - prefix_bytes) // session_bytes))
    if num_sessions < 1:
        raise InvalidInput(
            f"{budget_bytes / _GIB:.2f} GiB for the KV cache: one session of this model needs "
            f"{(prefix_bytes + session_bytes) / _GIB:.2f} GiB; raise --kv-cache-gib"
        )
    return num_sessions


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total
