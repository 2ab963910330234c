"""Turn a checkpoint's tensors into `Encoder` and `Decoder`.

In: tensors by name (`CheckpointFiles`) and the `ModelConfig`. Out: both stacks. Dense weights that
already have the wanted dtype and device are views of the file; others are converted one at a time,
so there is never a second copy of all weights. Query and key rows of Hugging Face's format are put
back from split halves to adjacent pairs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from voxlite.engine.config import ModelConfig, TransformerConfig
from voxlite.engine.model.checkpoint_files import EMBEDDER, EMBEDDING, ENCODER
from voxlite.engine.model.decoder import Decoder
from voxlite.engine.model.encoder import KERNEL, Encoder
from voxlite.engine.model.int8_cache import Int8Cache
from voxlite.engine.model.layers import Layer, Stack
from voxlite.engine.model.linear import (
    Each,
    Fused,
    Int8Linear,
    Linear,
    Projection,
    Projections,
    quantize,
)
from voxlite.engine.model.matrix import Int8Tiles


def split_halves_to_pairs(rows: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of a query or key projection from transformers' RoPE layout to Mistral's.

        head size 8, rows of one head    0 1 2 3 | 4 5 6 7   split halves
                                      -> 0 4 1 5   2 6 3 7   adjacent pairs

    Args:
        rows: (heads * head_size, ...).
    """
    heads = rows.unflatten(0, (-1, 2, head_size // 2))
    pairs: Tensor = heads.transpose(1, 2).flatten(0, 2)
    return pairs


class TensorSource(Protocol):
    """Where tensors come from: `CheckpointFiles`, or random numbers for a benchmark."""

    is_mistral_format: bool

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, name: str, *shape: int) -> Tensor: ...

    def unmap(self) -> None: ...


class _Layer(NamedTuple):
    """A linear layer of the checkpoint."""

    name: str
    out_dim: int
    in_dim: int
    has_bias: bool = False
    rotated_head_size: int | None = None  # of queries and keys, whose rows become adjacent pairs


class _Builder:
    """Make layers out of tensors, in the wanted dtype, on the wanted device, packed as wanted."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_int8: bool,
        cache: Int8Cache | None,
    ) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._is_int8, self._cache = is_int8, cache
        self._lock = threading.Lock()
        self.num_bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the wanted dtype on the wanted device."""
        raw = self._source.read(name, *shape)
        tensor = raw.to(device=self._device, dtype=self._dtype)
        if tensor is not raw:
            self._source.unmap()
        self._count(tensor)
        return tensor

    def vector(self, name: str, dim: int) -> Tensor:
        """Return a norm's weight or a bias, in the dtype of activations: on a CPU float32."""
        tensor = self.tensor(name, dim)
        return tensor.float() if self._device.type == "cpu" else tensor

    def linear(self, name: str, out_dim: int, in_dim: int) -> Linear:
        """Return a linear layer that stays dense."""
        return Linear(self.tensor(name + ".weight", out_dim, in_dim))

    def projection(self, layer: _Layer) -> Projection:
        """Return a linear layer, quantized where that is wanted."""
        if self._is_int8:
            return Int8Linear(self._int8_weight(layer), self._bias(layer))
        weight = self.tensor(layer.name + ".weight", layer.out_dim, layer.in_dim)
        return Linear(self._reordered(layer, weight), self._bias(layer))

    def projections(self, *layers: _Layer) -> Projections:
        """Return linear layers of one input. Quantized they become one, which rounds it once.

        Dense ones stay where they are: in the file.
        """
        if not self._is_int8:
            return Each(tuple(self.projection(layer) for layer in layers))
        bias = None
        if any(layer.has_bias for layer in layers):
            biases = [(self._bias(layer), torch.zeros(layer.out_dim)) for layer in layers]
            bias = torch.cat([zeros if own is None else own for own, zeros in biases])
        linear = Int8Linear(self._int8_weight(*layers), bias)
        return Fused(linear, tuple(layer.out_dim for layer in layers))

    def head(self, embedding: Tensor) -> Projection:
        """Return the output head: the embedding again, as it is multiplied."""
        if not self._is_int8:
            return Linear(embedding)
        out_dim, in_dim = embedding.shape
        return Int8Linear(self._kept("head", out_dim, in_dim, lambda: [embedding]))

    def conv(self, name: str, out_dim: int, in_dim: int) -> Linear:
        weight = self.tensor(name + ".weight", out_dim, in_dim, KERNEL)
        return Linear(weight.flatten(1), self.vector(name + ".bias", out_dim))

    def _bias(self, layer: _Layer) -> Tensor | None:
        if not layer.has_bias:
            return None
        return self._reordered(layer, self.vector(layer.name + ".bias", layer.out_dim))

    def _reordered(self, layer: _Layer, rows: Tensor) -> Tensor:
        if layer.rotated_head_size is None or self._source.is_mistral_format:
            return rows
        return split_halves_to_pairs(rows, layer.rotated_head_size)

    def _int8_weight(self, *layers: _Layer) -> Int8Tiles:
        """Return the weights of linear layers of one input, their outputs side by side."""
        raws = [self._source.read(f"{x.name}.weight", x.out_dim, x.in_dim) for x in layers]
        name = "+".join([layers[0].name, *(x.name.split(".")[-1] for x in layers[1:])])
        out_dim, in_dim = sum(x.out_dim for x in layers), layers[0].in_dim
        return self._kept(name, out_dim, in_dim, lambda: list(map(self._reordered, layers, raws)))

    def _kept(
        self, name: str, out_dim: int, in_dim: int, weights: Callable[[], Sequence[Tensor]]
    ) -> Int8Tiles:
        """Return what the cache has, or quantize weights and put them there."""
        tiles = None if self._cache is None else self._cache.load(name, out_dim, in_dim)
        if tiles is None:
            tiles = quantize(weights())
            if self._cache is not None:
                self._cache.save(name, tiles)
                # Mapped from the file, as at the next start, it can leave memory under pressure.
                tiles = self._cache.load(name, out_dim, in_dim) or tiles
        self._source.unmap()
        self._count(*tiles)
        return tiles

    def _count(self, *tensors: Tensor) -> None:
        with self._lock:
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)


class Weights(NamedTuple):
    encoder: Encoder
    decoder: Decoder
    num_bytes: int


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    is_int8: bool = False,
    cache: Int8Cache | None = None,
) -> Weights:
    """Load all weights.

    Args:
        dtype: None takes the dtype of the source.
        is_int8: the linear layers of encoder, adapter and decoder and the output head become int8;
            norms, convolutions, delay conditioning and the embedding stay.
        cache: of int8 weights; None quantizes each time.

    Raises:
        CheckpointError: the source doesn't have a tensor, or has it in another shape.
    """
    builder = _Builder(source, dtype or source.dtype, device, is_int8=is_int8, cache=cache)
    with _threads() as threads:
        encoder = _encoder(builder, config, threads)
        decoder = _decoder(builder, config, threads)
    return Weights(encoder, decoder, builder.num_bytes)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Give threads that work on a layer each, with one core each."""
    num_cores = torch.get_num_threads()
    try:
        # PyTorch remembers the number for threads to come, too.
        with ThreadPoolExecutor(
            num_cores, "load", initializer=torch.set_num_threads, initargs=(1,)
        ) as threads:
            yield threads
    finally:
        torch.set_num_threads(num_cores)


def _encoder(builder: _Builder, config: ModelConfig, threads: ThreadPoolExecutor) -> Encoder:
    encoder, dim, wide = config.encoder, config.encoder.dim, config.decoder.dim
    adapter = f"{EMBEDDER}audio_language_projection."

    def layer(i: int) -> Layer:
        name = f"{ENCODER}transformer.layers.{i}."
        return _transformer_layer(builder, name, encoder, has_bias=True)

    return Encoder(
        block_pool_size=config.block_pool_size,
        conv1=builder.conv(ENCODER + "conv_layers.0.conv", dim, config.audio.num_mel_bins),
        conv2=builder.conv(ENCODER + "conv_layers.1.conv", dim, dim),
        stack=Stack(config=encoder, layers=tuple(threads.map(layer, range(encoder.num_layers)))),
        norm=builder.vector(ENCODER + "transformer.norm.weight", dim),
        adapter_in=builder.projection(_Layer(f"{adapter}0", wide, config.block_pool_size * dim)),
        adapter_out=builder.projection(_Layer(f"{adapter}2", wide, wide)),
    )


def _decoder(builder: _Builder, config: ModelConfig, threads: ThreadPoolExecutor) -> Decoder:
    decoder, dim = config.decoder, config.decoder.dim
    layers = [f"layers.{i}." for i in range(decoder.num_layers)]

    def layer(name: str) -> Layer:
        return _transformer_layer(builder, name, decoder, has_bias=False)

    ada = config.ada_norm_dim
    embedding = builder.tensor(EMBEDDING, config.vocab_size, dim)
    head = threads.submit(builder.head, embedding)
    return Decoder(
        embedding=embedding,
        stack=Stack(config=decoder, layers=tuple(threads.map(layer, layers))),
        delay_down=tuple(builder.linear(f"{n}ada_rms_norm_t_cond.0", ada, dim) for n in layers),
        delay_up=tuple(builder.linear(f"{n}ada_rms_norm_t_cond.2", dim, ada) for n in layers),
        norm=builder.vector("norm.weight", dim),
        head=head.result(),
    )


def _transformer_layer(
    builder: _Builder,
    name: str,
    config: TransformerConfig,
    *,
    has_bias: bool,
) -> Layer:
    """Read one layer. With `has_bias`, wq, wv, wo and w2 have one; wk, w1 and w3 never do."""
    dim, hidden, size = config.dim, config.hidden_dim, config.head_size
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    attention, ffn = f"{name}attention.", f"{name}feed_forward."
    return Layer(
        attention_norm=builder.vector(f"{name}attention_norm.weight", dim),
        wqkv=builder.projections(
            _Layer(f"{attention}wq", queries, dim, has_bias, rotated_head_size=size),
            _Layer(f"{attention}wk", keys, dim, rotated_head_size=size),
            _Layer(f"{attention}wv", keys, dim, has_bias),
        ),
        wo=builder.projection(_Layer(f"{attention}wo", dim, queries, has_bias)),
        ffn_norm=builder.vector(f"{name}ffn_norm.weight", dim),
        w13=builder.projections(_Layer(f"{ffn}w1", hidden, dim), _Layer(f"{ffn}w3", hidden, dim)),
        w2=builder.projection(_Layer(f"{ffn}w2", dim, hidden, has_bias)),
    )
