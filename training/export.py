"""Export a model in Mistral's format: params.json, consolidated.safetensors, tekken.json.

    python -m training.export WORK_DIR/run/last.pt OUT_DIR --tekken WORK_DIR/tekken.json
    python -m training.export HUGGING_FACE_DIR OUT_DIR --tekken HUGGING_FACE_DIR/tekken.json

The source is a checkpoint that training wrote, or the folder of any Voxtral-Realtime model that
transformers saved, the 4B (fine-tuned or not) included. Names and the order of RoPE's rows follow
the engine's loader, so that both agree by construction. `--hugging-face DIR` also writes a training
checkpoint in transformers' format.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import VoxtralRealtimeForConditionalGeneration

from training.model import load_checkpoint
from voxlite.engine.model.checkpoint_files import hugging_face_name
from voxlite.engine.model.weights import split_halves_to_pairs

_EMBEDDER = "mm_streams_embeddings.embedding_module."
_ENCODER = _EMBEDDER + "whisper_encoder."
_FEED_FORWARD = ("feed_forward.w1.weight", "feed_forward.w2.weight", "feed_forward.w3.weight")
_ATTENTION = ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight")
_LAYER = (
    *_ATTENTION,
    "attention.wo.weight",
    "attention_norm.weight",
    "ffn_norm.weight",
    *_FEED_FORWARD,
)
_ENCODER_BIASES = (
    "attention.wq.bias",
    "attention.wv.bias",
    "attention.wo.bias",
    "feed_forward.w2.bias",
)
_DELAY_CONDITION = ("ada_rms_norm_t_cond.0.weight", "ada_rms_norm_t_cond.2.weight")
_ADA_NORM_DIM = 32


def mistral_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `params.json` for a transformers `config.json`."""
    audio, text = config["audio_config"], config["text_config"]
    encoder = {
        "audio_encoding_args": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "num_mel_bins": audio["num_mel_bins"],
            "hop_length": 160,
            "window_size": 400,
            "chunk_length_s": None,
            "global_log_mel_max": 1.5,
            "transcription_format": "streaming",
        },
        "dim": audio["hidden_size"],
        "n_layers": audio["num_hidden_layers"],
        "head_dim": audio["head_dim"],
        "hidden_dim": audio["intermediate_size"],
        "n_heads": audio["num_attention_heads"],
        "n_kv_heads": audio["num_attention_heads"],
        "vocab_size": text["vocab_size"],
        "use_biases": True,
        "use_cache": False,
        "rope_theta": audio["rope_parameters"]["rope_theta"],
        "causal": True,
        "norm_eps": audio["rms_norm_eps"],
        "pos_embed": "rope",
        "max_source_positions": None,
        "ffn_type": "swiglu",
        "norm_type": "rms_norm",
        "sliding_window": audio["sliding_window"],
    }
    return {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text["head_dim"],
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "use_biases": False,
        "causal": True,
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        "model_parallel": 1,
        "tied_embeddings": True,
        "sliding_window": text["sliding_window"],
        "model_max_length": text["max_position_embeddings"],
        "multimodal": {
            "whisper_model_args": {
                "encoder_args": encoder,
                "downsample_args": {"downsample_factor": config["downsample_factor"]},
            }
        },
        "ada_rms_norm_t_cond": True,
        "ada_rms_norm_t_cond_dim": _ADA_NORM_DIM,
    }


def mistral_names(params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of every tensor of a model, in Mistral's format."""
    yield _EMBEDDER + "tok_embeddings.weight"
    for index in range(2):
        yield f"{_ENCODER}conv_layers.{index}.conv.weight"
        yield f"{_ENCODER}conv_layers.{index}.conv.bias"
    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    for layer in range(encoder["n_layers"]):
        for part in (*_LAYER, *_ENCODER_BIASES):
            yield f"{_ENCODER}transformer.layers.{layer}.{part}"
    yield _ENCODER + "transformer.norm.weight"
    yield _EMBEDDER + "audio_language_projection.0.weight"
    yield _EMBEDDER + "audio_language_projection.2.weight"
    for layer in range(params["n_layers"]):
        for part in (*_LAYER, *_DELAY_CONDITION):
            yield f"layers.{layer}.{part}"
    yield "norm.weight"


def mistral_tensors(
    params: Mapping[str, Any], hugging_face: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors under Mistral's names and in its RoPE layout.

    Args:
        params: the content of `params.json`.
        hugging_face: tensors by the names that transformers saves.

    Raises:
        ValueError: a tensor is missing, or one is left over.
    """
    left = set(hugging_face) - {"lm_head.weight"}
    tensors = {}
    for name in mistral_names(params):
        source = hugging_face_name(name)
        if source not in left:
            raise ValueError(f"tensor {source} is missing from the source")
        left.remove(source)
        tensor = hugging_face[source]
        if ".attention.wq." in name or ".attention.wk." in name:
            is_encoder = name.startswith(_ENCODER)
            encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
            head_size = encoder["head_dim"] if is_encoder else params["head_dim"]
            tensor = split_halves_to_pairs(tensor, head_size)
        tensors[name] = tensor.contiguous()
    if left:
        raise ValueError(f"tensor {min(left)} and {len(left) - 1} others are not part of the model")
    return tensors


def read_hugging_face(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all `model*.safetensors` of a folder, mapped, not read."""
    tensors = {}
    with ExitStack() as files:
        for path in sorted(folder.glob("model*.safetensors")):
            file = files.enter_context(safe_open(path, "pt"))
            tensors.update({name: file.get_tensor(name) for name in file.keys()})
    return tensors


def export(hugging_face: Path, out: Path, tekken: Path, dtype: torch.dtype | None) -> int:
    """Write the folder in Mistral's format; return the number of parameters.

    Args:
        hugging_face: folder with `config.json` and `model*.safetensors`.
        out: folder to write; made if missing.
        tekken: the vocabulary to copy into it.
        dtype: of the weights, or None to keep that of the source.
    """
    params = mistral_params(json.loads((hugging_face / "config.json").read_text()))
    tensors = mistral_tensors(params, read_hugging_face(hugging_face))
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "params.json").write_text(json.dumps(params, indent=1) + "\n")
    weights = out / "consolidated.safetensors"
    save_file(tensors, weights)
    weights.chmod(0o644)  # safetensors lets nobody else read what it writes
    shutil.copyfile(tekken, out / "tekken.json")
    return sum(tensor.numel() for tensor in tensors.values())


def save_hugging_face(checkpoint: Path, folder: Path) -> None:
    """Write a training checkpoint's model as transformers would, without the helper heads."""
    config, weights = load_checkpoint(checkpoint)
    model = VoxtralRealtimeForConditionalGeneration(config)
    model.load_state_dict(weights)
    model.save_pretrained(folder)


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="training checkpoint or transformers folder")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--tekken", type=Path, required=True, help="vocabulary file")
    parser.add_argument("--hugging-face", type=Path, help="keep transformers' format here")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "keep"), default="bfloat16")
    args = parser.parse_args()

    folder = args.source
    if args.source.is_file():
        folder = args.hugging_face or args.out / "hugging-face"
        save_hugging_face(args.source, folder)
    dtype = None if args.dtype == "keep" else getattr(torch, args.dtype)
    num_parameters = export(folder, args.out, args.tekken, dtype)
    if args.source.is_file() and not args.hugging_face:
        shutil.rmtree(folder)
    print(f"{num_parameters / 1e6:.1f} M parameters -> {args.out}")


if __name__ == "__main__":
    main()
