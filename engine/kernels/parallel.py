"""Compile kernels, and run them on the threads that PyTorch already has.

A kernel is a function of one address, at which its arguments are. All threads run it at once, with
the same arguments, and share the work (see `work`).

OpenMP's threads wait for work by spinning for a while. A second pool would spin beside PyTorch's,
on the same cores; so the kernels run on PyTorch's own, through the library that it has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import numba
from numba import types
from platformdirs import user_cache_path

logger = logging.getLogger(__name__)

_SIGNATURE: Final = types.void(types.int64)
_OPENMP: Final = "libgomp.so.1"  # by the name that PyTorch's own copy goes by, on Linux


class Kernel:
    """A function of an address, compiled when it is first called."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        """Take a function of an int64.

        Functions it calls must be names of their modules: Numba doesn't cache closures.
        """
        self._function = function

    def __call__(self, address: int, num_threads: int) -> None:
        """Run the kernel on so many threads at once."""
        _run()(self._compiled.address, address, num_threads)

    @cached_property
    def _compiled(self) -> Any:
        folder = _cache_folder()
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            # Where it can't write, Numba falls back to a folder that isn't tied to these sources.
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
        return numba.cfunc(_SIGNATURE, cache=cache)(self._function)


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
def _run() -> Callable[[int, int, int], None]:
    """Return what calls the function at an address with an argument, on so many threads."""
    try:
        parallel = ctypes.CDLL(_OPENMP).GOMP_parallel
    except (OSError, AttributeError):
        return _run_on_python_threads()
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None

    def run(function: int, argument: int, num_threads: int) -> None:
        parallel(function, argument, num_threads, 0)

    return run


def _run_on_python_threads() -> Callable[[int, int, int], None]:
    """Return what does the same where OpenMP has another name: at some 50 us a call."""
    threads = ThreadPoolExecutor(thread_name_prefix="kernel")

    def run(function: int, argument: int, num_threads: int) -> None:
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)
        others = [threads.submit(kernel, argument) for _ in range(num_threads - 1)]
        kernel(argument)
        for other in others:
            other.result()

    return run
