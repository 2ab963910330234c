"""Configuration, validated once: of the model and its audio, of the engine, of a session.

Every dimension comes from the checkpoint's `params.json` (Mistral) or `config.json` (Hugging
Face); nothing about the 4B is written here. Frozen: nothing changes after start-up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from voxlite.engine.errors import CheckpointError, InvalidInput

BOS_ID: Final = 1
STREAMING_PAD_ID: Final = 32
STREAMING_WORD_ID: Final = 33

# The delays that the model was trained for.
LEGAL_DELAYS_MS: Final = (*range(80, 1201, 80), 2400)


MAX_NUM_DRAFT_TOKENS: Final = 3
_MAX_BUFFERED_SECONDS: Final = 86_400
# No dimension of a sane model is beyond this.
_MAX_DIMENSION: Final = 2**20


def cdiv(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def prompt_ids(num_tokens: int) -> list[int]:
    """Return the first tokens of every prompt: `<s>`, then pads."""
    return [BOS_ID] + [STREAMING_PAD_ID] * (num_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """The sound side of a checkpoint: the mel spectrogram, padding and delay.

    1 token = frame_rate ** -1 = 80 ms = 1,280 samples = 8 mel frames = 4 encoder frames
    """

    sampling_rate_hz: int = 16_000
    frame_rate_hz: float = 12.5
    num_mel_bins: int = 128
    hop_samples: int = 160
    window_samples: int = 400
    global_log_mel_max: float = 1.5
    num_left_pad_tokens: int = 32
    default_delay_ms: int = 480
    # mistral-common's OFFLINE_STREAMING_BUFFER_TOKENS: room for the last words after the delay.
    num_buffer_tokens: int = 10

    def __post_init__(self) -> None:
        if self.sampling_rate_hz / self.frame_rate_hz % self.hop_samples:
            raise CheckpointError(
                f"a token of {self.sampling_rate_hz / self.frame_rate_hz} samples is not a whole "
                f"number of mel frames of {self.hop_samples} samples"
            )
        if self.window_samples % 2 or self.look_ahead_samples < 0:
            raise CheckpointError(
                f"window_samples={self.window_samples}: an even number from "
                f"{2 * self.hop_samples} is needed"
            )
        if not 1 <= self.num_left_pad_tokens <= 1000:
            raise CheckpointError(
                f"num_left_pad_tokens={self.num_left_pad_tokens}: 1 to 1000 are possible"
            )
        if not isinstance(self.global_log_mel_max, int | float):
            raise CheckpointError(f"global_log_mel_max={self.global_log_mel_max!r}: not a number")
        self.num_delay_tokens(self.default_delay_ms)

    @property
    def samples_per_token(self) -> int:
        return int(self.sampling_rate_hz / self.frame_rate_hz)

    @property
    def mel_frames_per_token(self) -> int:
        return self.samples_per_token // self.hop_samples

    @property
    def num_shared_tokens(self) -> int:
        """Tokens at the start of which none reads an utterance's audio.

        The last token of the left padding reads 40 samples of what follows it.
        """
        return self.num_left_pad_tokens - 1

    @property
    def span_samples(self) -> int:
        """Samples that a token's mel frames read: 200 before it, its own, 40 after it."""
        return self.window_samples // 2 + self.samples_per_token + self.look_ahead_samples

    @property
    def look_ahead_samples(self) -> int:
        """Samples after a token's end that its last mel frame reads: 200 - 160 = 40."""
        return self.window_samples // 2 - self.hop_samples

    @property
    def token_ms(self) -> int:
        return round(1000 / self.frame_rate_hz)

    @property
    def token_s(self) -> float:
        return 1 / self.frame_rate_hz

    def num_delay_tokens(self, delay_ms: int) -> int:
        """Return the delay in tokens.

        Raises:
            InvalidInput: the model wasn't trained for this delay.
        """
        if not isinstance(delay_ms, int) or delay_ms not in LEGAL_DELAYS_MS:
            raise InvalidInput(
                f"delay of {delay_ms} ms: the model knows 80 to 1200 ms in steps of 80, and 2400 ms"
            )
        return delay_ms // self.token_ms

    def num_prompt_tokens(self, num_delay_tokens: int) -> int:
        """Return `<s>` + left padding + delay: 1 + 32 + 6 = 39 at 480 ms."""
        return 1 + self.num_left_pad_tokens + num_delay_tokens

    def num_right_pad_tokens(self, num_delay_tokens: int) -> int:
        """Return delay + 1 + buffer: 6 + 1 + 10 = 17 at 480 ms."""
        return num_delay_tokens + 1 + self.num_buffer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """One stack of layers. `window` counts positions and includes the query's own."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_dim: int
    window: int
    norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        for name in (
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "hidden_dim",
            "window",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= _MAX_DIMENSION:
                raise CheckpointError(
                    f"{name}={value!r}: a whole number from 1 to {_MAX_DIMENSION} is needed"
                )
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or value <= 0:
                raise CheckpointError(f"{name}={value!r}: a number above 0 is needed")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise CheckpointError(f"head_size={self.head_size} is odd: RoPE turns pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a checkpoint's shape, whichever format it was read from."""

    audio: AudioConfig
    encoder: TransformerConfig
    decoder: TransformerConfig
    block_pool_size: int  # encoder frames per token (downsample_factor)
    vocab_size: int
    ada_norm_dim: int
    is_mistral_format: bool

    def __post_init__(self) -> None:
        conv_stride = 2
        if self.block_pool_size * conv_stride != self.audio.mel_frames_per_token:
            raise CheckpointError(
                f"downsample_factor={self.block_pool_size}: {self.audio.mel_frames_per_token} mel "
                f"frames per token need {self.audio.mel_frames_per_token // conv_stride}"
            )


def read_model_config(folder: Path, audio_of_tekken: AudioConfig) -> ModelConfig:
    """Read `params.json`, or else `config.json`, of a checkpoint folder.

    Args:
        folder: the checkpoint.
        audio_of_tekken: padding and delay as `tekken.json` gives them, the source for both formats.

    Raises:
        CheckpointError: neither file is there, or one lacks a field or holds an impossible value.
    """
    for name, parse in (("params.json", _parse_mistral), ("config.json", _parse_hugging_face)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            return parse(json.loads(path.read_text()), audio_of_tekken)
        except KeyError as err:
            raise CheckpointError(f"{path}: field {err} is missing") from err
        except (
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            CheckpointError,
        ) as err:
            raise CheckpointError(f"{path}: {err}") from err
    raise CheckpointError(f"{folder} holds neither params.json nor config.json")


def _parse_mistral(params: dict[str, Any], audio: AudioConfig) -> ModelConfig:
    whisper = params["multimodal"]["whisper_model_args"]
    encoder = whisper["encoder_args"]
    spectrogram = encoder["audio_encoding_args"]
    return ModelConfig(
        audio=_with_spectrogram(
            audio,
            num_mel_bins=spectrogram["num_mel_bins"],
            global_log_mel_max=spectrogram.get("global_log_mel_max", audio.global_log_mel_max),
        ),
        encoder=_stack(encoder),
        decoder=_stack(params),
        block_pool_size=whisper["downsample_args"]["downsample_factor"],
        vocab_size=params["vocab_size"],
        ada_norm_dim=params["ada_rms_norm_t_cond_dim"],
        is_mistral_format=True,
    )


def _stack(args: dict[str, Any]) -> TransformerConfig:
    return TransformerConfig(
        dim=args["dim"],
        num_layers=args["n_layers"],
        num_heads=args["n_heads"],
        num_kv_heads=args["n_kv_heads"],
        head_size=args["head_dim"],
        hidden_dim=args["hidden_dim"],
        window=args["sliding_window"],
        norm_eps=args["norm_eps"],
        rope_theta=args["rope_theta"],
    )


def _parse_hugging_face(config: dict[str, Any], audio: AudioConfig) -> ModelConfig:
    if config.get("model_type") != "voxtral_realtime":
        raise CheckpointError(f"model_type={config.get('model_type')!r} is not 'voxtral_realtime'")
    encoder, decoder = config["audio_config"], config["text_config"]
    return ModelConfig(
        audio=_with_spectrogram(
            audio,
            num_mel_bins=encoder["num_mel_bins"],
            global_log_mel_max=audio.global_log_mel_max,
        ),
        encoder=_hugging_face_stack(encoder, encoder["num_attention_heads"]),
        decoder=_hugging_face_stack(decoder, decoder["num_key_value_heads"]),
        block_pool_size=config["downsample_factor"],
        vocab_size=decoder["vocab_size"],
        # Not a field of this format: transformers' VoxtralRealtimeTextAdaRmsNorm writes 32 too.
        ada_norm_dim=32,
        is_mistral_format=False,
    )


def _hugging_face_stack(args: dict[str, Any], num_kv_heads: int) -> TransformerConfig:
    return TransformerConfig(
        dim=args["hidden_size"],
        num_layers=args["num_hidden_layers"],
        num_heads=args["num_attention_heads"],
        num_kv_heads=num_kv_heads,
        head_size=args["head_dim"],
        hidden_dim=args["intermediate_size"],
        window=args["sliding_window"],
        norm_eps=args["rms_norm_eps"],
        rope_theta=args["rope_parameters"]["rope_theta"],
    )


def _with_spectrogram(
    audio: AudioConfig, *, num_mel_bins: int, global_log_mel_max: float
) -> AudioConfig:
    if num_mel_bins != audio.num_mel_bins:
        raise CheckpointError(
            f"num_mel_bins={num_mel_bins}, but tekken.json says {audio.num_mel_bins}"
        )
    return AudioConfig(
        sampling_rate_hz=audio.sampling_rate_hz,
        frame_rate_hz=audio.frame_rate_hz,
        num_mel_bins=num_mel_bins,
        hop_samples=audio.hop_samples,
        window_samples=audio.window_samples,
        global_log_mel_max=global_log_mel_max,
        num_left_pad_tokens=audio.num_left_pad_tokens,
        default_delay_ms=audio.default_delay_ms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an operator chooses. `kv_cache_gib=None` makes room for `max_num_seqs` sessions."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    max_num_seqs: int = 8
    kv_cache_gib: float | None = None
    default_delay_ms: int | None = None
    max_buffered_seconds: float = 60.0
    block_size: int = 16
    # The encoder reads its weights once for this many tokens where audio is waiting; more tokens
    # cost more KV blocks per session: cdiv(188 + 48 - 1, 16) + 1 = 16 instead of 13 at one.
    max_encode_tokens: int = 48
    # What a session's decoder window is never cut below where the KV cache is full: 82 s. A first
    # minute fits, with its prompt and the longest delay: 32 + 750 + 30 + 41 tokens.
    min_window_tokens: int = 1024
    # Where audio is waiting, guess so many next tokens and check them in one pass; None takes what
    # suits weights and device. The text is the same with any number.
    num_draft_tokens: int | None = None
    # Overwrite freed KV blocks with NaN: a stale read then can't go unnoticed. For tests.
    poison_freed_blocks: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32", "float16"):
            raise InvalidInput(f"dtype {self.dtype!r}: one of auto, bfloat16, float32, float16")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidInput(f"device {self.device!r}: one of auto, cpu, cuda")
        if self.quantization not in ("none", "int8"):
            raise InvalidInput(f"quantization {self.quantization!r}: one of none, int8")
        for name in ("max_num_seqs", "block_size", "max_encode_tokens", "min_window_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)}: at least 1 is needed")
        num_drafts = self.num_draft_tokens
        if num_drafts is not None and not 0 <= num_drafts <= MAX_NUM_DRAFT_TOKENS:
            raise InvalidInput(
                f"num_draft_tokens={num_drafts}: 0 to {MAX_NUM_DRAFT_TOKENS} are possible"
            )
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise InvalidInput(f"kv_cache_gib={self.kv_cache_gib}: more than 0 is needed")
        if not 1 <= self.max_buffered_seconds <= _MAX_BUFFERED_SECONDS:
            raise InvalidInput(
                f"max_buffered_seconds={self.max_buffered_seconds}: 1 to {_MAX_BUFFERED_SECONDS} "
                f"are possible"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a client chooses for a session. `delay_ms=None` takes the engine's default."""

    delay_ms: int | None = None
    logprobs: bool = False
