"""Run what uses PyTorch beside the engine's thread, and leave no threads of PyTorch's behind.

OpenMP counts the threads that it gave to every thread that still lives. With more than there are
cores they no longer wait for work but sleep, and a step of the engine takes up to a third longer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def on_own_thread(run: Callable[[], Result]) -> Result:
    """Run it on a thread that ends then; return or raise what it does."""
    with ThreadPoolExecutor(1, "own") as thread:
        return thread.submit(run).result()
