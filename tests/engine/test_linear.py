"""Linear layers in eight bits: how near they come, and that rows don't disturb one another."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.checkpoints import write_hugging_face_checkpoint
from tests.engine.harness import transcribe
from tests.engine.test_weights import config_of, load
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig, InvalidInput
from voxlite.engine.model.checkpoint_files import CheckpointFiles
from voxlite.engine.model.int8_cache import Int8Cache
from voxlite.engine.model.linear import (
    Each,
    Fused,
    Int8Linear,
    Linear,
    quantize,
)
from voxlite.engine.model.matrix import Int8Tiles
from voxlite.engine.model.weights import Weights, load_weights

CPU = torch.device("cpu")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def rows() -> torch.Tensor:
    """Rows of very different magnitude."""
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    return x * torch.logspace(-4, 4, 9)[:, None]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (actual - expected).norm(dim=1) / expected.norm(dim=1)


def test_a_weight_is_rounded_to_the_nearest_of_its_rows_steps(weight: torch.Tensor) -> None:
    tiles = quantize([weight])
    values = tiles.values.transpose(1, 2).reshape(weight.shape)
    scales = tiles.scales
    error = (values * scales[:, None] - weight).abs()
    assert (error <= scales[:, None] * 0.5001).all()
    assert values.abs().amax(dim=1).eq(127).all()


def test_each_row_is_within_two_hundredths_of_the_float_product(
    weight: torch.Tensor, rows: torch.Tensor
) -> None:
    linear = Int8Linear(quantize([weight]))
    assert (relative_error(linear(rows), F.linear(rows, weight)) < 0.02).all()


@pytest.mark.parametrize("shape", [(96, 64), (33, 100), (640, 256)], ids=str)
def test_a_row_gives_the_same_whatever_rows_are_beside_it(
    shape: tuple[int, int],
) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(shape, generator=generator)
    rows = torch.randn(200, shape[1], generator=generator)
    linear = Int8Linear(quantize([weight]), torch.arange(float(shape[0])))
    together = linear(rows)
    for count in range(1, 200):
        assert torch.equal(linear(rows[:count]), together[:count])
        assert torch.equal(linear(rows[-count:]), together[-count:])


def test_sums_are_exact_at_the_largest_magnitudes() -> None:
    """Steps of a row, rounded already, and of a weight: nothing overflows, nothing is rounded."""
    values = torch.full((3, 512), 127, dtype=torch.int8)
    values[1] = -127
    values[2, ::2] = -127
    linear = Int8Linear(Int8Tiles.of(values, torch.ones(3)))
    x = torch.full((4, 512), 127.0)
    x[1] *= -1
    x[2, ::2] = 0
    x[3, 1::2] = -1
    expected = x @ values.float().T
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=0.05)


def test_a_row_of_zeros_gives_the_bias(weight: torch.Tensor) -> None:
    bias = torch.arange(96.0)
    linear = Int8Linear(quantize([weight]), bias)
    assert torch.equal(linear(torch.zeros(2, 64)), bias.expand(2, -1))


def test_a_weight_of_zeros_gives_the_bias(weight: torch.Tensor, rows: torch.Tensor) -> None:
    linear = Int8Linear(quantize([torch.zeros_like(weight)]), torch.arange(96.0))
    assert torch.equal(linear(rows), torch.arange(96.0).expand(9, -1))


def test_what_is_no_number_stays_none(weight: torch.Tensor, rows: torch.Tensor) -> None:
    rows[3, 5] = torch.nan
    out = Int8Linear(quantize([weight]))(rows)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()
    assert out[4:].isfinite().all()


def test_fused_layers_give_what_each_gives(weight: torch.Tensor, rows: torch.Tensor) -> None:
    parts = [weight[:40], weight[40:]]
    fused = Fused(Int8Linear(quantize(parts)), (40, 56))
    each = Each(tuple(Int8Linear(quantize([part])) for part in parts))
    assert all(torch.equal(a, b) for a, b in zip(fused(rows), each(rows), strict=True))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_one_row_of_bfloat16_is_the_product_too(weight: torch.Tensor, num_rows: int) -> None:
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = Linear(weight.bfloat16())(x)
    assert out.dtype is torch.bfloat16
    expected = F.linear(x.float(), weight.bfloat16().float())
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.05)
    assert torch.backends.mkldnn.is_available() == torch.backends.mkldnn.enabled


def int8_weights(folder: Path, cache: Int8Cache | None = None) -> Weights:
    config = config_of(folder)
    files = CheckpointFiles(folder, is_mistral_format=config.is_mistral_format)
    weights = load_weights(files, config, None, CPU, is_int8=True, cache=cache)
    files.finish()
    return weights


@torch.inference_mode()
def outputs(weights: Weights) -> list[torch.Tensor]:
    """Multiply the same rows with one layer of each class."""
    encoder, decoder = weights.encoder.stack.layers[-1], weights.decoder.stack.layers[-1]
    generator = torch.Generator().manual_seed(3)
    enc = torch.randn(3, weights.encoder.stack.config.dim, generator=generator)
    dec = torch.randn(3, weights.decoder.stack.config.dim, generator=generator)
    return [
        *encoder.wqkv(enc),
        *encoder.w13(enc),
        weights.encoder.adapter_out(dec),
        *decoder.wqkv(dec),
        decoder.w2(decoder.w13(dec)[0]),
        weights.decoder.head(dec),
    ]


def test_both_formats_give_the_same_int8_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    hugging_face = write_hugging_face_checkpoint(tmp_path, tiny_checkpoint)
    pairs = zip(
        outputs(int8_weights(tiny_checkpoint)), outputs(int8_weights(hugging_face)), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_every_layer_comes_near_its_dense_one(tiny_checkpoint: Path) -> None:
    dense, int8 = outputs(load(tiny_checkpoint, torch.float32)), int8_weights(tiny_checkpoint)
    for near, exact in zip(outputs(int8), dense, strict=True):
        assert (relative_error(near, exact) < 0.05).all()


def test_the_second_start_reads_the_cache(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Int8Cache(tmp_path / "cache")
    first = outputs(int8_weights(tiny_checkpoint, cache))
    assert {path.suffix for path in cache.folder.iterdir()} == {".safetensors"}

    def again(weights: list[torch.Tensor]) -> Int8Tiles:
        raise AssertionError("a layer was quantized again")

    monkeypatch.setattr("voxlite.engine.model.weights.quantize", again)
    second = outputs(int8_weights(tiny_checkpoint, cache))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fault", ["cut", "empty", "shape", "dtype", "names"])
def test_a_damaged_file_of_the_cache_is_written_again(
    fault: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    cache = Int8Cache(tmp_path / "cache")
    expected = outputs(int8_weights(tiny_checkpoint, cache))
    path = cache.folder / "layers.1.attention.wo.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    match fault:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "empty":
            path.write_bytes(b"")
        case "shape":
            save_file({name: t[:1].contiguous() for name, t in tensors.items()}, path)
        case "dtype":
            save_file({name: t.float() for name, t in tensors.items()}, path)
        case "names":
            save_file({f"x{name}": t for name, t in tensors.items()}, path)
    actual = outputs(int8_weights(tiny_checkpoint, cache))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_said_once_and_stops_nothing(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, where the folder should be")
    expected = outputs(int8_weights(tiny_checkpoint))
    actual = outputs(int8_weights(tiny_checkpoint, Int8Cache(tmp_path / "cache")))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len([r for r in caplog.records if "not kept" in r.message]) == 1


def test_other_files_have_another_cache(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for path in tiny_checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = CheckpointFiles(tiny_checkpoint, is_mistral_format=True)
    copy = CheckpointFiles(tmp_path, is_mistral_format=True)
    assert first.fingerprint != copy.fingerprint
    assert copy.fingerprint == CheckpointFiles(tmp_path, is_mistral_format=True).fingerprint


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(
        model=str(tiny_checkpoint),
        quantization="int8",
        dtype="float32",
        max_num_seqs=3,
        kv_cache_gib=0.05,
        poison_freed_blocks=True,
    )
    return Engine(config)


@pytest.mark.parametrize("seed", [3, 5, 9])
def test_int8_ids_do_not_depend_on_how_the_audio_comes(engine: Engine, seed: int) -> None:
    samples = speechlike(3.0, seed=seed)
    whole = transcribe(engine, [samples], steps_between=False).ids()
    pieces = transcribe(engine, np.array_split(samples, 37)).ids()
    assert len(whole) > 40
    assert pieces == whole


def test_a_quantization_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'int4': one of none, int8"):
        EngineConfig(model="x", quantization="int4")
