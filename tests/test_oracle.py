"""The oracle against transformers' implementation, on one tiny checkpoint in both layouts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mistral_common.tokens.tokenizers.audio import AudioEncoder, SpecialAudioIDs
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers import (
    VoxtralRealtimeFeatureExtractor,
    VoxtralRealtimeForConditionalGeneration,
)

from tests.checkpoints import (
    END_ID,
    NUM_SPECIAL_IDS,
    PAD_ID,
    TOKEN_MS,
    WORD_ID,
    DecoderShape,
    EncoderShape,
    split_halves,
    write_checkpoint,
    write_hugging_face_checkpoint,
)
from tests.oracle import Generation, Oracle, attended, attention_mask, rotate
from tests.reference import greedy_ids, load_reference
from tests.speechlike import speechlike

ENCODER_WINDOW_FRAMES = 29  # not a multiple of a token's 4 frames
DECODER_WINDOW_TOKENS = 20
SECONDS = 3.01  # 87 tokens with the padding: both windows pass several times
N_DELAY = 6
TOLERANCE = 1e-4  # float32 there, float64 here; results are of the order of 1 to 10


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tensors this small are slower on two threads, far slower where other work runs."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    mistral = write_checkpoint(
        root / "mistral",
        encoder=EncoderShape(window=ENCODER_WINDOW_FRAMES),
        decoder=DecoderShape(window=DECODER_WINDOW_TOKENS),
    )
    return mistral, write_hugging_face_checkpoint(root / "hugging_face", mistral)


@pytest.fixture(scope="module")
def oracle(folders: tuple[Path, Path]) -> Oracle:
    return Oracle(folders[0])


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> VoxtralRealtimeForConditionalGeneration:
    return load_reference(folders[1], attn_implementation="eager")


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    return speechlike(SECONDS, seed=3)


@pytest.fixture(scope="module")
def mel(oracle: Oracle, samples: np.ndarray) -> np.ndarray:
    return oracle.log_mel(oracle.pad(samples, N_DELAY))


@pytest.fixture(scope="module")
def encoded(oracle: Oracle, mel: np.ndarray) -> np.ndarray:
    return oracle.encoder(mel)


@pytest.fixture(scope="module")
def adapted(oracle: Oracle, encoded: np.ndarray) -> np.ndarray:
    return oracle.adapter(encoded)


@pytest.fixture(scope="module")
def generation(oracle: Oracle, samples: np.ndarray) -> Generation:
    return oracle.generate(samples, N_DELAY)


def features(mel: np.ndarray) -> torch.Tensor:
    """Return (1, 128, M) float32, as transformers takes mel frames."""
    return torch.from_numpy(mel.T[None].astype(np.float32))


@pytest.fixture(scope="module")
def audio_encoder(folders: tuple[Path, Path]) -> AudioEncoder:
    audio_config = Tekkenizer.from_file(folders[0] / "tekken.json").audio
    assert audio_config is not None
    ids = SpecialAudioIDs(
        audio=24, begin_audio=25, streaming_pad=PAD_ID, text_to_audio=None, audio_to_text=None
    )
    return AudioEncoder(audio_config, ids)


@pytest.mark.parametrize("delay_ms", [80, 480, 2400])
@pytest.mark.parametrize("num_samples", [0, 1, 1279, 1280, 1281])
def test_padding_and_prompt_are_those_of_mistral_common(
    oracle: Oracle, audio_encoder: AudioEncoder, num_samples: int, delay_ms: int
) -> None:
    left, right = audio_encoder._get_streaming_pad(num_samples, delay_ms)
    samples = np.ones(num_samples, dtype=np.float32)
    padded = oracle.pad(samples, delay_ms // TOKEN_MS)
    np.testing.assert_array_equal(padded, np.pad(samples, (left, right)))
    expected = audio_encoder.encode_streaming_tokens(delay_ms)
    assert oracle.prompt(delay_ms // TOKEN_MS)[1:] == expected


def test_mel_is_that_of_transformers(oracle: Oracle, mel: np.ndarray, samples: np.ndarray) -> None:
    extractor = VoxtralRealtimeFeatureExtractor()
    padded = oracle.pad(samples, N_DELAY).astype(np.float32)
    expected = extractor(padded, sampling_rate=16_000, return_tensors="np").input_features[0].T
    np.testing.assert_allclose(mel, expected, atol=2e-4)


def test_mel_of_a_tone_peaks_at_the_tone(oracle: Oracle) -> None:
    """1000 Hz is 15 mels of 45.25; bins lie 45.25 / 129 mels apart: peak 42 is the nearest."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    assert oracle.log_mel(tone)[50].argmax() == 42


def test_mel_beyond_both_ends_is_silence(oracle: Oracle) -> None:
    noise = np.random.default_rng(0).standard_normal(1280)
    surrounded = np.pad(noise, (320, 320))
    np.testing.assert_array_equal(oracle.log_mel(noise), oracle.log_mel(surrounded)[2:-2])


def test_encoder_and_adapter_are_those_of_transformers(
    reference: VoxtralRealtimeForConditionalGeneration,
    mel: np.ndarray,
    encoded: np.ndarray,
    adapted: np.ndarray,
) -> None:
    assert len(encoded) == 4 * 87
    assert len(encoded) > 10 * ENCODER_WINDOW_FRAMES
    with torch.no_grad():
        expected = reference.get_audio_features(features(mel), return_dict=True)
    np.testing.assert_allclose(encoded, expected.last_hidden_state[0].numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(adapted, expected.pooler_output[0].numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("n_delay", [1, 6, 30])
def test_logits_are_those_of_transformers(
    oracle: Oracle,
    reference: VoxtralRealtimeForConditionalGeneration,
    mel: np.ndarray,
    adapted: np.ndarray,
    n_delay: int,
) -> None:
    assert len(adapted) > 4 * DECODER_WINDOW_TOKENS
    ids = np.random.default_rng(0).integers(0, 1400, len(adapted)).tolist()
    actual = oracle.logits(adapted, ids, n_delay)
    with torch.no_grad():
        output = reference(
            input_features=features(mel), input_ids=torch.tensor([ids]), num_delay_tokens=n_delay
        )
    np.testing.assert_allclose(actual, output.logits[0].numpy(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("n_delay", [1, 6])
def test_greedy_ids_are_those_of_transformers(
    oracle: Oracle,
    reference: VoxtralRealtimeForConditionalGeneration,
    samples: np.ndarray,
    n_delay: int,
) -> None:
    generation = oracle.generate(samples, n_delay)
    assert min(generation.margins) > 10 * TOLERANCE, "a near tie says nothing: take another seed"
    prompt = oracle.prompt(n_delay)
    mel = features(oracle.log_mel(oracle.pad(samples, n_delay)))
    assert prompt + generation.ids == greedy_ids(reference, mel, prompt, n_delay)


def test_each_greedy_step_is_the_last_row_of_dense_logits(
    oracle: Oracle, adapted: np.ndarray, generation: Generation
) -> None:
    """Leaving out the positions out of reach changes nothing."""
    prompt = oracle.prompt(N_DELAY)
    logits = oracle.logits(adapted, (prompt + generation.ids)[:-1], N_DELAY)[len(prompt) - 1 :]
    assert logits.argmax(axis=-1).tolist() == generation.ids
    logprobs = torch.from_numpy(logits).log_softmax(dim=-1).max(dim=-1).values
    np.testing.assert_allclose(generation.logprobs, logprobs, atol=1e-9)
    best = np.sort(logits, axis=-1)
    np.testing.assert_allclose(generation.margins, best[:, -1] - best[:, -2], atol=1e-9)


def test_sixteen_seconds_at_480_ms_are_39_prompt_ids_and_210_more(oracle: Oracle) -> None:
    """As in the published model's usage report: 249 in all."""
    assert len(oracle.prompt(n_delay=6)) == 39
    assert len(oracle.pad(np.zeros(16 * 16_000), 6)) == (39 + 210) * oracle.samples_per_token


def test_every_token_of_audio_after_the_prompt_gives_one_id(
    oracle: Oracle, mel: np.ndarray, generation: Generation
) -> None:
    assert len(generation.ids) == len(mel) // 8 - len(oracle.prompt(N_DELAY))


def test_checkpoint_gives_ids_of_every_kind_that_follow_the_audio(oracle: Oracle) -> None:
    first = oracle.greedy(speechlike(4.0, seed=1), N_DELAY)
    second = oracle.greedy(speechlike(4.0, seed=2), N_DELAY)
    for ids in (first, second):
        assert {END_ID, PAD_ID, WORD_ID} <= set(ids)
        assert len({token_id for token_id in ids if token_id >= NUM_SPECIAL_IDS}) >= 5
    assert np.mean(np.array(first) != np.array(second)) > 0.5


@pytest.mark.parametrize(
    "overrides",
    [{"norm_eps": 0.01}, {"rope_theta": 100.0}, {"sliding_window": 19}],
    ids=lambda overrides: next(iter(overrides)),
)
def test_decoder_numbers_come_from_params(
    tmp_path: Path, oracle: Oracle, adapted: np.ndarray, overrides: dict[str, float]
) -> None:
    ids = [PAD_ID] * len(adapted)
    other = Oracle(write_checkpoint(tmp_path, **overrides))
    difference = other.logits(adapted, ids, N_DELAY) - oracle.logits(adapted, ids, N_DELAY)
    assert np.abs(difference).max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_hugging_face_folder_holds_the_same_model(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    mistral = write_checkpoint(tmp_path / "mistral", dtype=dtype)
    whole = write_hugging_face_checkpoint(tmp_path / "whole", mistral)
    sharded = write_hugging_face_checkpoint(tmp_path / "sharded", mistral, max_shard_size="100KB")
    assert len(list(whole.glob("*.safetensors"))) == 1
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    models = [
        VoxtralRealtimeForConditionalGeneration.from_pretrained(folder, dtype="auto")
        for folder in (whole, sharded)
    ]
    weights = [model.state_dict() for model in models]
    assert {tensor.dtype for tensor in weights[0].values()} == {dtype}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_bf16_file_is_read_without_rounding(tmp_path: Path) -> None:
    full = Oracle(write_checkpoint(tmp_path / "float32")).embeddings
    rounded = Oracle(write_checkpoint(tmp_path / "bfloat16", dtype=torch.bfloat16)).embeddings
    expected = torch.from_numpy(full).to(torch.float32).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize(
    ("position", "window", "first"),
    [(0, 750, 0), (748, 750, 0), (749, 750, 0), (750, 750, 1), (1503, 750, 754), (5, 1, 5)],
)
def test_attended_positions_are_the_window_that_ends_at_the_query(
    position: int, window: int, first: int
) -> None:
    assert list(attended(position, window)) == list(range(first, position + 1))


def test_attention_mask_of_window_3() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    np.testing.assert_array_equal(attention_mask(range(4), 3), np.array(expected, dtype=bool))


def test_rope_scores_depend_on_the_distance_alone() -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 16))

    def score(query_position: int, key_position: int) -> float:
        turned = rotate(query, [query_position], 1e6), rotate(key, [key_position], 1e6)
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(1_000_007, 1_000_003), abs=1e-8)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_split_halves_gathers_even_rows_before_odd_ones() -> None:
    rows = torch.arange(12)
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert split_halves(rows, head_dim=6).tolist() == expected


def test_shorter_speech_is_a_prefix_of_longer_speech() -> None:
    np.testing.assert_array_equal(speechlike(1.5, seed=3), speechlike(4.0, seed=3)[:24_000])


@pytest.mark.parametrize("seed", range(3))
def test_speech_has_the_level_of_speech(seed: int) -> None:
    speech = speechlike(10.0, seed)
    assert speech.dtype == np.float32
    assert 0.2 < np.abs(speech).max() < 0.9
    assert 0.03 < np.sqrt(np.mean(speech**2)) < 0.12
