"""One linear layer of 4B sizes: the kernels beside PyTorch's own products, in GB/s of weights read.

    python -m voxlite.bench.linear_speed

Layers are copied until they are larger than the caches, and read one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from voxlite.engine.model.linear import Int8Linear, quantize
from voxlite.engine.model.operations import bfloat16_linear

_OUT_DIM, _IN_DIM = 9216, 3072
_NUM_COPIES: Final = 16  # 0.9 GB in bfloat16
_NUM_ROUNDS: Final = 9
_NUM_ROWS: Final = (1, 4, 7)


def measure() -> dict[str, list[float]]:
    """Return GB/s by way of multiplying, a median for each number of rows, measured alternately."""
    noise = torch.randn(_OUT_DIM, _IN_DIM) / _IN_DIM**0.5
    dense = [noise.bfloat16() for _ in range(_NUM_COPIES)]
    int8 = [Int8Linear(quantize([noise])) for _ in range(_NUM_COPIES)]
    ways: dict[str, tuple[int, Sequence[Callable[[Tensor], Tensor]]]] = {
        "bfloat16, PyTorch": (2, [partial(_multiply, weight=weight) for weight in dense]),
        "bfloat16, kernel": (2, [partial(bfloat16_linear, weight=weight) for weight in dense]),
        "int8, kernel": (1, int8),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for num_rows in _NUM_ROWS:
        x = torch.randn(num_rows, _IN_DIM)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_NUM_ROUNDS):
            for name, (_, layers) in ways.items():
                started_s = perf_counter()
                for layer in layers:
                    layer(x)
                times[name].append(perf_counter() - started_s)
        for name, (weight_bytes, _) in ways.items():
            num_bytes = weight_bytes * _OUT_DIM * _IN_DIM * _NUM_COPIES
            rates[name].append(num_bytes / 1e9 / median(times[name]))
    return rates


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight)


if __name__ == "__main__":
    print("| GB/s of weights |", " | ".join(f"{n} rows" for n in _NUM_ROWS), "|")
    print("| --- |" + " --- |" * len(_NUM_ROWS))
    for name, rates in measure().items():
        print(f"| {name} |", " | ".join(f"{rate:.1f}" for rate in rates), "|")
