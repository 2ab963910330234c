"""Load a checkpoint's weights: both formats, memory-mapped, strictly.

In: a folder and its `ModelConfig`. Out: `Encoder` and `Decoder` with their weights. Tensors that
already have the wanted dtype and device are views of the file; others are converted one at a time,
so there is never a second copy of the weights. Names below are Mistral's; Hugging Face's are
derived from them, and its query and key rows are put back from split halves to adjacent pairs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelConfig, TransformerConfig
from engine.errors import CheckpointError
from engine.model.decoder import Decoder
from engine.model.encoder import KERNEL, Encoder
from engine.model.layers import Block, Linear

_EMBEDDER: Final = "mm_streams_embeddings.embedding_module."
_ENCODER: Final = _EMBEDDER + "whisper_encoder."

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# The first whose Mistral side starts the name applies, then all parts found inside it.
_HUGGING_FACE_PREFIXES: Final = (
    (_ENCODER + "conv_layers.0.conv.", "audio_tower.embedder.conv1."),
    (_ENCODER + "conv_layers.1.conv.", "audio_tower.embedder.conv2."),
    (_ENCODER + "transformer.", "audio_tower."),
    (_EMBEDDER + "audio_language_projection.0.", "multi_modal_projector.linear_1."),
    (_EMBEDDER + "audio_language_projection.2.", "multi_modal_projector.linear_2."),
    (_EMBEDDER + "tok_embeddings.", "language_model.model.embed_tokens."),
    ("", "language_model.model."),
)
_HUGGING_FACE_PARTS: Final = (
    (".attention.wq.", ".self_attn.q_proj."),
    (".attention.wk.", ".self_attn.k_proj."),
    (".attention.wv.", ".self_attn.v_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".ada_rms_norm_t_cond.0.", ".ada_rms_norm.linear1."),
    (".ada_rms_norm_t_cond.2.", ".ada_rms_norm.linear2."),
)
_HUGGING_FACE_NORMS: Final = {
    "audio_tower.": (
        (".attention_norm.", ".self_attn_layer_norm."),
        (".ffn_norm.", ".final_layer_norm."),
    ),
    "language_model.": (
        (".attention_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
    ),
}
# The output head is the embedding; some files hold it again under this name.
_TIED_HEAD: Final = "lm_head.weight"


def hugging_face_name(mistral_name: str) -> str:
    """Translate a tensor's name from Mistral's checkpoint format to transformers'."""
    old, new = next(p for p in _HUGGING_FACE_PREFIXES if mistral_name.startswith(p[0]))
    name = new + mistral_name.removeprefix(old)
    for part in _HUGGING_FACE_PARTS:
        name = name.replace(*part)
    for stack, norms in _HUGGING_FACE_NORMS.items():
        if name.startswith(stack):
            for part in norms:
                name = name.replace(*part)
    return name


def split_halves_to_pairs(rows: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of a query or key projection from transformers' RoPE layout to Mistral's.

        head size 8, rows of one head    0 1 2 3 | 4 5 6 7   split halves
                                      -> 0 4 1 5   2 6 3 7   adjacent pairs

    Args:
        rows: (heads * head_size, ...).
    """
    heads = rows.unflatten(0, (-1, 2, head_size // 2))
    pairs: Tensor = heads.transpose(1, 2).flatten(0, 2)
    return pairs


class _Reader:
    """Read tensors by name and shape out of all shards, and notice what nobody asked for."""

    def __init__(
        self, folder: Path, config: ModelConfig, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self._is_mistral_format = config.is_mistral_format
        self._device = device
        self.num_bytes = 0
        self._open_shards: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        for path in _shards(folder, "consolidated" if config.is_mistral_format else "model"):
            for name in _names(path):
                if name in self._shard_of:
                    raise CheckpointError(f"{path}: tensor {name} is in {self._shard_of[name]} too")
                self._shard_of[name] = path
        self._unread = set(self._shard_of)
        self.dtype = dtype or self._read_raw(_EMBEDDER + "tok_embeddings.weight").dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the wanted dtype on the wanted device.

        Raises:
            CheckpointError: it is missing, has another shape or a dtype that isn't for weights.
        """
        raw = self._read_raw(name)
        if tuple(raw.shape) != shape:
            raise CheckpointError(
                f"{self._path(name)}: tensor {self._name(name)} has shape {tuple(raw.shape)}, the "
                f"config says {shape}"
            )
        if raw.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self._path(name)}: tensor {self._name(name)} has dtype {raw.dtype}; float32, "
                f"bfloat16 and float16 can be read"
            )
        self._unread.discard(self._name(name))
        tensor = raw.to(device=self._device, dtype=self.dtype)
        if tensor is not raw:
            # A mapping lives as long as its file is open here or one of its tensors is in use:
            # without this the pages of all originals would stay beside the converted weights.
            self._open_shards.clear()
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, name: str, out_dim: int, in_dim: int, *, bias: bool = False) -> Linear:
        return Linear(
            self.tensor(name + ".weight", out_dim, in_dim),
            self.tensor(name + ".bias", out_dim) if bias else None,
        )

    def rotated_linear(
        self, name: str, out_dim: int, in_dim: int, head_size: int, *, bias: bool = False
    ) -> Linear:
        """Return a query or key projection, with rows as adjacent pairs."""
        linear = self.linear(name, out_dim, in_dim, bias=bias)
        if self._is_mistral_format:
            return linear
        return Linear(
            split_halves_to_pairs(linear.weight, head_size),
            None if linear.bias is None else split_halves_to_pairs(linear.bias, head_size),
        )

    def conv(self, name: str, out_dim: int, in_dim: int) -> Linear:
        weight = self.tensor(name + ".weight", out_dim, in_dim, KERNEL)
        return Linear(weight.flatten(1), self.tensor(name + ".bias", out_dim))

    def check_tied_head(self, embedding_name: str) -> None:
        """Raise CheckpointError if there is an output head that isn't the embedding again."""
        path = self._shard_of.get(_TIED_HEAD)
        if path is None or self._is_mistral_format:
            return
        with safe_open(path, framework="pt") as shard:
            if not torch.equal(shard.get_tensor(_TIED_HEAD), self._read_raw(embedding_name)):
                raise CheckpointError(
                    f"{path}: tensor {_TIED_HEAD} differs from the embedding; they must be tied"
                )
        self._unread.discard(_TIED_HEAD)

    def finish(self) -> None:
        """Raise CheckpointError if the files hold a tensor that was not read."""
        if self._unread:
            name = min(self._unread)
            raise CheckpointError(
                f"{self._shard_of[name]}: tensor {name} is not part of this model "
                f"({len(self._unread)} such tensors)"
            )

    def _name(self, name: str) -> str:
        return name if self._is_mistral_format else hugging_face_name(name)

    def _path(self, name: str) -> Path:
        try:
            return self._shard_of[self._name(name)]
        except KeyError:
            files = ", ".join(sorted({str(path) for path in self._shard_of.values()}))
            raise CheckpointError(f"tensor {self._name(name)} is missing in {files}") from None

    def _read_raw(self, name: str) -> Tensor:
        path = self._path(name)
        if path not in self._open_shards:
            self._open_shards[path] = safe_open(path, framework="pt")
        tensor: Tensor = self._open_shards[path].get_tensor(self._name(name))
        return tensor


def _shards(folder: Path, stem: str) -> list[Path]:
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            paths = sorted(folder / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise CheckpointError(f"{index}: no weight_map of tensor names to files") from err
        if not paths:
            raise CheckpointError(f"{index}: its weight_map is empty")
    else:
        paths = sorted(folder.glob(f"{stem}*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} holds no {stem}*.safetensors")
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, or not a file")
    return paths


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as shard:
            return list(shard.keys())
    except (SafetensorError, OSError) as err:
        raise CheckpointError(f"{path}: {err}; the file is damaged or incomplete") from err


class Weights(NamedTuple):
    encoder: Encoder
    decoder: Decoder
    num_bytes: int


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype | None, device: torch.device
) -> Weights:
    """Load all weights of a checkpoint folder.

    Args:
        dtype: None takes the dtype that the embedding has in the file.

    Raises:
        CheckpointError: a file is missing or damaged; a tensor is missing, left over, or has a
            shape that the config doesn't give it. The file and the tensor are named.
    """
    reader = _Reader(folder, config, dtype, device)
    reader.check_tied_head(_EMBEDDER + "tok_embeddings.weight")
    encoder, decoder = _encoder(reader, config), _decoder(reader, config)
    reader.finish()
    return Weights(encoder, decoder, reader.num_bytes)


def _encoder(reader: _Reader, config: ModelConfig) -> Encoder:
    encoder, dim = config.encoder, config.encoder.dim
    return Encoder(
        config=encoder,
        conv1=reader.conv(_ENCODER + "conv_layers.0.conv", dim, config.audio.num_mel_bins),
        conv2=reader.conv(_ENCODER + "conv_layers.1.conv", dim, dim),
        blocks=tuple(
            Block(**_block(reader, f"{_ENCODER}transformer.layers.{i}.", encoder, bias=True))
            for i in range(encoder.num_layers)
        ),
        norm=reader.tensor(_ENCODER + "transformer.norm.weight", dim),
        adapter_in=reader.linear(
            _EMBEDDER + "audio_language_projection.0",
            config.decoder.dim,
            config.block_pool_size * dim,
        ),
        adapter_out=reader.linear(
            _EMBEDDER + "audio_language_projection.2", config.decoder.dim, config.decoder.dim
        ),
    )


def _decoder(reader: _Reader, config: ModelConfig) -> Decoder:
    decoder, dim = config.decoder, config.decoder.dim
    layers = [f"layers.{i}." for i in range(decoder.num_layers)]
    ada = config.ada_norm_dim
    return Decoder(
        config=decoder,
        embedding=reader.tensor(_EMBEDDER + "tok_embeddings.weight", config.vocab_size, dim),
        blocks=tuple(Block(**_block(reader, name, decoder, bias=False)) for name in layers),
        delay_down=tuple(reader.linear(f"{n}ada_rms_norm_t_cond.0", ada, dim) for n in layers),
        delay_up=tuple(reader.linear(f"{n}ada_rms_norm_t_cond.2", dim, ada) for n in layers),
        norm=reader.tensor("norm.weight", dim),
    )


def _block(reader: _Reader, name: str, config: TransformerConfig, *, bias: bool) -> dict[str, Any]:
    """Read one layer. With `bias`, wq, wv, wo and w2 have one; wk, w1 and w3 never do."""
    dim, size = config.dim, config.head_size
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    return dict(
        attention_norm=reader.tensor(f"{name}attention_norm.weight", dim),
        wq=reader.rotated_linear(f"{name}attention.wq", queries, dim, size, bias=bias),
        wk=reader.rotated_linear(f"{name}attention.wk", keys, dim, size),
        wv=reader.linear(f"{name}attention.wv", keys, dim, bias=bias),
        wo=reader.linear(f"{name}attention.wo", dim, queries, bias=bias),
        ffn_norm=reader.tensor(f"{name}ffn_norm.weight", dim),
        w1=reader.linear(f"{name}feed_forward.w1", config.hidden_dim, dim),
        w2=reader.linear(f"{name}feed_forward.w2", dim, config.hidden_dim, bias=bias),
        w3=reader.linear(f"{name}feed_forward.w3", config.hidden_dim, dim),
    )
