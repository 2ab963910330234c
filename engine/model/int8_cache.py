"""Int8 weights on disk, so that only the first start quantizes them.

In: layers by name. Out: the same. One safetensors file a layer, each written whole or not at all,
in a folder of the user's cache that belongs to the very files of one checkpoint. A file that can't
be read is as good as none.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from voxlite.engine.model.matrix import Int8Tiles

logger = logging.getLogger(__name__)

# To be raised whenever the same checkpoint would give other files.
_VERSION: Final = 3


class Int8Cache:
    """The int8 weights of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_writable = True

    @classmethod
    def of(cls, fingerprint: str) -> Int8Cache:
        """Return the cache of the files that have this fingerprint."""
        return cls(user_cache_path("voxlite") / f"int8-v{_VERSION}" / fingerprint)

    def load(self, name: str, out_dim: int, in_dim: int) -> Int8Tiles | None:
        """Return a layer's weight, mapped into memory, or None if it isn't there."""
        try:
            tensors = load_file(self.folder / f"{name}.safetensors")
            weight = Int8Tiles(**tensors)
        except (OSError, SafetensorError, TypeError):
            return None
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in weight]
        wanted = [
            (Int8Tiles.shape(out_dim, in_dim), torch.int8),
            ((out_dim,), torch.float32),
            ((out_dim,), torch.int32),
        ]
        return weight if kinds == wanted else None

    def save(self, name: str, weight: Int8Tiles) -> None:
        """Keep a layer's weight. Where the disk doesn't take it, say so once and go on."""
        if not self._is_writable:
            return
        path = self.folder / f"{name}.safetensors"
        # A name of this process alone: two that start at once must not write into each other's.
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(weight._asdict(), draft)
            draft.replace(path)
        except (OSError, SafetensorError) as err:
            self._is_writable = False
            with suppress(OSError):
                draft.unlink()
            logger.warning("int8 weights are not kept for the next start: %s", err)
