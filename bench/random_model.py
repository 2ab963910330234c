"""A model of random weights, made in memory: for measuring sizes that aren't at hand.

In: a preset's name. Out: a folder with the two files that describe it, and its tensors.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from voxlite.engine.config import TransformerConfig

_NUM_SPECIAL_TOKENS: Final = 1000
_MODEL_LENGTH: Final = 131_072


def _sizes(
    dim: int, layers: int, heads: int, kv_heads: int, head_size: int, hidden_dim: int, window: int
) -> TransformerConfig:
    return TransformerConfig(
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        hidden_dim=hidden_dim,
        window=window,
        norm_eps=1e-5,
        rope_theta=1e6,
    )


@dataclass(frozen=True, slots=True)
class Preset:
    encoder: TransformerConfig
    decoder: TransformerConfig
    vocab_size: int


PRESETS: Final = {
    "tiny": Preset(_sizes(64, 4, 4, 4, 16, 128, 30), _sizes(64, 2, 4, 2, 16, 128, 64), 1_400),
    "small": Preset(_sizes(192, 4, 6, 6, 32, 512, 750), _sizes(256, 4, 8, 2, 32, 768, 512), 3_000),
    # The published Voxtral-Mini-4B-Realtime.
    "4b": Preset(
        _sizes(1280, 32, 32, 32, 64, 5120, 750), _sizes(3072, 26, 32, 8, 128, 9216, 8192), 131_072
    ),
}


class RandomTensors:
    """Tensors of the shapes asked for, bfloat16, with magnitudes that keep activations sane."""

    is_mistral_format = True
    dtype = torch.bfloat16

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        # All tensors are cut from these: 4 billion fresh numbers would take minutes.
        self._noise = torch.randn(2**22 + 1, generator=generator)

    def read(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape, in memory of its own."""
        num_elements = math.prod(shape)
        mean, deviation = 0.0, 1.0
        if len(shape) == 1:
            mean, deviation = (0.0, 0.1) if name.endswith("bias") else (1.0, 0.2)
        else:
            deviation = 0.05 if "embeddings" in name else 1 / math.sqrt(math.prod(shape[1:]))
        piece = (mean + deviation * self._noise).to(self.dtype)
        tensor = torch.empty(num_elements, dtype=self.dtype)
        for part in tensor.split(len(piece)):
            part.copy_(piece[: len(part)])
        return tensor.view(shape)

    def unmap(self) -> None:
        """Nothing is mapped."""


def write_description(preset: Preset, folder: Path) -> None:
    """Write `params.json` and `tekken.json`: all of a checkpoint but its weights."""
    (folder / "params.json").write_text(json.dumps(_params(preset)))
    (folder / "tekken.json").write_text(json.dumps(_tekken(preset.vocab_size)))


def _params(preset: Preset) -> dict[str, Any]:
    encoder = _stack(preset.encoder) | {
        "audio_encoding_args": {
            "sampling_rate": 16_000,
            "frame_rate": 12.5,
            "num_mel_bins": 128,
            "hop_length": 160,
            "window_size": 400,
            "global_log_mel_max": 1.5,
        },
    }
    return _stack(preset.decoder) | {
        "vocab_size": preset.vocab_size,
        "tied_embeddings": True,
        "model_max_length": _MODEL_LENGTH,
        "multimodal": {
            "whisper_model_args": {
                "encoder_args": encoder,
                "downsample_args": {"downsample_factor": 4},
            }
        },
        "ada_rms_norm_t_cond": True,
        "ada_rms_norm_t_cond_dim": 32,
    }


def _stack(stack: TransformerConfig) -> dict[str, Any]:
    return {
        "dim": stack.dim,
        "n_layers": stack.num_layers,
        "head_dim": stack.head_size,
        "hidden_dim": stack.hidden_dim,
        "n_heads": stack.num_heads,
        "n_kv_heads": stack.num_kv_heads,
        "rope_theta": stack.rope_theta,
        "norm_eps": stack.norm_eps,
        "causal": True,
        "sliding_window": stack.window,
    }


def _tekken(vocab_size: int) -> dict[str, Any]:
    """Describe a vocabulary: the first of a published one's tokens, and plain special tokens."""
    data = importlib.resources.files("mistral_common").joinpath("data/tekken_240911.json")
    published = json.loads(data.read_text())
    vocab = published["vocab"]
    if vocab_size < _MODEL_LENGTH:
        vocab = vocab[: vocab_size - _NUM_SPECIAL_TOKENS]
    return {
        "config": published["config"]
        | {
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": vocab_size,
            "version": "v7",
        },
        "vocab": vocab,
        "special_tokens": [
            {"rank": rank, "token_str": f"<SPECIAL_{rank}>", "is_control": True}
            for rank in range(_NUM_SPECIAL_TOKENS)
        ],
        "audio": {
            "sampling_rate": 16_000,
            "frame_rate": 12.5,
            "transcription_format": "streaming",
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "transcription_delay_ms": 480,
            "streaming_look_ahead_ms": 2.5,
            "streaming_look_back_ms": 52.5,
            "streaming_n_left_pad_tokens": 32,
        },
    }
