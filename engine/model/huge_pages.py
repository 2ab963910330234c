"""Weights in huge pages: with pages of 4 KiB, reading gigabytes a step waits for address look-ups.

In: nothing; it acts on the memory that the process has. Linux only (6.1 and later); elsewhere, and
where the kernel refuses, nothing happens. It is about speed alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_HUGE_PAGE_BYTES: Final = 2 * 2**20
_MIN_BYTES: Final = 16 * 2**20
# A call holds up whoever else changes mappings: so it gets a piece at a time.
_PIECE_BYTES: Final = 64 * 2**20
_MADV_COLLAPSE: Final = 25  # linux/mman.h; Python's mmap module doesn't name it


def large_memory() -> list[range]:
    """Return the addresses of the process's large anonymous mappings, in whole huge pages."""
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.is_file():
        return []
    found = []
    for line in maps.read_text().splitlines():
        bounds, permissions, _, _, inode, *name = line.split()
        is_anonymous = inode == "0" and (not name or name[0] == "[heap]")
        if not is_anonymous or permissions != "rw-p":
            continue
        start, stop = (int(address, 16) for address in bounds.split("-"))
        start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        stop = stop // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if stop - start >= _MIN_BYTES:
            found.append(range(start, stop))
    return found


def collapse(memory: Sequence[range]) -> int:
    """Move what lies there into huge pages. Return how many bytes the kernel moved or had moved."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for part in memory:
        for start in part[::_PIECE_BYTES]:
            size = min(_PIECE_BYTES, part.stop - start)
            if libc.madvise(start, size, _MADV_COLLAPSE) == 0:
                num_bytes += size
    return num_bytes
