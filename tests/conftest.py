"""Fixtures that tests of several folders share."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.checkpoints import write_checkpoint

# The tiny models' matrices are too small to be worth a second thread.
torch.set_num_threads(1)

# The same examples on every run, and no verdict on how fast a busy machine is.
settings.register_profile(
    "voxlite",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("voxlite")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in Mistral format, float32, with small windows."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny_checkpoint"))
