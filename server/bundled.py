"""Where the bundled model lies: in the checkout, and beside this package once installed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from voxlite.engine.errors import CheckpointError

_DEMO: Final = Path(__file__).parent.parent / "models" / "demo"


def bundled_model() -> Path:
    """Return the bundled checkpoint's folder.

    Raises:
        CheckpointError: this installation has none.
    """
    if not (_DEMO / "params.json").is_file():
        raise CheckpointError(f"no bundled model in {_DEMO}; name one with --model")
    return _DEMO
