"""What happens to rows between two products: RMS norm, the delay's scale, SiLU times up."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import carray, float32, int32, njit

from voxlite.engine.kernels.attention_tiles import POWER_COEFFICIENTS as _POWER_COEFFICIENTS
from voxlite.engine.kernels.intrinsics import floats_at

_LOG2_E: Final = 1.4426950408889634
# Adding this rounds a number up to 2^22 in magnitude to an integer, held in the lowest bits.
_ROUNDER: Final = 1.5 * 2**23


@njit(fastmath={"reassoc", "nsz"})  # so that squares are summed in registers
def norm_row(row, dim, weight, eps, out):  # type: ignore[no-untyped-def]
    """Norm the row at an address, and write it to another."""
    x, weights = carray(floats_at(row), dim), carray(floats_at(weight), dim)
    normed = carray(floats_at(out), dim)
    squares = float32(0)
    for i in range(dim):
        squares += x[i] * x[i]
    scale = float32(1) / (squares / float32(dim) + eps) ** float32(0.5)
    for i in range(dim):
        normed[i] = x[i] * scale * weights[i]


@njit
def scale_row(row, scale, dim):  # type: ignore[no-untyped-def]
    """Multiply a row by the delay's scale, in place."""
    x, scales = carray(floats_at(row), dim), carray(floats_at(scale), dim)
    for i in range(dim):
        x[i] *= scales[i]


@njit(error_model="numpy", fastmath={"contract"})
def gate_row(row, dim):  # type: ignore[no-untyped-def]
    """Write SiLU(gate) times up, which stands behind it, where the gate was."""
    gates, ups = carray(floats_at(row), dim), carray(floats_at(row + 4 * dim), dim)
    for i in range(dim):
        gate = gates[i]
        # The sigmoid of either sign from e^-|gate|, which is at most 1.
        power = _power_of_2(max(-abs(gate) * float32(_LOG2_E), float32(-126)))
        part = float32(1) if gate >= 0 else power
        gates[i] = gate * (part / (float32(1) + power)) * ups[i]


@njit(error_model="numpy", fastmath={"contract"})
def _power_of_2(x):  # type: ignore[no-untyped-def]
    """Return 2 to the power of a number from -126 to 0."""
    # The whole number stands in the lowest bits.
    rounded = x + float32(_ROUNDER)
    fraction = x - (rounded - float32(_ROUNDER))
    result = float32(_POWER_COEFFICIENTS[5])
    result = result * fraction + float32(_POWER_COEFFICIENTS[4])
    result = result * fraction + float32(_POWER_COEFFICIENTS[3])
    result = result * fraction + float32(_POWER_COEFFICIENTS[2])
    result = result * fraction + float32(_POWER_COEFFICIENTS[1])
    result = result * fraction + float32(_POWER_COEFFICIENTS[0])
    exponent = np.int32(np.float32(rounded).view(np.int32) + int32(127))
    return result * np.int32(exponent << int32(23)).view(np.float32)
