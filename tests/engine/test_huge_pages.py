"""Huge pages: found, asked for, and of no consequence to what lies in them."""

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.model.huge_pages import collapse, large_memory

SIZE = 64 * 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has them")


def huge_bytes_of(address: int) -> int:
    """Return how much of the mapping that holds this address lies in huge pages."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no mapping holds {address:x}")


def test_large_memory_moves_into_huge_pages_and_keeps_its_content() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        numbers = np.frombuffer(memory, np.int32)
        numbers[:] = np.arange(len(numbers))
        address = numbers.ctypes.data
        found = [part for part in large_memory() if address + SIZE // 2 in part]
        assert len(found) == 1
        if collapse(found) == 0:
            pytest.skip("this kernel has no huge pages to give")
        assert huge_bytes_of(address) >= SIZE // 2
        assert np.array_equal(numbers, np.arange(len(numbers)))
        del numbers


def test_memory_that_is_gone_by_then_is_left_alone() -> None:
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = np.frombuffer(memory, np.int32)
    address = numbers.ctypes.data
    del numbers
    memory.close()
    assert collapse([range(address, address + SIZE)]) == 0


def test_small_mappings_are_not_looked_at() -> None:
    assert all(len(part) >= 16 * 2**20 for part in large_memory())
