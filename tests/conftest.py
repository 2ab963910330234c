"""Fixtures that tests of several folders share."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_checkpoint

# The tiny models' matrices are too small to be worth a second thread.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in Mistral format, float32, with small windows."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny_checkpoint"))
