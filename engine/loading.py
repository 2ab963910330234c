"""Load what an engine runs: configuration, tokenizer, weights.

In: an `EngineConfig`, which names a model. Out: a `LoadedModel`, on its device. It knows nothing of
sessions, nor of how much memory they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from voxlite.engine.checkpoint import find_checkpoint
from voxlite.engine.config import EngineConfig, ModelConfig, read_model_config
from voxlite.engine.errors import CheckpointError, InvalidInput
from voxlite.engine.model.checkpoint_files import CheckpointFiles
from voxlite.engine.model.int8_cache import Int8Cache
from voxlite.engine.model.malloc import keep_freed_memory
from voxlite.engine.model.weights import TensorSource
from voxlite.engine.model_runner import ModelRunner, Pick
from voxlite.engine.own_thread import on_own_thread
from voxlite.engine.tokenizer import Tokenizer

# Below this, handing a layer to a second core costs more than it saves, and far more (20 x seen)
# where that core is busy with something else.
_SMALL_MODEL_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, ready to run."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    default_delay_ms: int
    runner: ModelRunner


def load_model(
    config: EngineConfig, weights: TensorSource | None = None, pick: Pick | None = None
) -> LoadedModel:
    """Find a model's folder and load it.

    Args:
        weights: what to take instead of the files of the folder.
        pick: chooses tokens instead of the most probable ones.

    Raises:
        CheckpointError: the model can't be loaded.
        InvalidInput: the configuration asks for what isn't possible here.
    """
    device = _device(config.device)
    if config.quantization == "int8" and device.type != "cpu":
        raise InvalidInput("quantization 'int8' is for CPUs: use --device cpu, or none")
    folder = find_checkpoint(config.model)
    tokenizer = Tokenizer(folder / "tekken.json")
    model_config = read_model_config(folder, tokenizer.audio_config)
    if tokenizer.vocab_size < model_config.vocab_size:
        raise CheckpointError(
            f"{folder / 'tekken.json'} has {tokenizer.vocab_size} tokens, the model "
            f"{model_config.vocab_size}"
        )
    default_delay_ms = model_config.audio.default_delay_ms
    if config.default_delay_ms is not None:
        default_delay_ms = config.default_delay_ms
    model_config.audio.num_delay_tokens(default_delay_ms)  # refuses one that isn't legal
    runner = on_own_thread(
        lambda: _load_runner(config, model_config, folder, device, weights, pick)
    )
    return LoadedModel(
        folder=folder,
        config=model_config,
        tokenizer=tokenizer,
        default_delay_ms=default_delay_ms,
        runner=runner,
    )


def set_up_process(runner: ModelRunner) -> None:
    """Set this process's allocator and threads to what the model runs best with.

    To be called once everything large is there: memory that loading took for a while is given back.
    """
    keep_freed_memory()
    if runner.device.type == "cpu" and runner.weight_bytes < _SMALL_MODEL_BYTES:
        torch.set_num_threads(1)


def _load_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    device: torch.device,
    weights: TensorSource | None,
    pick: Pick | None,
) -> ModelRunner:
    load = partial(
        ModelRunner,
        config=model_config,
        dtype=_dtype(config.dtype),
        device=device,
        is_int8=config.quantization == "int8",
        pick=pick,
    )
    if weights is not None:
        return load(weights)
    files = CheckpointFiles(folder, is_mistral_format=model_config.is_mistral_format)
    # A small model is quantized in no time.
    is_kept = config.quantization == "int8" and files.num_bytes >= _SMALL_MODEL_BYTES
    runner = load(files, int8_cache=Int8Cache.of(files.fingerprint) if is_kept else None)
    files.finish()
    return runner


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise InvalidInput("device 'cuda': PyTorch finds no CUDA device on this machine")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _dtype(name: str) -> torch.dtype | None:
    """Return the dtype, or None for the checkpoint's own."""
    if name == "auto":
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
