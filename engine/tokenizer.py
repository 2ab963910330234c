"""The tokenizer as transcription needs it: ids to bytes, and the audio settings of `tekken.json`.

In: a checkpoint's `tekken.json`, read with mistral-common. Text is only ever decoded here.
"""

from __future__ import annotations

from pathlib import Path

from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from voxlite.engine.config import AudioConfig
from voxlite.engine.errors import CheckpointError, InvalidInput


class Tokenizer:
    """Map token ids to the bytes that they stand for."""

    def __init__(self, path: Path) -> None:
        """Read `tekken.json`.

        Raises:
            CheckpointError: the file is missing, isn't a tekken file, or lacks streaming audio.
        """
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            self._tekken = Tekkenizer.from_file(path)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            AssertionError,
            RecursionError,
        ) as err:
            raise CheckpointError(f"{path}: not a tekken tokenizer: {err!r}") from err
        try:
            self.audio_config = self._read_audio_config()
        except (CheckpointError, InvalidInput, TypeError, ArithmeticError) as err:
            raise CheckpointError(f"{path}: {err}") from err
        self.vocab_size: int = self._tekken.n_words

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token: none for special ids and for ids out of range."""
        if not self._tekken.num_special_tokens <= token_id < self.vocab_size:
            return b""
        piece: bytes = self._tekken.id_to_byte_piece(token_id, SpecialTokenPolicy.IGNORE)
        return piece

    def _read_audio_config(self) -> AudioConfig:
        audio = self._tekken.audio
        if (
            audio is None
            or audio.streaming_n_left_pad_tokens is None
            or audio.transcription_delay_ms is None
        ):
            raise CheckpointError("no audio section for streaming transcription")
        return AudioConfig(
            sampling_rate_hz=audio.sampling_rate,
            frame_rate_hz=audio.frame_rate,
            num_mel_bins=audio.encoding_config.num_mel_bins,
            hop_samples=audio.encoding_config.hop_length,
            window_samples=audio.encoding_config.window_size,
            num_left_pad_tokens=audio.streaming_n_left_pad_tokens,
            default_delay_ms=round(audio.transcription_delay_ms),
        )
