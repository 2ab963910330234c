"""Compile kernels, and run them on the threads that PyTorch already has.

A kernel is a function of one block of integers: addresses, sizes, and first of all a counter. All
threads run it at once, with the same block, and share the work by drawing numbers from the counter
until there are none left. In: functions and integers. Out: what the kernels write where the
addresses point.

OpenMP's threads wait for work by spinning for a while. A second pool would spin beside PyTorch's,
on the same cores; so the kernels run on PyTorch's own, through the library that it has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import numba
import torch
from numba import types
from platformdirs import user_cache_path

logger = logging.getLogger(__name__)

_SIGNATURE: Final = types.void(types.CPointer(types.int64))
_OPENMP: Final = "libgomp.so.1"  # by the name that PyTorch's own copy goes by, on Linux


class Kernel:
    """A function of a block of integers, compiled when it is first called."""

    def __init__(self, function: Callable[[Any], None], fastmath: Set[str] = frozenset()) -> None:
        """Take a function of a pointer to int64: the counter, and what it is called with.

        What it calls in turn has to be there under a name of its module, or else each start
        compiles it anew.

        Args:
            fastmath: LLVM's flags for how numbers may be computed otherwise than written.
        """
        self._function = function
        self._options = {"fastmath": set(fastmath)}

    def __call__(self, *args: int, num_counters: int = 0) -> None:
        """Run the kernel on all threads.

        Args:
            args: integers that stand in the block behind its counter.
            num_counters: how many more counters at 0 stand behind them.
        """
        block = (ctypes.c_int64 * (1 + len(args) + num_counters))(0, *args)
        _run()(self._compiled.address, block)

    @cached_property
    def _compiled(self) -> Any:
        folder = _cache_folder()
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            # Where it can't write, Numba would go elsewhere, to a folder for any state of the code.
            _check_writable(folder)
            try:
                return self._compile(cache=True)
            except Exception as err:  # what lies there is damaged
                logger.info("%s is compiled again: %r", self._function.__name__, err)
                shutil.rmtree(folder)
                return self._compile(cache=True)
        except Exception as err:
            logger.warning(
                "%s is compiled anew at each start, %s being of no use: %r",
                self._function.__name__,
                folder,
                err,
            )
            return self._compile(cache=False)
        finally:
            numba.config.CACHE_DIR = before

    def _compile(self, *, cache: bool) -> Any:
        return numba.cfunc(_SIGNATURE, cache=cache, **self._options)(self._function)


def _check_writable(folder: Path) -> None:
    """Raise OSError where no file can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@cache
def _cache_folder() -> Path:
    """Return where compiled kernels are kept: a folder for each state of this package.

    Numba alone would see that a kernel changed, but not that what it calls did.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    return user_cache_path("voxlite") / "kernels" / sources.hexdigest()[:16]


@cache
def _run() -> Callable[[int, Any], None]:
    """Return what calls the function at an address with a block of integers on all threads."""
    try:
        parallel = ctypes.CDLL(_OPENMP).GOMP_parallel
    except (OSError, AttributeError):
        return _run_on_python_threads()
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None

    def run(address: int, block: Any) -> None:
        # 0 threads: as many as PyTorch was told to use.
        parallel(address, ctypes.byref(block), 0, 0)

    return run


def _run_on_python_threads() -> Callable[[int, Any], None]:
    """Return what does the same where OpenMP has another name: at some 50 us a call."""
    threads = ThreadPoolExecutor(thread_name_prefix="kernel")

    def run(address: int, block: Any) -> None:
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        others = [
            threads.submit(kernel, ctypes.addressof(block))
            for _ in range(torch.get_num_threads() - 1)
        ]
        kernel(ctypes.addressof(block))
        for other in others:
            other.result()

    return run
