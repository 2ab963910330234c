"""The engine's own kernels for CPUs, compiled by Numba where they run. See README.md.

Nothing here knows PyTorch: kernels read addresses in descriptors, which `engine/model` fills in
(`matrix`, `windows`, `operations`, `stack_program`). From bottom to top: `intrinsics`,
`descriptors`, `tiles` and `attention_tiles`, `work`, `linear`, `norm`, `rope` and `attention`,
`program`. `parallel` compiles a kernel and runs it on PyTorch's threads.
"""

import numba

# NUMBA_DISABLE_JIT, set for other code, must not switch the kernels off: as Python they can't run.
numba.config.DISABLE_JIT = 0
