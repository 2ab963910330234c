"""The engine against transformers' VoxtralRealtimeForConditionalGeneration, in both formats."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import VoxtralRealtimeForConditionalGeneration

from tests.checkpoints import (
    DecoderShape,
    EncoderShape,
    write_checkpoint,
    write_hugging_face_checkpoint,
)
from tests.engine.harness import transcribe
from tests.reference import greedy_ids, load_reference, mel_features
from tests.speechlike import speechlike
from voxlite.engine import Engine, EngineConfig
from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.audio.log_mel import LogMel
from voxlite.engine.config import TransformerConfig, read_model_config
from voxlite.engine.model.attention import AttentionBatch, LayerCache, Segment, window_mask
from voxlite.engine.model.checkpoint_files import CheckpointFiles
from voxlite.engine.model.decoder import Decoder
from voxlite.engine.model.encoder import Encoder
from voxlite.engine.model.layers import Rope
from voxlite.engine.model.weights import load_weights
from voxlite.engine.tokenizer import Tokenizer

CPU = torch.device("cpu")
ATOL = 1e-4
NUM_DELAY_TOKENS = 6
# 32 + 50 + 17 tokens: the encoder's window of 29 frames passes 13 times, the decoder's of 20
# tokens 4 times.
SAMPLES = speechlike(4.0, seed=3)


@dataclass
class Dense:
    """Our model's parts, run on a whole utterance at once."""

    encoder: Encoder
    decoder: Decoder
    mel: torch.Tensor  # (T, 8, 128)

    def hidden(self) -> torch.Tensor:
        """(F, dim) outputs of the encoder."""
        x, _ = self.encoder.conv_stem([self.mel.flatten(0, 1)], [self.encoder.initial_conv_state()])
        return self.encoder.transformer(x, *whole(self.encoder.stack.config, len(x)))

    def adapter(self) -> torch.Tensor:
        """(T, dim) outputs of the adapter."""
        return self.encoder.adapter(self.hidden())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """(T, vocabulary) logits for given ids (T,)."""
        scales = self.decoder.delay_scales(NUM_DELAY_TOKENS)[:, None]
        rows = torch.arange(len(ids))
        return self.decoder(
            self.adapter()[: len(ids)],
            ids,
            scales,
            rows,
            *whole(self.decoder.stack.config, len(ids)),
        )


def whole(config: TransformerConfig, count: int) -> tuple[AttentionBatch, list[LayerCache]]:
    """One batch that holds all positions, and caches with a slot for each."""
    positions = torch.arange(count)
    mask = window_mask(0, 0, count, config.window, CPU)
    segment = Segment(slice(0, count), positions, mask)
    shape = (config.num_kv_heads, count, config.head_size)
    caches = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
    return AttentionBatch(Rope(config, CPU).rotations(positions), positions, (segment,)), caches


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    mistral = write_checkpoint(
        root / "mistral", encoder=EncoderShape(window=29), decoder=DecoderShape(window=20)
    )
    hugging_face = write_hugging_face_checkpoint(root / "hugging_face", mistral)
    return {"mistral": mistral, "hugging_face": hugging_face}


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> VoxtralRealtimeForConditionalGeneration:
    return load_reference(folders["hugging_face"])


@pytest.fixture(scope="module", params=["mistral", "hugging_face"])
def dense(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Dense:
    folder = folders[request.param]
    config = read_model_config(folder, Tokenizer(folder / "tekken.json").audio_config)
    files = CheckpointFiles(folder, is_mistral_format=config.is_mistral_format)
    weights = load_weights(files, config, torch.float32, CPU)
    stream = AudioStream(config.audio, config.audio.num_right_pad_tokens(NUM_DELAY_TOKENS))
    stream.append(SAMPLES)
    stream.finish()
    mel = LogMel(config.audio)(stream.take(stream.num_tokens))
    return Dense(weights.encoder, weights.decoder, mel)


@pytest.fixture(scope="module")
def features(folders: dict[str, Path]) -> torch.Tensor:
    config = read_model_config(
        folders["mistral"], Tokenizer(folders["mistral"] / "tekken.json").audio_config
    )
    return mel_features(config.audio, SAMPLES, NUM_DELAY_TOKENS)


@torch.inference_mode()
def test_encoder_outputs_agree(
    dense: Dense, reference: VoxtralRealtimeForConditionalGeneration, features: torch.Tensor
) -> None:
    expected = reference.model.audio_tower(features).last_hidden_state[0]
    torch.testing.assert_close(dense.hidden(), expected, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_adapter_outputs_agree(
    dense: Dense, reference: VoxtralRealtimeForConditionalGeneration, features: torch.Tensor
) -> None:
    expected = reference.get_audio_features(features).pooler_output[0]
    torch.testing.assert_close(dense.adapter(), expected, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_logits_agree(
    dense: Dense, reference: VoxtralRealtimeForConditionalGeneration, features: torch.Tensor
) -> None:
    num_tokens = features.shape[-1] // 8
    ids = torch.randint(1400, (num_tokens,), generator=torch.Generator().manual_seed(0))
    expected = reference(
        input_ids=ids[None], input_features=features, num_delay_tokens=NUM_DELAY_TOKENS
    ).logits[0]
    torch.testing.assert_close(dense.logits(ids), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("source", ["mistral", "hugging_face"])
@torch.inference_mode()
def test_greedy_ids_are_equal(
    source: str,
    folders: dict[str, Path],
    reference: VoxtralRealtimeForConditionalGeneration,
    features: torch.Tensor,
) -> None:
    engine = Engine(EngineConfig(model=str(folders[source]), max_num_seqs=1))
    ids = transcribe(engine, [SAMPLES]).ids()
    prompt = [1] + [32] * (32 + NUM_DELAY_TOKENS)
    assert prompt + ids == greedy_ids(reference, features, prompt, NUM_DELAY_TOKENS)
    assert len(set(ids)) > 5  # else equality would say little


@torch.inference_mode()
def test_audio_before_layers_times_window_changes_no_adapter_output(dense: Dense) -> None:
    """FAULTS 25: the encoder's window comes from the config, and nothing reaches past it."""
    config = dense.encoder.stack.config
    reach_tokens = config.num_layers * (config.window - 1) // 4 + 2  # the conv stem's tokens
    changed = dense.mel.clone()
    changed[10] += 1.0
    other = Dense(dense.encoder, dense.decoder, changed)
    differences = (dense.adapter() - other.adapter()).abs().amax(dim=1)
    assert differences[10] > 0.01
    assert differences[10 + reach_tokens // 2] > 0
    assert differences[10 + reach_tokens :].max() == 0
    assert differences[:10].max() == 0


@torch.inference_mode()
def test_layers_change_nothing_that_they_share(dense: Dense) -> None:
    """FAULTS 22: slots, rotations and masks are the same after every layer and call."""
    config = dense.encoder.stack.config
    x, _ = dense.encoder.conv_stem([dense.mel.flatten(0, 1)], [dense.encoder.initial_conv_state()])
    batch, caches = whole(config, len(x))
    assert isinstance(batch.reads, tuple)
    [segment] = batch.reads
    assert segment.mask is not None
    shared = [batch.slot_mapping, batch.rotations, segment.mask]
    before = [tensor.clone() for tensor in shared]
    first = dense.encoder.transformer(x, batch, caches)
    second = dense.encoder.transformer(x, batch, caches)
    assert all(torch.equal(a, b) for a, b in zip(shared, before, strict=True))
    assert torch.equal(first, second)
