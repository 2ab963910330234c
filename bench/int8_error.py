"""How far int8 layers are from dense ones, by class, on what a model really hears.

    python -m voxlite.bench.int8_error [AUDIO ...] [--model DIR]

In: a checkpoint and audio files. Out: for each class of layers the error of its int8 outputs beside
those in float32, from the same inputs, relative to their magnitude: over all rows and layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from voxlite.engine import Engine, EngineConfig
from voxlite.engine.audio.audio_file import read_audio
from voxlite.engine.config import SessionOptions
from voxlite.engine.model.layers import Layer, Stack
from voxlite.engine.model.linear import Each, Int8Linear, Linear, Projection, Projections, quantize
from voxlite.server.bundled import bundled_model

# What a layer is multiplied into, by the names of its place in a layer of the stack.
_NAMES = dict(wqkv="query, key, value", wo="attention output", w13="gate, up", w2="down")


class ErrorSums:
    """Squares of errors and of outputs, by class."""

    def __init__(self) -> None:
        self._errors: defaultdict[str, float] = defaultdict(float)
        self._outputs: defaultdict[str, float] = defaultdict(float)

    def add(self, kind: str, error: Tensor, output: Tensor) -> None:
        self._errors[kind] += error.square().sum().item()
        self._outputs[kind] += output.square().sum().item()

    def relative(self) -> dict[str, float]:
        """Return the root of the mean square error over that of the outputs, by class."""
        return {kind: math.sqrt(self._errors[kind] / self._outputs[kind]) for kind in self._errors}


@dataclass(frozen=True, slots=True)
class Compared:
    """A dense layer that also computes what its int8 counterpart makes of the same rows."""

    kind: str
    dense: Linear
    int8: Int8Linear
    sums: ErrorSums

    def __call__(self, x: Tensor) -> Tensor:
        out = self.dense(x)
        self.sums.add(self.kind, self.int8(x) - out, out)
        return out


def compare(engine: Engine) -> ErrorSums:
    """Put `Compared` in place of all layers of a float32 engine that int8 would quantize."""
    sums, runner = ErrorSums(), engine.runner

    def compared(kind: str, layer: Projection) -> Compared:
        assert isinstance(layer, Linear)
        return Compared(kind, layer, Int8Linear(quantize([layer.weight]), layer.bias), sums)

    def all_compared(kind: str, layers: Projections) -> Each:
        assert isinstance(layers, Each)
        return Each(tuple(compared(kind, layer) for layer in layers.layers))

    def compared_layer(stack: str, layer: Layer) -> Layer:
        kinds = {place: f"{stack}: {name}" for place, name in _NAMES.items()}
        return replace(
            layer,
            wqkv=all_compared(kinds["wqkv"], layer.wqkv),
            wo=compared(kinds["wo"], layer.wo),
            w13=all_compared(kinds["w13"], layer.w13),
            w2=compared(kinds["w2"], layer.w2),
        )

    def compared_stack(name: str, stack: Stack) -> Stack:
        return replace(stack, layers=tuple(compared_layer(name, layer) for layer in stack.layers))

    encoder, decoder = runner._encoder, runner._decoder
    runner._encoder = replace(
        encoder,
        stack=compared_stack("encoder", encoder.stack),
        adapter_in=compared("adapter", encoder.adapter_in),
        adapter_out=compared("adapter", encoder.adapter_out),
    )
    runner._decoder = replace(
        decoder,
        stack=compared_stack("decoder", decoder.stack),
        head=compared("head", decoder.head),
    )
    return sums


def measure(model: Path, files: list[Path]) -> dict[str, float]:
    """Transcribe files in float32; return the relative error of each class of layers."""
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", max_num_seqs=1))
    sums = compare(engine)
    for path in files:
        session = engine.open(SessionOptions(), lambda event: None)
        for samples in read_audio(path):
            session.append(samples)
            while engine.step():
                pass
        session.finish()
        while engine.step():
            pass
    return sums.relative()


def main(
    audio: Annotated[list[Path] | None, typer.Argument(help="Default: the bundled sample.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint's folder.")] = None,
) -> None:
    """Print the error of each class of layers."""
    with torch.inference_mode():
        errors = measure(model or bundled_model(), audio or [bundled_model() / "sample.wav"])
    table = Table("layers", title="int8 beside float32")
    table.add_column("relative error", justify="right")
    for kind, error in errors.items():
        table.add_row(kind, f"{100 * error:.2f} %")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
