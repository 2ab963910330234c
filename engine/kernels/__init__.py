"""The engine's own kernels for CPUs, compiled by Numba where they run.

PyTorch's products of a matrix and a few rows reach half the speed of memory, its int8 layers have
to be packed for seconds a gigabyte at each start, and its attention wants a window in one piece.
These read weights and keys where they lie, in the file or the KV cache, at the speed of memory.

`parallel` runs a kernel on PyTorch's threads, `vectors` and `attention_tiles` hold the pieces that
are written in LLVM's own language, `stack` runs all layers of encoder or decoder in one call; the
others are kernels with what calls them, and the steps that `stack` is made of.
"""

import numba

# A kernel is nothing without its compiler: what switches it off for other code is not for these.
numba.config.DISABLE_JIT = 0
