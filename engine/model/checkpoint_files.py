"""A checkpoint's files: its tensors by Mistral's names, whichever format they are in.

In: a folder. Out: tensors as they are stored, mapped into memory. Names are Mistral's; Hugging
Face's are derived from them. Strict: a tensor that is missing, of another shape, or asked for by
nobody is an error.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from voxlite.engine.errors import CheckpointError

EMBEDDER: Final = "mm_streams_embeddings.embedding_module."
ENCODER: Final = EMBEDDER + "whisper_encoder."
EMBEDDING: Final = EMBEDDER + "tok_embeddings.weight"

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# The first whose Mistral side starts the name applies, then all parts found inside it.
_HUGGING_FACE_PREFIXES: Final = (
    (ENCODER + "conv_layers.0.conv.", "audio_tower.embedder.conv1."),
    (ENCODER + "conv_layers.1.conv.", "audio_tower.embedder.conv2."),
    (ENCODER + "transformer.", "audio_tower."),
    (EMBEDDER + "audio_language_projection.0.", "multi_modal_projector.linear_1."),
    (EMBEDDER + "audio_language_projection.2.", "multi_modal_projector.linear_2."),
    (EMBEDDER + "tok_embeddings.", "language_model.model.embed_tokens."),
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


class CheckpointFiles:
    """Read tensors by name and shape out of all shards. Threads may share it."""

    def __init__(self, folder: Path, *, is_mistral_format: bool) -> None:
        """Find out which tensor lies in which file.

        Raises:
            CheckpointError: a file is missing or damaged, or two hold the same tensor.
        """
        self.is_mistral_format = is_mistral_format
        self._lock = threading.Lock()
        self._open_shards: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        for path in _shards(folder, "consolidated" if is_mistral_format else "model"):
            for name in _names(path):
                if name in self._shard_of:
                    raise CheckpointError(f"{path}: tensor {name} is in {self._shard_of[name]} too")
                self._shard_of[name] = path
        self._unread = set(self._shard_of)
        self._check_tied_head()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which stands for the checkpoint's."""
        return self._read_raw(EMBEDDING).dtype

    @property
    def num_bytes(self) -> int:
        """The size of the files."""
        return sum(path.stat().st_size for path in set(self._shard_of.values()))

    @property
    def fingerprint(self) -> str:
        """A name for these very files: by their paths, sizes and times of change."""
        parts = [
            f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
            for path in sorted(set(self._shard_of.values()))
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def read(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as stored: a view of the file.

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
        with self._lock:
            self._unread.discard(self._name(name))
        return raw

    def unmap(self) -> None:
        """Let go of the files, to be mapped again by the next read.

        A mapping lives as long as its file is open here or one of its tensors is in use. Called
        after a tensor was copied: without it the pages of all originals would stay beside the
        copies.
        """
        with self._lock:
            self._open_shards.clear()

    def finish(self) -> None:
        """Raise CheckpointError if the files hold a tensor that was not read."""
        if self._unread:
            name = min(self._unread)
            raise CheckpointError(
                f"{self._shard_of[name]}: tensor {name} is not part of this model "
                f"({len(self._unread)} such tensors)"
            )

    def _check_tied_head(self) -> None:
        """Raise CheckpointError if there is an output head that isn't the embedding again."""
        path = self._shard_of.get(_TIED_HEAD)
        if path is None or self.is_mistral_format:
            return
        with safe_open(path, framework="pt") as shard:
            if not torch.equal(shard.get_tensor(_TIED_HEAD), self._read_raw(EMBEDDING)):
                raise CheckpointError(
                    f"{path}: tensor {_TIED_HEAD} differs from the embedding; they must be tied"
                )
        self._unread.discard(_TIED_HEAD)

    def _name(self, name: str) -> str:
        return name if self.is_mistral_format else hugging_face_name(name)

    def _path(self, name: str) -> Path:
        try:
            return self._shard_of[self._name(name)]
        except KeyError:
            files = ", ".join(sorted({str(path) for path in self._shard_of.values()}))
            raise CheckpointError(f"tensor {self._name(name)} is missing in {files}") from None

    def _read_raw(self, name: str) -> Tensor:
        path = self._path(name)
        with self._lock:
            if path not in self._open_shards:
                self._open_shards[path] = safe_open(path, framework="pt")
            shard = self._open_shards[path]
        tensor: Tensor = shard.get_tensor(self._name(name))
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
