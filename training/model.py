"""The model in training: transformers' Voxtral-Realtime classes, plus two heads that only help.

Legend: B utterances, T tokens, F = 4 T encoder frames, V vocabulary.

transformers' own modules hold all weights, so that what is trained is what is exported. Two things
differ from its forward pass, for speed and for training: attention is computed in blocks as wide as
the window (`windowed_attention`), and every utterance of a batch has a delay of its own.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    VoxtralRealtimeConfig,
    VoxtralRealtimeForConditionalGeneration,
)

ATTENTION_NAME = "windowed"
ROPE_THETA = 1e6
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a small model; the defaults are those of the bundled one (3.9 M parameters)."""

    encoder_dim: int = 192
    encoder_layers: int = 4
    encoder_heads: int = 4
    encoder_head_size: int = 64
    encoder_hidden_dim: int = 512
    encoder_window: int = 64
    decoder_dim: int = 192
    decoder_layers: int = 3
    decoder_heads: int = 4
    decoder_kv_heads: int = 2
    decoder_head_size: int = 64
    decoder_hidden_dim: int = 512
    decoder_window: int = 96
    vocab_size: int = 2000

    def config(self) -> VoxtralRealtimeConfig:
        """Return the same as a transformers configuration."""
        rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
        return VoxtralRealtimeConfig(
            audio_config={
                "hidden_size": self.encoder_dim,
                "num_hidden_layers": self.encoder_layers,
                "num_attention_heads": self.encoder_heads,
                "head_dim": self.encoder_head_size,
                "intermediate_size": self.encoder_hidden_dim,
                "sliding_window": self.encoder_window,
                "vocab_size": self.vocab_size,
                "rms_norm_eps": NORM_EPS,
                "rope_parameters": dict(rope),
            },
            text_config={
                "hidden_size": self.decoder_dim,
                "num_hidden_layers": self.decoder_layers,
                "num_attention_heads": self.decoder_heads,
                "num_key_value_heads": self.decoder_kv_heads,
                "head_dim": self.decoder_head_size,
                "intermediate_size": self.decoder_hidden_dim,
                "sliding_window": self.decoder_window,
                "vocab_size": self.vocab_size,
                "rms_norm_eps": NORM_EPS,
                "rope_parameters": dict(rope),
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a checkpoint."""
        return asdict(self)


def load_checkpoint(path: Path) -> tuple[VoxtralRealtimeConfig, dict[str, Tensor]]:
    """Return the configuration and weights in a training checkpoint, without the helper heads."""
    state = torch.load(path, map_location="cpu")
    return ModelShape(**state["shape"]).config(), voxtral_weights(state["model"])


def voxtral_weights(training_model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the model itself from those of a `TrainingModel`."""
    prefix = "voxtral."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in training_model.items()
        if name.startswith(prefix)
    }


def windowed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention over the last `sliding_window` positions, in time linear in the length.

    Queries are cut into blocks of a window each; a block needs its own keys and those of the block
    before, so the work is two windows per query instead of the whole length:

        keys     [ block n-1 | block n ]      window 4: query 2 of a block sees keys 3, 4, 5, 6
        query 2    - - - x     x x x -        of the 8 (itself included)

    Args:
        query: (B, heads, length, head size); `key` and `value` may have fewer heads.
        attention_mask: must be None; the mask follows from the window.
        sliding_window: positions seen, the query's own included.

    Returns:
        (B, length, heads, head size), and no attention weights.
    """
    if attention_mask is not None:
        raise ValueError("windowed_attention makes its own mask")
    num_batch, num_heads, length, head_size = query.shape
    groups = num_heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    block = min(sliding_window, length)
    num_blocks = -(-length // block)
    padding = num_blocks * block - length
    if padding:
        query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))

    def blocks(x: Tensor) -> Tensor:  # (B * blocks, heads, block, head size)
        x = x.view(num_batch, num_heads, num_blocks, block, head_size).transpose(1, 2)
        return x.reshape(num_batch * num_blocks, num_heads, block, head_size)

    def with_previous(x: Tensor) -> Tensor:  # (B * blocks, heads, 2 * block, head size)
        previous = F.pad(x, (0, 0, block, 0))[:, :, : num_blocks * block]
        return torch.cat([blocks(previous), blocks(x)], dim=2)

    at = torch.arange(block, device=query.device)
    distance = (at[:, None] + block) - torch.arange(2 * block, device=query.device)
    is_seen = (distance >= 0) & (distance < sliding_window)
    bias = torch.zeros(num_blocks, block, 2 * block, device=query.device, dtype=query.dtype)
    bias.masked_fill_(~is_seen, -torch.inf)
    bias[0, :, :block] = -torch.inf  # nothing comes before the first block
    # Plain products: on CPU, in blocks this small, they are twice as fast as the fused kernel.
    scores = torch.matmul(blocks(query) * scaling, with_previous(key).transpose(-2, -1))
    scores = scores + bias.repeat(num_batch, 1, 1)[:, None]
    out = torch.matmul(scores.softmax(dim=-1), with_previous(value))
    out = out.view(num_batch, num_blocks, num_heads, block, head_size).transpose(2, 3)
    return out.reshape(num_batch, num_blocks * block, num_heads, head_size)[:, :length], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Tell transformers to make no mask: `windowed_attention` has its own."""


AttentionInterface.register(ATTENTION_NAME, windowed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def new_model(
    config: VoxtralRealtimeConfig, attention: str | dict[str, str]
) -> VoxtralRealtimeForConditionalGeneration:
    """Return a model with random weights.

    Args:
        config: its sizes.
        attention: the name of an implementation, for all of it or by sub-configuration.
    """
    make = VoxtralRealtimeForConditionalGeneration._from_config
    model: VoxtralRealtimeForConditionalGeneration = make(  # type: ignore[no-untyped-call]
        config, attn_implementation=attention
    )
    return model


class TrainingModel(nn.Module):
    """A Voxtral-Realtime model and the heads of the helper losses."""

    def __init__(self, shape: ModelShape, num_sounds: int, num_words: int) -> None:
        super().__init__()
        self.voxtral = new_model(shape.config(), ATTENTION_NAME)
        self.sound_head = nn.Linear(shape.encoder_dim, num_sounds)
        self.word_head = nn.Linear(shape.decoder_dim, num_words)

    def encode(self, log_mel: Tensor) -> tuple[Tensor, Tensor]:
        """Return encoder frames (B, F, encoder dim) and adapter outputs (B, T, decoder dim).

        Args:
            log_mel: (B, mels, 8 T).
        """
        model = self.voxtral.model
        frames = model.audio_tower(input_features=log_mel, use_cache=False).last_hidden_state
        pooled = frames.reshape(len(frames), -1, model.multi_modal_projector.linear_1.in_features)
        return frames, model.multi_modal_projector(pooled)

    def delay_condition(self, num_delay_tokens: Tensor) -> Tensor:
        """Return the (B, 1, decoder dim) conditioning of delays (B,)."""
        embedding = self.voxtral.model.time_embedding
        angles = num_delay_tokens[:, None].float() * embedding.inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=-1)[:, None]

    def forward(
        self, log_mel: Tensor, input_ids: Tensor, num_delay_tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of the next token (B, T, V), of words (B, T, .) and of sounds (B, F, .)."""
        frames, adapted = self.encode(log_mel)
        language_model = self.voxtral.model.language_model
        hidden = language_model(
            inputs_embeds=adapted + language_model.embed_tokens(input_ids),
            t_cond=self.delay_condition(num_delay_tokens),
            use_cache=False,
        ).last_hidden_state
        return self.voxtral.lm_head(hidden), self.word_head(adapted), self.sound_head(frames)
