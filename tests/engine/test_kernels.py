"""Kernels: that their sums are what float64 says, on any processor and any threads."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from voxlite.engine.kernels import parallel
from voxlite.engine.kernels.intrinsics import fetch_add, ints_at, record_reader
from voxlite.engine.kernels.parallel import Kernel
from voxlite.engine.kernels.tiles import TILE_WEIGHTS, make_int8_tile
from voxlite.engine.model.layers import rotate
from voxlite.engine.model.matrix import Int8Tiles, fits_bfloat16_linear
from voxlite.engine.model.operations import (
    bfloat16_linear,
    float32_rms_norm,
    int8_linear,
    rotate_and_store,
)

SHAPES = [(4, 64), (33, 100), (200, 192), (1284, 320), (6, 10000)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 7, 8, 10, 11, 15, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_int8_layer_sums_exactly(shape: tuple[int, int], num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scales, bias = torch.rand(shape[0], generator=generator) + 0.1, normal(shape[0], seed=1)
    x = normal(num_rows, shape[1], seed=5)
    out = int8_linear(x, Int8Tiles.of(values, scales), bias)
    assert out.shape == (num_rows, shape[0])
    largest = x.abs().amax(dim=1, keepdim=True)
    rounded = torch.floor(x * (127 / largest) + 128.5).double() - 128
    steps = (largest / 127).double() * scales.double()
    expected = rounded @ values.double().T * steps + bias
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_rows_that_do_not_lie_together_are_read_as_they_are() -> None:
    weight, x = Int8Tiles.of(torch.ones((8, 64), dtype=torch.int8), torch.ones(8)), normal(6, 128)
    rows = x[::2, :64]
    assert torch.equal(int8_linear(rows, weight, None), int8_linear(rows.clone(), weight, None))


@pytest.mark.parametrize("num_rows", [*range(1, 25), 42, 100])
@pytest.mark.parametrize("shape", [(4, 32), (36, 96), (1284, 320), (6, 4000)], ids=str)
def test_a_bfloat16_layer_sums_in_float32(shape: tuple[int, int], num_rows: int) -> None:
    weight, x = normal(*shape).bfloat16(), normal(num_rows, shape[1], seed=1).bfloat16().float()
    assert fits_bfloat16_linear(weight)
    out = bfloat16_linear(x, weight)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    assert torch.equal(out[:1], bfloat16_linear(x[:1], weight))  # a row doesn't know of others


def test_rows_are_rounded_to_the_nearest_bfloat16_or_not_at_all() -> None:
    step = 2.0**-7
    row = [1 + step * part for part in (0, 0.49, 0.5, 0.51, 1.5, -0.3)] + [3e38, 1e-30]
    x = torch.tensor(row * 4)[None] * torch.tensor([[1.0], [-1.0]])
    out = bfloat16_linear(x, torch.eye(32, dtype=torch.bfloat16))
    assert torch.equal(out, x.bfloat16().float()) or torch.equal(out, x)
    no_number = bfloat16_linear(torch.full((1, 32), torch.nan), torch.eye(32).bfloat16())
    assert no_number.isnan().all()


def test_weights_of_other_shapes_are_left_to_pytorch() -> None:
    shapes = [(4, 32), (3, 32), (4, 31)]
    fits = [fits_bfloat16_linear(torch.zeros(shape).bfloat16()) for shape in shapes]
    assert fits == [True, False, False]
    assert not fits_bfloat16_linear(torch.zeros(4, 32))


@pytest.mark.parametrize("shape", [(1, 3072), (5, 50), (64, 192)], ids=str)
def test_a_norm_is_that_of_float64(shape: tuple[int, int]) -> None:
    x, weight = normal(*shape) * torch.logspace(-5, 5, shape[0])[:, None], normal(shape[1], seed=1)
    expected = torch.nn.functional.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)
    out = float32_rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(out[-1:], float32_rms_norm(x[-1:], weight, 1e-5))


@pytest.mark.parametrize("head_size", [64, 128])
def test_rotated_keys_and_values_reach_their_slots(head_size: int) -> None:
    """As PyTorch does it, where the three stand side by side in rows of one tensor."""
    heads, kv_heads, slots = 6, 2, torch.tensor([9, 0, 4])
    rows = normal(3, heads + 2 * kv_heads, head_size)
    angles = torch.rand(3, 1, head_size // 2, generator=torch.Generator().manual_seed(1)) * 6
    rotations = torch.polar(torch.ones_like(angles), angles)
    q, k, v = rows.clone().split((heads, kv_heads, kv_heads), dim=1)
    keys, values = torch.full((2, kv_heads, 10, head_size), 7.0).bfloat16()
    expected = [cache.clone() for cache in (keys, values)]
    rotate_and_store(q, k, v, rotations, slots, keys, values)
    turned = [rotate(part, rotations) for part in rows.split((heads, 2 * kv_heads), dim=1)]
    torch.testing.assert_close(q, turned[0], rtol=0, atol=1e-6)
    for cache, stored in zip(expected, (turned[1][:, :kv_heads], rows[:, -kv_heads:]), strict=True):
        cache[:, slots] = stored.transpose(0, 1).bfloat16()
    torch.testing.assert_close(keys.float(), expected[0].float(), rtol=2**-7, atol=1e-6)
    assert torch.equal(values, expected[1])


int8_tile = make_int8_tile(TILE_WEIGHTS, 3)
int8_tile_without_vnni = make_int8_tile(TILE_WEIGHTS, 3, use_vnni=False)


TILE_ARGS = np.dtype([("weights", np.int64), ("inputs", np.int64), ("out", np.int64)])
tile_args_at = record_reader(TILE_ARGS)


@Kernel
def native_tile(address: Any) -> None:
    args = tile_args_at(address)
    out = args.out, 4 * TILE_WEIGHTS
    int8_tile((args.weights, 1024), (args.inputs, 1024), out, 1024, 0, True, 3)


@Kernel
def tile_without_vnni(address: Any) -> None:
    args = tile_args_at(address)
    out = args.out, 4 * TILE_WEIGHTS
    int8_tile_without_vnni((args.weights, 1024), (args.inputs, 1024), out, 1024, 0, True, 3)


@pytest.mark.parametrize("tile", [native_tile, tile_without_vnni], ids=["native", "without"])
def test_a_tile_is_exact_at_the_largest_magnitudes(tile: Kernel) -> None:
    """Bytes of 255 and weights of -127 and 127: nothing overflows, with VNNI or without."""
    weights = np.full((TILE_WEIGHTS, 1024), 127, np.int8)
    weights[1] = -127
    weights[1, 512:] = np.arange(512) % 255 - 127
    inputs = np.full((3, 1024), 255, np.uint8)
    inputs[1, ::2] = 0
    inputs[2] = np.arange(1024) % 256
    out = np.zeros((3, TILE_WEIGHTS), np.int32)
    # Rows are interleaved, a step of 64 each.
    interleaved = np.ascontiguousarray(weights.reshape(TILE_WEIGHTS, -1, 64).transpose(1, 0, 2))
    args = np.array([(interleaved.ctypes.data, inputs.ctypes.data, out.ctypes.data)], TILE_ARGS)
    tile(args.ctypes.data, 1)
    assert np.array_equal(out, inputs.astype(np.int32) @ weights.T.astype(np.int32))


TAKE_ARGS = np.dtype([("counter", np.int64), ("num_items", np.int64), ("taken", np.int64)])
take_args_at = record_reader(TAKE_ARGS)


@Kernel
def take_all(address: Any) -> None:
    args = take_args_at(address)
    counter, taken = args.counter, carray(ints_at(args.taken), args.num_items)
    item = fetch_add(counter, 1)
    while item < args.num_items:
        taken[item] += 1
        item = fetch_add(counter, 1)


def run_take_all(kernel: Kernel, taken: np.ndarray) -> None:
    counter = np.zeros(1, np.int64)
    args = np.array([(counter.ctypes.data, len(taken), taken.ctypes.data)], TAKE_ARGS)
    kernel(args.ctypes.data, torch.get_num_threads())


def compile_and_take(taken: np.ndarray) -> None:
    run_take_all(Kernel(take_all._function), taken)


def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parallel, "_cache_folder", lambda: tmp_path / "kernels")
    taken = np.zeros(10, np.int32)
    compile_and_take(taken)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(kept) == 2
    for path in kept:
        path.write_text("garbage")
    compile_and_take(taken)
    assert (taken == 2).all()
    assert all(path.stat().st_size > len("garbage") for path in kept)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "kernels"
    place.write_text("a file, where the folder should be")
    elsewhere = Path(__file__).parent / "__pycache__"  # where Numba would go
    before = set(elsewhere.glob("*take_all*"))
    monkeypatch.setattr(parallel, "_cache_folder", lambda: place)
    taken = np.zeros(10, np.int32)
    compile_and_take(taken)
    assert (taken == 1).all()
    assert f"compiled anew at each start, {place} being of no use" in caplog.text
    assert set(elsewhere.glob("*take_all*")) == before


def test_a_kernel_is_compiled_even_where_other_code_is_not() -> None:
    script = """
import torch
from voxlite.engine.model.operations import float32_rms_norm
assert (float32_rms_norm(torch.ones(2, 8), torch.full((8,), 3.0), 0.0) == 3).all()
"""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)


@pytest.mark.usefixtures("num_threads")
def test_each_item_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for run in (parallel._run(), parallel._run_on_python_threads()):
        monkeypatch.setattr(parallel, "_run", lambda run=run: run)
        taken = np.zeros(1000, np.int32)
        run_take_all(take_all, taken)
        assert (taken == 1).all()


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("shape", [(4, 64), (20, 64), (1284, 320)], ids=str)
def test_threads_share_out_all_weights(shape: tuple[int, int]) -> None:
    """Even where there are fewer tiles than threads, or not the same number for each."""
    values, x = torch.ones(shape, dtype=torch.int8), normal(3, shape[1])
    weight, dense = Int8Tiles.of(values, torch.rand(shape[0]) + 0.1), normal(*shape).bfloat16()
    products = int8_linear(x, weight, None), bfloat16_linear(x, dense)
    torch.set_num_threads(1)
    expected = int8_linear(x, weight, None), bfloat16_linear(x, dense)
    assert all(map(torch.equal, products, expected))


def test_pytorchs_own_threads_are_used() -> None:
    """A kernel after a product of PyTorch's starts no further threads."""
    script = """
import psutil, torch
from voxlite.engine.model.matrix import Int8Tiles
from voxlite.engine.model.operations import int8_linear
torch.set_num_threads(1)
x = torch.zeros(1024, 512)
weight = Int8Tiles.of(torch.zeros((512, 512), dtype=torch.int8), torch.ones(512))
int8_linear(x, weight, None)  # compiles
torch.set_num_threads(2)
x.exp_()
before = psutil.Process().num_threads()
int8_linear(x, weight, None)
assert psutil.Process().num_threads() == before, (before, psutil.Process().num_threads())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
