"""Size the KV cache: as many sessions as fit into memory, each with the most blocks it can need.

In: the configuration and the loaded model. Out: the KV cache, its tensors made, and how many
sessions it has room for. It runs once, at the start.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import psutil
import torch

from voxlite.engine.block_pool import BlockPool
from voxlite.engine.config import LEGAL_DELAYS_MS, EngineConfig, ModelConfig
from voxlite.engine.errors import InvalidInput
from voxlite.engine.kv_cache_manager import KVCacheManager, SlidingWindowManager, make_kv_cache_spec
from voxlite.engine.model_runner import ModelRunner

_GIB: Final = 2**30
# What a KV cache of no given size may take of the memory, weights included.
_MEMORY_SHARE: Final = 0.9


class SizedKVCache(NamedTuple):
    max_sessions: int
    manager: KVCacheManager


def make_kv_cache(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> SizedKVCache:
    """Size both pools for as many sessions as fit, and make the cache's tensors in `runner`.

    Raises:
        InvalidInput: not even one session fits.
    """
    encoder = make_kv_cache_spec(model.encoder, config.block_size, model.block_pool_size)
    decoder = make_kv_cache_spec(model.decoder, config.block_size)
    encoder_blocks = encoder.max_admission_blocks_per_request(config.max_encode_tokens, None)
    decoder_blocks = decoder.max_admission_blocks_per_request(
        model.audio.num_prompt_tokens(LEGAL_DELAYS_MS[-1] // model.audio.token_ms), None
    )
    session_bytes = encoder_blocks * runner.block_bytes(
        model.encoder, encoder
    ) + decoder_blocks * runner.block_bytes(model.decoder, decoder)
    max_sessions = _num_sessions_that_fit(config, runner, session_bytes)
    num_encoder_blocks = max_sessions * encoder_blocks
    num_decoder_blocks = max_sessions * decoder_blocks
    runner.make_caches((encoder, num_encoder_blocks), (decoder, num_decoder_blocks))
    managers = []
    for spec, num_blocks, blocks_per_session, cache in (
        (encoder, num_encoder_blocks, encoder_blocks, runner.encoder_cache),
        (decoder, num_decoder_blocks, decoder_blocks, runner.decoder_cache),
    ):
        manager = SlidingWindowManager(spec, BlockPool(num_blocks), blocks_per_session)
        if config.poison_freed_blocks:
            cache.fill(range(num_blocks), torch.nan)
            manager.on_free = partial(cache.fill, value=torch.nan)
        managers.append(manager)
    return SizedKVCache(max_sessions, KVCacheManager(*managers))


def _num_sessions_that_fit(config: EngineConfig, runner: ModelRunner, session_bytes: int) -> int:
    if config.kv_cache_gib is not None:
        budget_bytes = config.kv_cache_gib * _GIB
    else:
        budget_bytes = _memory_bytes(runner.device) * _MEMORY_SHARE - runner.weight_bytes
    num_sessions = min(config.max_num_seqs, int(budget_bytes // session_bytes))
    if num_sessions < 1:
        raise InvalidInput(
            f"{budget_bytes / _GIB:.2f} GiB for the KV cache: one session of this model needs "
            f"{session_bytes / _GIB:.2f} GiB; raise --kv-cache-gib"
        )
    return num_sessions


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total
