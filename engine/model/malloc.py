"""Keep freed memory in the process (mallopt): a step takes and frees the same megabytes each time.

glibc would return them to the kernel, which then clears their pages anew for the next layer:
thousands of page faults a step. In: nothing; it acts on the process. Where the C library is
another one, nothing happens. It is about speed alone.
"""

from __future__ import annotations

import ctypes
from typing import Final

# Names of malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_TRIM_BYTES: Final = 2**28
_MMAP_BYTES: Final = 2**25  # the most that glibc takes


def keep_freed_memory() -> bool:
    """Give back what is free now; from now on, let up to 256 MiB of freed memory stay.

    Returns:
        Whether the C library agreed.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    libc.malloc_trim(0)
    return bool(
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        and libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    )
