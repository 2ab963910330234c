"""Find a checkpoint's folder: a local one, or a hub id fetched into the hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from voxlite.engine.errors import CheckpointError

# One format only: the published folder holds the same 8.9 GB of weights twice.
_MISTRAL_FILES: Final = ("params.json", "tekken.json", "consolidated*.safetensors*")
_HUGGING_FACE_FILES: Final = ("config.json", "tekken.json", "model*.safetensors*")


def find_checkpoint(model: str) -> Path:
    """Return the folder of a model, downloading it first if it is a hub id.

    The hub's own settings hold: `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`. The Mistral format is
    taken where the repository has it.

    Raises:
        CheckpointError: there is no such folder, or the hub doesn't give the model.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model} is a file; a checkpoint is a folder")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"{model}: no such folder (a hub id looks like owner/name)")
    try:
        files = _MISTRAL_FILES if _has_mistral_format(model) else _HUGGING_FACE_FILES
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except Exception as err:  # the hub client's, or those of whichever HTTP library it uses
        raise CheckpointError(f"{model}: no such folder here, and from the hub: {err}") from err


def _has_mistral_format(repo_id: str) -> bool:
    try:
        hf_hub_download(repo_id, "params.json")
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        return False  # offline: the other format may have been fetched earlier
    except EntryNotFoundError:
        return False
    return True
