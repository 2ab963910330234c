"""What int8 makes of the bundled model's layers."""

from __future__ import annotations

from voxlite.bench.int8_error import measure
from voxlite.server.bundled import bundled_model


def test_every_class_of_layers_is_compared() -> None:
    model = bundled_model()
    errors = measure(model, [model / "sample.wav"])
    stacks = {kind.split(":")[0] for kind in errors}
    assert stacks == {"encoder", "decoder", "adapter", "head"} and len(errors) == 10
    assert all(0.0005 < error < 0.05 for error in errors.values()), errors
