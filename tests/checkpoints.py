"""Tiny random checkpoints for tests, in Mistral's and in Hugging Face's layout.

In: shapes, a seed, a dtype. Out: a folder that loads like the published one. The weights are
random, yet chosen so that a mistake shows: norm weights away from 1, biases away from 0, attention
that is not flat, and greedy output that follows the audio and mixes text with padding, word and
end ids.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import VoxtralRealtimeConfig, VoxtralRealtimeForConditionalGeneration

NUM_SPECIAL_IDS = 1000
END_ID, PAD_ID, WORD_ID = 2, 32, 33
NUM_MEL_BINS = 128
CONV_KERNEL = 3
ADA_NORM_DIM = 32
FRAMES_PER_TOKEN = 4
TOKEN_MS = 80

EMBEDDING = "mm_streams_embeddings.embedding_module."
ENCODER = EMBEDDING + "whisper_encoder."
SPECIAL_TEXTS = {0: "<unk>", 1: "<s>", END_ID: "</s>", 11: "<pad>", 24: "[AUDIO]"} | {
    25: "[BEGIN_AUDIO]",
    PAD_ID: "[STREAMING_PAD]",
    WORD_ID: "[STREAMING_WORD]",
}

# Output embeddings of the ids that stand alone must be longer than those of 400 text ids, whose
# best is already some three standard deviations up; the other special ids must be out of reach.
EMBEDDING_STD = 0.05
EMBEDDING_GAINS = {END_ID: 2.5, PAD_ID: 4.0, WORD_ID: 3.0}
SPECIAL_EMBEDDING_GAIN = 0.3
# Above 1, attention and FFN reach past the residual stream and no two positions look alike.
LINEAR_GAIN = 1.5
BIAS_STD = 0.1
NORM_STD = 0.2
# Spreads the logits, so that the best one leads by more than rounding errors.
FINAL_NORM_MEAN = 4.0


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The window counts encoder frames of 20 ms and includes the query."""

    dim: int = 32
    num_layers: int = 3
    num_heads: int = 4
    head_dim: int = 16
    hidden_dim: int = 96
    window: int = 30


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The window counts tokens and includes the query."""

    dim: int = 64
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_dim: int = 96
    vocab_size: int = 1400
    window: int = 20


FULL_SIZE_ENCODER = EncoderShape(
    dim=1280, num_layers=32, num_heads=32, head_dim=64, hidden_dim=5120, window=750
)
FULL_SIZE_DECODER = DecoderShape(
    dim=3072,
    num_layers=26,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_dim=9216,
    vocab_size=131_072,
    window=8192,
)


def write_checkpoint(
    folder: Path,
    *,
    decoder: DecoderShape | None = None,
    encoder: EncoderShape | None = None,
    seed: int = 8,
    dtype: torch.dtype = torch.float32,
    delay_ms: int = 480,
    **overrides: Any,
) -> Path:
    """Write params.json, consolidated.safetensors and tekken.json, and return the folder.

    Args:
        folder: Made if it is missing.
        decoder: Sizes of the decoder.
        encoder: Sizes of the audio encoder.
        seed: Equal seeds and shapes give equal weights, whatever the dtype and the windows.
        dtype: Of every tensor in the file.
        delay_ms: The default delay that tekken.json names.
        overrides: Top-level entries of params.json to replace; the tensors stay as they are.
    """
    decoder, encoder = decoder or DecoderShape(), encoder or EncoderShape()
    folder.mkdir(parents=True, exist_ok=True)
    params = mistral_params(decoder, encoder) | overrides
    (folder / "params.json").write_text(json.dumps(params, indent=1))
    (folder / "tekken.json").write_text(json.dumps(tekken(decoder.vocab_size, delay_ms)))
    save_file(tensors(decoder, encoder, seed, dtype), folder / "consolidated.safetensors")
    return folder


def mistral_params(decoder: DecoderShape, encoder: EncoderShape) -> dict[str, Any]:
    """Return what params.json holds."""
    shared = {"rope_theta": 1e6, "norm_eps": 1e-5, "causal": True}
    mel = {
        "sampling_rate": 16_000,
        "frame_rate": 12.5,
        "num_mel_bins": NUM_MEL_BINS,
        "hop_length": 160,
        "window_size": 400,
        "chunk_length_s": None,
        "global_log_mel_max": 1.5,
        "transcription_format": "streaming",
    }
    encoder_args = shared | {
        "audio_encoding_args": mel,
        "dim": encoder.dim,
        "n_layers": encoder.num_layers,
        "head_dim": encoder.head_dim,
        "hidden_dim": encoder.hidden_dim,
        "n_heads": encoder.num_heads,
        "n_kv_heads": encoder.num_heads,
        "vocab_size": decoder.vocab_size,
        "use_biases": True,
        "use_cache": False,
        "pos_embed": "rope",
        "max_source_positions": None,
        "ffn_type": "swiglu",
        "norm_type": "rms_norm",
        "sliding_window": encoder.window,
    }
    downsample_args = {"downsample_factor": FRAMES_PER_TOKEN}
    return shared | {
        "dim": decoder.dim,
        "n_layers": decoder.num_layers,
        "head_dim": decoder.head_dim,
        "hidden_dim": decoder.hidden_dim,
        "n_heads": decoder.num_heads,
        "n_kv_heads": decoder.num_kv_heads,
        "use_biases": False,
        "vocab_size": decoder.vocab_size,
        "model_parallel": 1,
        "tied_embeddings": True,
        "sliding_window": decoder.window,
        "model_max_length": 131_072,
        "multimodal": {
            "whisper_model_args": {
                "encoder_args": encoder_args,
                "downsample_args": downsample_args,
            }
        },
        "ada_rms_norm_t_cond": True,
        "ada_rms_norm_t_cond_dim": ADA_NORM_DIM,
    }


def tensors(
    decoder: DecoderShape, encoder: EncoderShape, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return every tensor of consolidated.safetensors, by its published name."""
    rng = np.random.default_rng(seed)
    shapes = _encoder_shapes(encoder) | _adapter_shapes(decoder, encoder) | _decoder_shapes(decoder)
    # One at a time to the final dtype: at the published model's size there is no room for all in
    # float64.
    return {
        name: torch.from_numpy(_random_tensor(rng, name, shape).astype(np.float32)).to(dtype)
        for name, shape in shapes.items()
    }


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith("bias"):
        values *= BIAS_STD
    elif len(shape) == 1:
        values *= NORM_STD
        values += 1
    elif "tok_embeddings" in name:
        values *= EMBEDDING_STD
        values[:NUM_SPECIAL_IDS] *= SPECIAL_EMBEDDING_GAIN
        for token_id, gain in EMBEDDING_GAINS.items():
            values[token_id] *= gain / SPECIAL_EMBEDDING_GAIN
    else:
        values *= LINEAR_GAIN
        values /= np.prod(shape[1:]) ** 0.5
    if name == "norm.weight":
        values *= FINAL_NORM_MEAN
    return values


def _encoder_shapes(encoder: EncoderShape) -> dict[str, tuple[int, ...]]:
    dim, hidden, heads = encoder.dim, encoder.hidden_dim, encoder.num_heads * encoder.head_dim
    out: dict[str, tuple[int, ...]] = {}
    for i, channels in enumerate((NUM_MEL_BINS, dim)):
        conv = f"{ENCODER}conv_layers.{i}.conv."
        out |= {conv + "weight": (dim, channels, CONV_KERNEL), conv + "bias": (dim,)}
    for i in range(encoder.num_layers):
        layer = f"{ENCODER}transformer.layers.{i}."
        out |= _layer_shapes(layer, dim, hidden, heads, heads)
        for name, size in (("wq", heads), ("wv", heads), ("wo", dim)):
            out[f"{layer}attention.{name}.bias"] = (size,)
        out[layer + "feed_forward.w2.bias"] = (dim,)
    return out | {ENCODER + "transformer.norm.weight": (dim,)}


def _adapter_shapes(decoder: DecoderShape, encoder: EncoderShape) -> dict[str, tuple[int, ...]]:
    projection = EMBEDDING + "audio_language_projection."
    return {
        projection + "0.weight": (decoder.dim, FRAMES_PER_TOKEN * encoder.dim),
        projection + "2.weight": (decoder.dim, decoder.dim),
    }


def _decoder_shapes(decoder: DecoderShape) -> dict[str, tuple[int, ...]]:
    dim, hidden = decoder.dim, decoder.hidden_dim
    queries = decoder.num_heads * decoder.head_dim
    keys = decoder.num_kv_heads * decoder.head_dim
    out: dict[str, tuple[int, ...]] = {
        EMBEDDING + "tok_embeddings.weight": (decoder.vocab_size, dim),
        "norm.weight": (dim,),
    }
    for i in range(decoder.num_layers):
        layer = f"layers.{i}."
        out |= _layer_shapes(layer, dim, hidden, queries, keys)
        out[layer + "ada_rms_norm_t_cond.0.weight"] = (ADA_NORM_DIM, dim)
        out[layer + "ada_rms_norm_t_cond.2.weight"] = (dim, ADA_NORM_DIM)
    return out


def _layer_shapes(
    layer: str, dim: int, hidden: int, queries: int, keys: int
) -> dict[str, tuple[int, ...]]:
    """Return the weights that encoder and decoder layers have in common."""
    return {
        layer + "attention.wq.weight": (queries, dim),
        layer + "attention.wk.weight": (keys, dim),
        layer + "attention.wv.weight": (keys, dim),
        layer + "attention.wo.weight": (dim, queries),
        layer + "attention_norm.weight": (dim,),
        layer + "ffn_norm.weight": (dim,),
        layer + "feed_forward.w1.weight": (hidden, dim),
        layer + "feed_forward.w2.weight": (dim, hidden),
        layer + "feed_forward.w3.weight": (hidden, dim),
    }


@cache
def packaged_tekken() -> dict[str, Any]:
    """Return the published vocabulary, not to be changed: it is large and read once."""
    packaged = resources.files("mistral_common").joinpath("data/tekken_240911.json")
    content: dict[str, Any] = json.loads(packaged.read_text())
    return content


def tekken(vocab_size: int, delay_ms: int = 480) -> dict[str, Any]:
    """Return tekken.json: 1000 special ids, then mistral-common's 256 bytes and first merges."""
    full = packaged_tekken()
    vocab = full["vocab"][: vocab_size - NUM_SPECIAL_IDS]
    config = full["config"] | {
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": vocab_size,
        "version": "v13",
    }
    special = [
        {"rank": i, "token_str": SPECIAL_TEXTS.get(i, f"<SPECIAL_{i}>"), "is_control": True}
        for i in range(NUM_SPECIAL_IDS)
    ]
    audio = {
        "sampling_rate": 16_000,
        "frame_rate": 12.5,
        "chunk_length_s": None,
        "transcription_format": "streaming",
        "audio_encoding_config": {
            "num_mel_bins": NUM_MEL_BINS,
            "hop_length": 160,
            "window_size": 400,
        },
        "transcription_delay_ms": delay_ms,
        "streaming_look_ahead_ms": 2.5,
        "streaming_look_back_ms": 52.5,
        "streaming_n_left_pad_tokens": 32,
    }
    return {"config": config, "vocab": vocab, "special_tokens": special, "audio": audio}


def write_hugging_face_checkpoint(
    folder: Path, mistral_folder: Path, *, max_shard_size: str | None = None
) -> Path:
    """Write the same model as transformers saves it, with tekken.json beside it.

    Args:
        folder: Made if it is missing.
        mistral_folder: A folder of `write_checkpoint`.
        max_shard_size: Such as "100KB", to split model.safetensors into several files.
    """
    params = json.loads((mistral_folder / "params.json").read_text())
    audio = json.loads((mistral_folder / "tekken.json").read_text())["audio"]
    source = load_file(mistral_folder / "consolidated.safetensors")
    config = hugging_face_config(params, round(audio["transcription_delay_ms"] / TOKEN_MS))
    model = VoxtralRealtimeForConditionalGeneration(config)
    weights = hugging_face_tensors(source, params)
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"]
    model.load_state_dict(weights)
    model = model.to(next(iter(source.values())).dtype)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    shutil.copy(mistral_folder / "tekken.json", folder)
    return folder


def hugging_face_config(params: dict[str, Any], num_delay_tokens: int) -> VoxtralRealtimeConfig:
    """Return transformers' configuration of the model that params.json describes."""
    audio = params["multimodal"]["whisper_model_args"]
    return VoxtralRealtimeConfig(
        audio_config=_stack_config(audio["encoder_args"]),
        text_config=_stack_config(params)
        | {
            "num_key_value_heads": params["n_kv_heads"],
            "max_position_embeddings": params["model_max_length"],
            "tie_word_embeddings": True,
        },
        downsample_factor=audio["downsample_args"]["downsample_factor"],
        default_num_delay_tokens=num_delay_tokens,
    )


def _stack_config(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": params["vocab_size"],
        "hidden_size": params["dim"],
        "intermediate_size": params["hidden_dim"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "head_dim": params["head_dim"],
        "sliding_window": params["sliding_window"],
        "rms_norm_eps": params["norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": params["rope_theta"]},
    }


# The longest match comes first: these are applied one after the other to each name.
ENCODER_RENAMES = {
    ENCODER + "conv_layers.0.conv.": "model.audio_tower.embedder.conv1.",
    ENCODER + "conv_layers.1.conv.": "model.audio_tower.embedder.conv2.",
    ENCODER + "transformer.": "model.audio_tower.",
    ".attention_norm.": ".self_attn_layer_norm.",
    ".ffn_norm.": ".final_layer_norm.",
}
ADAPTER_RENAMES = {
    EMBEDDING + "audio_language_projection.0.": "model.multi_modal_projector.linear_1.",
    EMBEDDING + "audio_language_projection.2.": "model.multi_modal_projector.linear_2.",
    EMBEDDING + "tok_embeddings.": "model.language_model.embed_tokens.",
}
DECODER_RENAMES = {
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".ada_rms_norm_t_cond.0.": ".ada_rms_norm.linear1.",
    ".ada_rms_norm_t_cond.2.": ".ada_rms_norm.linear2.",
}
LAYER_RENAMES = {
    **{f".attention.w{letter}.": f".self_attn.{letter}_proj." for letter in "qkvo"},
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
}


def hugging_face_name(name: str) -> str:
    """Return transformers' name of a tensor in a Mistral file."""
    if name.startswith(ENCODER):
        renames = ENCODER_RENAMES | LAYER_RENAMES
    elif name.startswith(EMBEDDING):
        renames = ADAPTER_RENAMES
    else:
        name, renames = "model.language_model." + name, DECODER_RENAMES | LAYER_RENAMES
    for old, new in renames.items():
        name = name.replace(old, new)
    return name


def hugging_face_tensors(
    source: dict[str, torch.Tensor], params: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a Mistral file under transformers' names and in its RoPE layout."""
    encoder_head_dim = params["multimodal"]["whisper_model_args"]["encoder_args"]["head_dim"]
    out = {}
    for name, tensor in source.items():
        if ".attention.wq." in name or ".attention.wk." in name:
            head_dim = encoder_head_dim if name.startswith(ENCODER) else params["head_dim"]
            tensor = split_halves(tensor, head_dim)
        out[hugging_face_name(name)] = tensor
    return out


def split_halves(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head from adjacent RoPE pairs to split halves.

    Within a head of 6 rows: 0 1 2 3 4 5 (pairs 01, 23, 45) becomes 0 2 4 1 3 5 (pairs 01, 23, 45
    again, now three rows apart).
    """
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))  # (heads, pair, member, ...)
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def main() -> None:
    """Write a random checkpoint of the published model's size, in bfloat16: 8.9 GB."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    write_checkpoint(
        parser.parse_args().folder,
        decoder=FULL_SIZE_DECODER,
        encoder=FULL_SIZE_ENCODER,
        dtype=torch.bfloat16,
    )


if __name__ == "__main__":
    main()
