"""Loading weights: both formats alike, one dtype throughout, mapped, and strict."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import EMBEDDING as EMBEDDER
from tests.checkpoints import ENCODER, write_checkpoint, write_hugging_face_checkpoint
from voxlite.engine.block_pool import BlockPool
from voxlite.engine.config import ModelConfig, read_model_config
from voxlite.engine.errors import CheckpointError
from voxlite.engine.kv_cache_manager import BlockTable, SlidingWindowManager, make_kv_cache_spec
from voxlite.engine.model.checkpoint_files import CheckpointFiles, hugging_face_name
from voxlite.engine.model.weights import Weights, load_weights
from voxlite.engine.model_runner import DecodeJob, EncodeJob, ModelRunner
from voxlite.engine.tokenizer import Tokenizer

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EMBEDDING = EMBEDDER + "tok_embeddings.weight"
# One tensor of each kind.
NAMES = [
    EMBEDDING,
    "norm.weight",
    "layers.1.attention.wk.weight",
    "layers.0.ada_rms_norm_t_cond.2.weight",
    EMBEDDER + "audio_language_projection.0.weight",
    ENCODER + "conv_layers.1.conv.bias",
    ENCODER + "transformer.layers.2.attention.wq.bias",
    ENCODER + "transformer.layers.0.feed_forward.w2.bias",
    ENCODER + "transformer.norm.weight",
]

File = dict[str, Tensor]


def config_of(folder: Path) -> ModelConfig:
    return read_model_config(folder, Tokenizer(folder / "tekken.json").audio_config)


def load(folder: Path, dtype: torch.dtype | None = None) -> Weights:
    config = config_of(folder)
    files = CheckpointFiles(folder, is_mistral_format=config.is_mistral_format)
    weights = load_weights(files, config, dtype, CPU)
    files.finish()
    return weights


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Find every tensor in nested dataclasses and tuples, with its path.

    The output head is left out: it is the embedding again.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{i}")
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != "head":
                yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")


def is_vector(name: str) -> bool:
    return name.endswith(("norm", "bias"))


def dtypes_in(value: object) -> set[torch.dtype]:
    """Return the dtypes of all tensors but norms and biases, which have that of activations."""
    return {tensor.dtype for name, tensor in tensors_in(value) if not is_vector(name)}


def copy_configs(source: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def rewritten(source: Path, folder: Path, change: Callable[[File], object]) -> Path:
    """Copy a checkpoint of one file, changing its tensors on the way."""
    copy_configs(source, folder)
    (path,) = source.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, folder / path.name)
    return folder


def write_shards(source: Path, folder: Path, *, index: bool) -> Path:
    copy_configs(source, folder)
    tensors = load_file(source / "consolidated.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:20], names[20:]), start=1):
        file = f"consolidated-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        path = folder / "consolidated.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def hugging_face(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hugging_face_checkpoint(tmp_path_factory.mktemp("hf"), tiny_checkpoint)


@pytest.fixture(scope="module")
def hugging_face_shards(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf_shards")
    return write_hugging_face_checkpoint(folder, tiny_checkpoint, max_shard_size="100KB")


@pytest.fixture(scope="module")
def shards(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tiny_checkpoint, tmp_path_factory.mktemp("shards"), index=True)


@pytest.fixture(scope="module")
def shards_without_index(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tiny_checkpoint, tmp_path_factory.mktemp("no_index"), index=False)


@pytest.mark.parametrize(
    "layout", ["hugging_face", "hugging_face_shards", "shards", "shards_without_index"]
)
def test_every_layout_loads_to_equal_weights(
    layout: str, tiny_checkpoint: Path, request: pytest.FixtureRequest
) -> None:
    expected = dict(tensors_in(load(tiny_checkpoint)))
    actual = dict(tensors_in(load(request.getfixturevalue(layout))))
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_every_tensor_of_the_file_is_in_use(tiny_checkpoint: Path) -> None:
    file = load_file(tiny_checkpoint / "consolidated.safetensors")
    weights = dict(tensors_in(load(tiny_checkpoint)))
    assert sorted(t.numel() for t in weights.values()) == sorted(t.numel() for t in file.values())


def test_bytes_are_counted_in_the_dtype_asked_for(tiny_checkpoint: Path) -> None:
    num_elements = sum(t.numel() for _, t in tensors_in(load(tiny_checkpoint)))
    assert load(tiny_checkpoint, torch.bfloat16).num_bytes == 2 * num_elements


@pytest.mark.parametrize("layout", ["tiny_checkpoint", "hugging_face"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_has_the_dtype_asked_for(
    dtype: torch.dtype, layout: str, request: pytest.FixtureRequest
) -> None:
    weights = load(request.getfixturevalue(layout), dtype)
    assert dtypes_in(weights) == {dtype}
    assert {t.dtype for name, t in tensors_in(weights) if is_vector(name)} == {torch.float32}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_files_own_dtype_is_the_default(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = load(write_checkpoint(tmp_path, dtype=dtype))
    assert dtypes_in(weights) == {dtype}


def test_a_file_of_mixed_dtypes_loads_in_that_of_the_embedding(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def change(file: File) -> None:
        file[EMBEDDING] = file[EMBEDDING].bfloat16()

    weights = load(rewritten(tiny_checkpoint, tmp_path, change))
    assert dtypes_in(weights) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_keeps_its_dtypes_throughout(dtype: torch.dtype, tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint)
    files = CheckpointFiles(tiny_checkpoint, is_mistral_format=True)
    runner = ModelRunner(files, config, dtype=dtype, device=CPU)
    encoder = make_kv_cache_spec(config.encoder, 16, config.block_pool_size)
    decoder = make_kv_cache_spec(config.decoder, 16)
    runner.make_caches((encoder, 4), (decoder, 4))

    def table(manager: SlidingWindowManager, num_tokens: int) -> BlockTable:
        manager.admit(0)
        return manager.make_room(0, 0, num_tokens)

    spans = np.random.default_rng(0).standard_normal((3, 1_520)).astype(np.float32)
    (encoded,) = runner.encode(
        [
            EncodeJob(
                spans=spans,
                conv_state=runner.initial_conv_state(),
                first_token=0,
                table=table(SlidingWindowManager(encoder, BlockPool(4), 4), 3),
            )
        ]
    )
    ((decoded,),) = runner.decode(
        [
            DecodeJob(
                adapter=encoded.adapter,
                token_ids=[1, 32, 32],
                num_drafts=0,
                delay_ms=480,
                first_position=0,
                table=table(SlidingWindowManager(decoder, BlockPool(4), 4), 3),
                logprob=True,
            )
        ]
    )
    caches = [runner.encoder_cache.layers, runner.decoder_cache.layers]
    state = (encoded.conv_state, *caches)
    assert {t.dtype for _, t in tensors_in(state)} == {dtype}
    # On a CPU activations are float32 between weights of any dtype.
    assert encoded.adapter.dtype == runner.no_adapter_rows().dtype == torch.float32
    assert runner._log_mel(spans).dtype == torch.float32
    assert decoded.logprob is not None and np.isfinite(decoded.logprob)


def file_mappings(path: Path) -> list[range]:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    bounds = [line.split()[0].split("-") for line in lines]
    return [range(int(start, 16), int(end, 16)) for start, end in bounds]


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


@needs_proc
@pytest.mark.parametrize("layout", ["tiny_checkpoint", "hugging_face"])
def test_weights_of_unchanged_dtype_are_views_of_the_file(
    layout: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(layout)
    (path,) = folder.glob("*.safetensors")
    weights = load(folder)
    mappings = file_mappings(path)
    copies = {
        name
        for name, tensor in tensors_in(weights)
        if not any(tensor.data_ptr() in mapping for mapping in mappings)
    }
    # In transformers' files queries and keys lie in another order.
    queries_and_keys = {"wqkv.layers.0.weight", "wqkv.layers.1.weight", "wqkv.layers.0.bias"}
    reordered = set() if layout == "tiny_checkpoint" else queries_and_keys
    assert {".".join(name.split(".")[-4:]) for name in copies} == reordered


@needs_proc
def test_no_file_stays_mapped_beside_converted_weights(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "mapped by nobody else"))
    weights = load(folder, torch.float16)
    assert file_mappings(folder) == []
    assert weights.num_bytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named_with_its_file(
    name: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = rewritten(tiny_checkpoint, tmp_path, lambda file: file.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name} is missing") as refusal:
        load(folder)
    assert str(folder / "consolidated.safetensors") in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_missing_from_transformers_format_is_named_as_there(
    name: str, hugging_face: Path, tmp_path: Path
) -> None:
    theirs = hugging_face_name(name)
    stored = next(n for n in load_file(hugging_face / "model.safetensors") if n.endswith(theirs))
    folder = rewritten(hugging_face, tmp_path, lambda file: file.pop(stored))
    with pytest.raises(CheckpointError, match=rf"{theirs} is missing") as refusal:
        load(folder)
    assert str(folder / "model.safetensors") in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_is_named_with_its_file(
    name: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def change(file: File) -> None:
        file[name] = file[name][:-1].clone()

    folder = rewritten(tiny_checkpoint, tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"{name} has shape .* the config says") as refusal:
        load(folder)
    assert str(folder / "consolidated.safetensors") in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("layers.2.attention.wq.weight", id="a layer too many"),
        pytest.param("layers.0.attention.wk.bias", id="a bias that has no place"),
        pytest.param("output.weight", id="an output head"),
        pytest.param("lm_head.weight", id="transformers' output head"),
        pytest.param("layers.0.attention.wq.qscale", id="a quantization scale"),
    ],
)
def test_an_unknown_tensor_is_named_with_its_file(
    name: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = rewritten(tiny_checkpoint, tmp_path, lambda file: file.update({name: torch.ones(3)}))
    with pytest.raises(CheckpointError, match=rf"{name} is not part of this model") as refusal:
        load(folder)
    assert str(folder / "consolidated.safetensors") in str(refusal.value)


def test_the_tied_head_of_transformers_may_be_in_the_file(
    hugging_face: Path, tmp_path: Path
) -> None:
    def change(file: File) -> None:
        (embedding,) = (t for name, t in file.items() if name.endswith("embed_tokens.weight"))
        file["lm_head.weight"] = embedding.clone()

    weights = load(rewritten(hugging_face, tmp_path, change))
    assert weights.num_bytes == load(hugging_face).num_bytes


def test_an_output_head_that_differs_from_the_embedding_is_refused(
    hugging_face: Path, tmp_path: Path
) -> None:
    def change(file: dict[str, torch.Tensor]) -> None:
        file["lm_head.weight"] = file["language_model.model.embed_tokens.weight"] + 1

    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load(rewritten(hugging_face, tmp_path, change))


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["auto", "float32"])
@pytest.mark.parametrize("file_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_are_refused_by_name(
    file_dtype: torch.dtype, dtype: torch.dtype | None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    name = "layers.0.attention.wq.weight"

    def change(file: File) -> None:
        file[name] = file[name].to(file_dtype)

    folder = rewritten(tiny_checkpoint, tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"{name} has dtype {file_dtype}"):
        load(folder, dtype)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="cut in half"),
        pytest.param(lambda data: data[:-1], id="last byte missing"),
        pytest.param(lambda data: data[:100], id="header cut short"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"\xff" * 8 + data[8:], id="absurd header size"),
        pytest.param(lambda data: data[:8] + b"?" * 50 + data[58:], id="header that isn't JSON"),
        pytest.param(
            lambda data: b"version https://git-lfs.github.com/spec/v1\n", id="a Git LFS pointer"
        ),
    ],
)
def test_a_damaged_file_is_named(
    damage: Callable[[bytes], bytes], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_configs(tiny_checkpoint, tmp_path)
    path = folder / "consolidated.safetensors"
    path.write_bytes(damage((tiny_checkpoint / path.name).read_bytes()))
    with pytest.raises(CheckpointError, match="damaged or incomplete") as refusal:
        load(folder)
    assert str(path) in str(refusal.value)


def test_a_folder_without_weights_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_configs(tiny_checkpoint, tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no consolidated\*\.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_shards(tiny_checkpoint, tmp_path, index=True)
    shard = folder / "consolidated-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard} is missing, or not a file"):
        load(folder)


def test_a_missing_shard_without_an_index_is_a_missing_tensor(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = write_shards(tiny_checkpoint, tmp_path, index=False)
    (folder / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor \S+ is missing in .*00001-of-00002"):
        load(folder)


def test_a_tensor_that_is_in_two_shards_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_shards(tiny_checkpoint, tmp_path, index=False)
    save_file({"norm.weight": torch.ones(64)}, folder / "consolidated-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight is in .* too"):
        load(folder)


@pytest.mark.parametrize(
    "contents",
    ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'],
    ids=repr,
)
def test_a_damaged_index_is_named(contents: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_shards(tiny_checkpoint, tmp_path, index=True)
    path = folder / "consolidated.safetensors.index.json"
    path.write_text(contents)
    with pytest.raises(CheckpointError) as refusal:
        load(folder)
    assert str(path) in str(refusal.value)
