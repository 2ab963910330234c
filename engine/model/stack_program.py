"""All layers of encoder or decoder as one program: a single call, with a barrier after each phase.

In: rows of a flat batch, the layers' weights and KV caches. Out: the rows behind the last layer.
Legend: N rows of the flat batch, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from voxlite.engine.kernels.descriptors import (
    ATTEND,
    GATE,
    INT8,
    MULTIPLY,
    NORM,
    PHASE,
    QUANTIZE,
    ROTATE,
)
from voxlite.engine.kernels.linear import MAX_BFLOAT16_ROWS
from voxlite.engine.kernels.program import run
from voxlite.engine.model.matrix import Matrix
from voxlite.engine.model.windows import Windows

# The phases of a layer, in order: each of its four products has one that makes rows ready and one
# that multiplies; rotation and attention follow the first.
_LAYER: Final = (
    NORM,
    MULTIPLY,  # wqkv
    ROTATE,
    ATTEND,
    QUANTIZE,
    MULTIPLY,  # wo
    NORM,
    MULTIPLY,  # w13
    GATE,
    MULTIPLY,  # w2
)
_ATTENTION_NORM, _WQKV, _ROTATE, _ATTEND, _QUANTIZE, _WO, _FFN_NORM, _W13, _GATE, _W2 = range(
    len(_LAYER)
)


class LayerWeights(NamedTuple):
    """One layer's weights."""

    attention_norm: Tensor  # (dim,) float32
    wqkv: Matrix  # queries, keys and values
    wo: Matrix
    ffn_norm: Tensor  # (dim,) float32
    w13: Matrix  # gate and up
    w2: Matrix


class _Buffers(NamedTuple):
    """What phases write for the next ones, float32 (N, dim) but for `quantized`."""

    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    out: Tensor
    quantized: Tensor  # uint8, rows as tiles take them
    row_scales: Tensor


class StackProgram:
    """Runs layers on a CPU with a bfloat16 KV cache."""

    def __init__(
        self, layers: Sequence[LayerWeights], *, num_heads: int, head_size: int, norm_eps: float
    ) -> None:
        """Make the program, but for what differs between batches.

        Raises:
            TypeError: norm weights aren't float32.
        """
        for layer in layers:
            for norm in (layer.attention_norm, layer.ffn_norm):
                if norm.dtype is not torch.float32:
                    raise TypeError(f"norm weights must be float32, not {norm.dtype}")
        self._layers = layers  # kept alive
        program = np.zeros((len(layers), len(_LAYER)), PHASE)
        program["kind"] = _LAYER
        for phases, layer in zip(program, layers, strict=True):
            matrices = (layer.wqkv, layer.wo, layer.w13, layer.w2)
            firsts, products = (
                (_ATTENTION_NORM, _QUANTIZE, _FFN_NORM, _GATE),
                (_WQKV, _WO, _W13, _W2),
            )
            for matrix, first, product in zip(matrices, firsts, products, strict=True):
                phases["matrix"][[first, product]] = matrix.address
            phases["norm_weight"][_ATTENTION_NORM] = layer.attention_norm.data_ptr()
            phases["norm_weight"][_FFN_NORM] = layer.ffn_norm.data_ptr()
        # From each product on the next one's weights are prefetched, and at first the first one's.
        self._program = program.reshape(-1)
        products_at = np.flatnonzero(self._program["kind"] == MULTIPLY)
        addresses = self._program["matrix"][products_at]
        self._program["prefetched_matrix"][products_at[:-1]] = addresses[1:]
        self._program["prefetched_matrix"][0] = addresses[0]
        self._num_heads, self._head_size, self._norm_eps = num_heads, head_size, norm_eps

    def takes(self, num_rows: int) -> bool:
        """Whether so many rows are best run here. bfloat16's products of many are PyTorch's."""
        is_int8 = self._layers[0].wqkv.weight_type == INT8
        return is_int8 or num_rows <= MAX_BFLOAT16_ROWS

    def __call__(
        self,
        x: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
        rotations: Tensor,
        slot_mapping: Tensor,
        windows: Windows,
        scales: Tensor | None,
    ) -> None:
        """Run all layers on x, in place.

        Args:
            x: (N, dim) float32, contiguous.
            caches: keys and values of each layer, (K, slots, D) bfloat16 each, that
                `fits_windowed_attention`.
            rotations: (N, 1, D / 2) complex64, e^(i angle) of each row's position.
            slot_mapping: (N,) int64, where each row's keys and values are written.
            windows: what each row reads.
            scales: (layers, N, dim) or (layers, 1, dim) float32, what multiplies the normed input
                of the feed-forward network, or None.
        """
        rotations = torch.view_as_real(rotations).contiguous()
        scales = None if scales is None else scales.contiguous()
        buffers = self._buffers(len(x))
        phases = self._filled_in(x, buffers, caches, scales)
        num_kv_heads, num_slots, _ = caches[0][0].shape
        head_bytes = 4 * self._head_size
        q = buffers.qkv.data_ptr()
        k = q + self._num_heads * head_bytes
        row_bytes = 4 * buffers.qkv.shape[1]
        run(
            phases,
            torch.get_num_threads(),
            num_rows=len(x),
            dim=x.shape[1],
            norm_eps=self._norm_eps,
            delay_scale_row_bytes=(
                4 * scales.stride(1) if scales is not None and scales.shape[1] > 1 else 0
            ),
            quantized=buffers.quantized.data_ptr(),
            row_scales=buffers.row_scales.data_ptr(),
            num_heads=self._num_heads,
            num_kv_heads=num_kv_heads,
            head_size=self._head_size,
            num_slots=num_slots,
            q=q,
            k=k,
            v=k + num_kv_heads * head_bytes,
            q_row_bytes=row_bytes,
            k_row_bytes=row_bytes,
            v_row_bytes=row_bytes,
            rotations=rotations.data_ptr(),
            slot_mapping=slot_mapping.data_ptr(),
            frames_per_block=windows.frames_per_block,
            reads=windows.frames.data_ptr(),
            pieces=windows.pieces.data_ptr(),
            num_pieces=len(windows.pieces),
        )

    def _buffers(self, num_rows: int) -> _Buffers:
        _, wqkv, wo, _, w13, w2 = self._layers[0]
        input_bytes = max(matrix.input_bytes for matrix in (wqkv, wo, w13, w2))
        return _Buffers(
            normed=torch.empty(num_rows, wqkv.in_dim),
            qkv=torch.empty(num_rows, wqkv.out_dim),
            attended=torch.empty(num_rows, wo.in_dim),
            gate_up=torch.empty(num_rows, w13.out_dim),
            out=torch.empty(num_rows, max(wo.out_dim, w2.out_dim)),
            quantized=torch.empty(num_rows, input_bytes, dtype=torch.uint8),
            row_scales=torch.empty(num_rows),
        )

    def _filled_in(
        self,
        x: Tensor,
        buffers: _Buffers,
        caches: Sequence[tuple[Tensor, Tensor]],
        scales: Tensor | None,
    ) -> np.ndarray[Any, np.dtype[np.void]]:
        """Return the program with what differs between batches."""
        program = self._program.copy()
        phases = program.reshape(len(self._layers), len(_LAYER))
        for name, tensors in zip(("keys", "values"), zip(*caches, strict=True), strict=True):
            phases[name][:, _ROTATE : _ATTEND + 1] = [[tensor.data_ptr()] for tensor in tensors]
        normed, attended, gate_up = buffers.normed, buffers.attended, buffers.gate_up
        inputs = {_ATTENTION_NORM: x, _QUANTIZE: attended, _FFN_NORM: x, _GATE: gate_up}
        outputs = {
            _ATTENTION_NORM: normed,
            _WQKV: buffers.qkv,
            _ATTEND: attended,
            _WO: buffers.out,
            _FFN_NORM: normed,
            _W13: gate_up,
            _W2: buffers.out,
        }
        residuals = {_WO: x, _W2: x}
        for name, places in (("input", inputs), ("output", outputs), ("residual", residuals)):
            for phase, tensor in places.items():
                phases[name][:, phase] = tensor.data_ptr()
        if scales is not None:
            phases["delay_scale"][:, _FFN_NORM] = [scale.data_ptr() for scale in scales]
        return program
