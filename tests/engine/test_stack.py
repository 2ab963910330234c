"""All layers in one kernel: that it does what PyTorch does layer by layer, whatever the batch."""

from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from voxlite.engine.config import TransformerConfig
from voxlite.engine.kernels.linear import MAX_BFLOAT16_ROWS
from voxlite.engine.kv_cache_manager import BlockTable
from voxlite.engine.model.attention import AttentionBatch, LayerCache, first_key
from voxlite.engine.model.layers import Layer, Rope, Stack, run_layer
from voxlite.engine.model.linear import (
    Each,
    Fused,
    Int8Linear,
    Linear,
    Projection,
    Projections,
    quantize,
)
from voxlite.engine.model.windows import Windows

CPU = torch.device("cpu")
WIDE = TransformerConfig(
    dim=96,
    num_layers=3,
    head_size=64,
    num_heads=6,
    num_kv_heads=2,
    hidden_dim=160,
    window=20,
    rope_theta=1e4,
    norm_eps=1e-5,
)
NUM_SLOTS = 128
TABLE = BlockTable(8, blocks=array("q", [5, 14, 2, 9, 0, 12, 7, 3, 15, 10, 1, 13, 4, 11, 8, 6]))


class Layers:
    """Random layers of int8 or bfloat16 weights."""

    def __init__(self, *, is_int8: bool, has_bias: bool) -> None:
        self._is_int8, self._has_bias = is_int8, has_bias
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def weight(self, out_dim: int, in_dim: int) -> Tensor:
        return (self.normal(out_dim, in_dim) / in_dim**0.5).bfloat16()

    def projection(self, out_dim: int, in_dim: int) -> Projection:
        weight, bias = self.weight(out_dim, in_dim), self.normal(out_dim)
        layer = Int8Linear(quantize([weight])) if self._is_int8 else Linear(weight)
        return replace(layer, bias=bias) if self._has_bias else layer

    def projections(self, *out_dims: int, in_dim: int, has_bias: bool) -> Projections:
        weights = [self.weight(out_dim, in_dim) for out_dim in out_dims]
        biases = [self.normal(out_dim) if has_bias else None for out_dim in out_dims]
        if has_bias:
            biases[1] = torch.zeros(out_dims[1])
        if self._is_int8:
            bias = torch.cat([b for b in biases if b is not None]) if has_bias else None
            return Fused(Int8Linear(quantize(weights), bias), out_dims)
        return Each(tuple(map(Linear, weights, biases)))

    def stack(self, config: TransformerConfig) -> Stack:
        return Stack(config=config, layers=tuple(self._layer(config) for _ in range(3)))

    def _layer(self, config: TransformerConfig) -> Layer:
        dim, hidden, size = config.dim, config.hidden_dim, config.head_size
        queries, keys = config.num_heads * size, config.num_kv_heads * size
        return Layer(
            attention_norm=1 + self.normal(dim) / 8,
            wqkv=self.projections(queries, keys, keys, in_dim=dim, has_bias=self._has_bias),
            wo=self.projection(dim, queries),
            ffn_norm=1 + self.normal(dim) / 8,
            w13=self.projections(hidden, hidden, in_dim=dim, has_bias=False),
            w2=self.projection(dim, hidden),
        )


def batch(config: TransformerConfig, positions: range) -> AttentionBatch:
    """One session's positions, whose keys lie in blocks of a few frames, out of order."""
    frames = [(first_key(p, config.window), p, p) for p in positions]
    return AttentionBatch(
        Rope(config, CPU).rotations(torch.tensor(positions)),
        torch.from_numpy(TABLE.slots(positions.start, positions.stop)),
        Windows.of(
            [(TABLE.blocks, 0, frames)],
            TABLE.frames_per_block,
            config.num_heads // config.num_kv_heads,
        ),
    )


def empty_caches(config: TransformerConfig) -> list[LayerCache]:
    shape = (2, config.num_kv_heads, NUM_SLOTS, config.head_size)
    return [LayerCache(*torch.zeros(shape).bfloat16()) for _ in range(config.num_layers)]


def layer_by_layer(
    stack: Stack, x: Tensor, positions: range, caches: list[LayerCache], scales: Tensor | None
) -> Tensor:
    reads = batch(stack.config, positions)
    for i, (layer, cache) in enumerate(zip(stack.layers, caches, strict=True)):
        x = run_layer(x, layer, stack.config, reads, cache, None if scales is None else scales[i])
    return x


@pytest.fixture(params=[False, True], ids=["bfloat16", "int8"])
def is_int8(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_scales", [0, 1, 30])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_it_does_what_pytorch_does_layer_by_layer(
    is_int8: bool, has_bias: bool, num_scales: int
) -> None:
    layers = Layers(is_int8=is_int8, has_bias=has_bias)
    stack, x = layers.stack(WIDE), layers.normal(30, WIDE.dim)
    scales = 1 + layers.normal(3, num_scales, WIDE.dim) / 8 if num_scales else None
    expected_caches, caches = empty_caches(WIDE), empty_caches(WIDE)
    expected = layer_by_layer(stack, x, range(30), expected_caches, scales)
    before = x.clone()
    out = stack(x, batch(WIDE, range(30)), caches, scales)
    assert stack._kernel is not None
    assert torch.equal(x, before)
    # A number that lies between two steps of eight bits may go either way.
    torch.testing.assert_close(out, expected, rtol=0, atol=0.1 if is_int8 else 0.02)
    assert (out - expected).abs().mean() < 0.01 * expected.abs().mean()
    for cache, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache.keys, other.keys, rtol=0, atol=0.1)
        torch.testing.assert_close(cache.values, other.values, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("config", "is_int8"),
    [(WIDE, False), (WIDE, True), (replace(WIDE, dim=100, hidden_dim=75), True)],
    ids=["bfloat16", "int8", "odd int8"],
)
def test_a_row_gives_the_same_whatever_rows_are_beside_it(
    config: TransformerConfig, is_int8: bool
) -> None:
    layers = Layers(is_int8=is_int8, has_bias=True)
    stack, x = layers.stack(config), layers.normal(100, config.dim)
    assert stack._kernel is not None

    def in_chunks_of(*sizes: int) -> Tensor:
        caches, outs, first = empty_caches(config), [], 0
        for size in sizes:
            positions = range(first, first + size)
            outs.append(stack(x[first : first + size], batch(config, positions), caches))
            first += size
        return torch.cat(outs)

    one_by_one = in_chunks_of(*[1] * 100)
    assert torch.equal(in_chunks_of(*range(1, 11)), one_by_one[:55])
    most = 100 if is_int8 else min(100, MAX_BFLOAT16_ROWS)
    assert torch.equal(in_chunks_of(most), one_by_one[:most])


def test_what_is_no_number_stays_in_its_session(is_int8: bool) -> None:
    """Two sessions' rows in one batch, each with a block of its own."""
    layers = Layers(is_int8=is_int8, has_bias=True)
    stack, x = layers.stack(WIDE), layers.normal(8, WIDE.dim)
    x[1] = torch.nan
    frames = [(0, i, i) for i in range(4)]
    reads = AttentionBatch(
        Rope(WIDE, CPU).rotations(torch.arange(4).repeat(2)),
        torch.tensor([8, 9, 10, 11, 64, 65, 66, 67]),
        Windows.of([(array("q", [1]), 0, frames), (array("q", [8]), 0, frames)], 8, 3),
    )
    out = stack(x, reads, empty_caches(WIDE))
    assert out[1].isnan().all()
    assert out[4:].isfinite().all()


def test_many_rows_of_bfloat16_are_left_to_pytorch() -> None:
    kernel = Layers(is_int8=False, has_bias=False).stack(WIDE)._kernel
    assert kernel is not None
    assert kernel.takes(MAX_BFLOAT16_ROWS) and not kernel.takes(MAX_BFLOAT16_ROWS + 1)


def test_layers_that_it_cannot_read_are_left_to_pytorch() -> None:
    stack = Layers(is_int8=False, has_bias=False).stack(WIDE)
    layer = stack.layers[1]
    others = (
        replace(layer, wo=Linear(torch.zeros(96, 384))),
        replace(layer, w13=Each((Linear(torch.zeros(160, 96)), Linear(torch.zeros(160, 96))))),
        replace(layer, ffn_norm=layer.ffn_norm.bfloat16()),
        replace(layer, w2=Linear(torch.zeros(96, 160).bfloat16(), torch.zeros(96).bfloat16())),
    )
    for other in others:
        assert replace(stack, layers=(stack.layers[0], other))._kernel is None
