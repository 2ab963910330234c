"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2, 3, 5, 7])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads that PyTorch, and so the kernels, may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
