"""What is exported must be the model that was trained, in both formats."""

import json
from pathlib import Path

import pytest
import torch
from transformers import VoxtralRealtimeForConditionalGeneration

from training.export import export, mistral_names, mistral_params, mistral_tensors
from training.model import ModelShape, TrainingModel
from voxlite.engine.config import AudioConfig, read_model_config
from voxlite.engine.model.checkpoint_files import CheckpointFiles
from voxlite.engine.model.weights import load_weights

SHAPE = ModelShape(
    encoder_dim=32,
    encoder_layers=2,
    encoder_heads=2,
    encoder_head_size=8,
    encoder_hidden_dim=48,
    encoder_window=12,
    decoder_dim=24,
    decoder_layers=2,
    decoder_heads=4,
    decoder_kv_heads=2,
    decoder_head_size=8,
    decoder_hidden_dim=40,
    decoder_window=7,
    vocab_size=1300,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model as transformers saves it, and its export."""
    torch.manual_seed(0)
    hugging_face = tmp_path_factory.mktemp("hugging-face")
    mistral = tmp_path_factory.mktemp("mistral")
    model = VoxtralRealtimeForConditionalGeneration(SHAPE.config())
    model.save_pretrained(hugging_face)
    tekken = hugging_face / "tekken.json"
    tekken.write_text("{}")
    export(hugging_face, mistral, tekken, dtype=None)
    return hugging_face, mistral


def test_the_engine_reads_the_same_weights_from_both_formats(folders: tuple[Path, Path]) -> None:
    loaded = []
    for folder in folders:
        config = read_model_config(folder, AudioConfig())
        files = CheckpointFiles(folder, is_mistral_format=config.is_mistral_format)
        loaded.append(load_weights(files, config, torch.float32, torch.device("cpu")))
    ours, theirs = (_tensors(weights) for weights in loaded)
    assert len(ours) > 40
    assert all(torch.equal(*tensors) for tensors in zip(ours, theirs, strict=True))


def _tensors(value: object) -> list[torch.Tensor]:
    """Collect all tensors inside nested objects, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.device | torch.dtype | str | int | float) or value is None:
        return []
    if isinstance(value, (list, tuple)):
        children = list(value)
    elif isinstance(value, dict):
        children = list(value.values())
    else:
        names = getattr(value, "__slots__", None) or vars(value)
        children = [getattr(value, name) for name in names]
    return [tensor for child in children for tensor in _tensors(child)]


def test_a_missing_or_unknown_tensor_is_named() -> None:
    params = mistral_params(SHAPE.config().to_dict())
    with pytest.raises(ValueError, match="embed_tokens.* is missing"):
        mistral_tensors(params, {})
    hugging_face = VoxtralRealtimeForConditionalGeneration(SHAPE.config()).state_dict()
    assert len(list(mistral_names(params))) == len(hugging_face) - 1  # the head is tied


def test_attention_in_blocks_equals_transformers() -> None:
    torch.manual_seed(0)
    ours = TrainingModel(SHAPE, num_sounds=5, num_words=5).eval()
    theirs = VoxtralRealtimeForConditionalGeneration._from_config(
        SHAPE.config(), attn_implementation="eager"
    ).eval()
    theirs.load_state_dict(ours.voxtral.state_dict())
    num_tokens = 29
    log_mel = torch.randn(2, 128, 8 * num_tokens)
    ids = torch.randint(0, SHAPE.vocab_size, (2, num_tokens))
    with torch.no_grad():
        logits, _, _ = ours(log_mel, ids, torch.tensor([6, 6]))
        expected = theirs(input_ids=ids, input_features=log_mel, num_delay_tokens=6).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_params_json_is_plain_json() -> None:
    params = mistral_params(SHAPE.config().to_dict())
    assert json.loads(json.dumps(params))["sliding_window"] == SHAPE.decoder_window
