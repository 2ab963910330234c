"""Greedy, teacher-free transcription of whole clips in batches, as a dense reference of streaming.

The encoder sees each clip at once (its attention is causal, so the result is the streaming one);
the decoder goes position by position and reads back what it wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from torch import Tensor
from transformers import (
    DynamicCache,
    VoxtralRealtimeConfig,
    VoxtralRealtimeForConditionalGeneration,
)

from training.clip_bank import Samples
from training.dataset import NUM_SPECIAL_TOKENS
from training.model import ATTENTION_NAME, new_model
from training.spectrogram import NO_WARP, Stretch, WarpedSpectrogram
from voxlite.engine.config import BOS_ID, STREAMING_PAD_ID, AudioConfig, cdiv

MAX_TOKENS_PER_BATCH = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The ids a clip gave, one per position from the end of the prompt on, and their text."""

    ids: tuple[int, ...]
    text: str


def load_for_decoding(
    config: VoxtralRealtimeConfig, weights: dict[str, Tensor]
) -> VoxtralRealtimeForConditionalGeneration:
    """Return a model whose encoder reads whole clips fast and whose decoder goes step by step."""
    model = new_model(config, {"audio_config": ATTENTION_NAME, "text_config": "sdpa"})
    model.load_state_dict(weights)
    model.train(False)
    return model


class Transcriber:
    """Transcribes clips with one model at any delay."""

    def __init__(
        self,
        model: VoxtralRealtimeForConditionalGeneration,
        tokenizer: Tekkenizer,
        audio: AudioConfig,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._audio = audio
        self._spectrogram = WarpedSpectrogram(audio)

    def transcribe(self, clips: Sequence[Samples], delay_ms: int) -> list[Transcript]:
        """Return a transcript for each clip; clips of like length are decoded together."""
        order = sorted(range(len(clips)), key=lambda index: len(clips[index]))
        transcripts: dict[int, Transcript] = {}
        while order:
            longest = self._num_tokens(clips[order[-1]], delay_ms)
            count = max(1, MAX_TOKENS_PER_BATCH // longest)
            batch, order = order[-count:], order[:-count]
            results = self._transcribe_batch([clips[index] for index in batch], delay_ms)
            transcripts |= dict(zip(batch, results, strict=True))
        return [transcripts[index] for index in range(len(clips))]

    def log_mel(self, samples: Samples, num_tokens: int) -> Tensor:
        """Return the (mels, 8 * num_tokens) input for a clip, paddings included."""
        audio = self._audio
        reach = audio.window_samples // audio.hop_samples
        first_frame = audio.num_left_pad_tokens * audio.mel_frames_per_token - reach
        stretches = [
            Stretch(
                first_frame=first_frame,
                first_sample=-reach * audio.hop_samples,
                tempo=1.0,
                warp=NO_WARP,
            )
        ]
        num_frames = num_tokens * audio.mel_frames_per_token
        power = self._spectrogram.power(samples, num_frames, stretches)
        return torch.from_numpy(self._spectrogram.log_mel(power, stretches).T.copy())

    def _num_tokens(self, samples: Samples, delay_ms: int) -> int:
        audio = self._audio
        right = audio.num_right_pad_tokens(audio.num_delay_tokens(delay_ms))
        return audio.num_left_pad_tokens + cdiv(len(samples), audio.samples_per_token) + right

    @torch.inference_mode()
    def _transcribe_batch(self, clips: Sequence[Samples], delay_ms: int) -> list[Transcript]:
        audio, model = self._audio, self._model.model
        lengths = [self._num_tokens(clip, delay_ms) for clip in clips]
        num_delay = audio.num_delay_tokens(delay_ms)
        num_prompt = audio.num_prompt_tokens(num_delay)
        mel = torch.stack([self.log_mel(clip, max(lengths)) for clip in clips])
        adapted = model.get_audio_features(mel, use_cache=False, return_dict=True).pooler_output
        condition = model.time_embedding(torch.tensor([float(num_delay)]))[None]
        ids = torch.full((len(clips), num_prompt), STREAMING_PAD_ID)
        ids[:, 0] = BOS_ID
        cache = DynamicCache(config=self._model.config.get_text_config())
        written: list[Tensor] = []
        position = 0
        while position + ids.shape[1] < max(lengths):
            end = position + ids.shape[1]
            hidden = model.language_model(
                inputs_embeds=adapted[:, position:end] + model.language_model.embed_tokens(ids),
                position_ids=torch.arange(position, end)[None],
                t_cond=condition,
                cache=cache,
                use_cache=True,
            ).last_hidden_state
            ids = self._model.lm_head(hidden[:, -1:]).argmax(dim=-1)
            written.append(ids)
            position = end
        rows = torch.cat(written, dim=1).tolist() if written else [[] for _ in clips]
        return [
            self._transcript(row[: length - num_prompt])
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _transcript(self, ids: Sequence[int]) -> Transcript:
        text_ids = [token for token in ids if token >= NUM_SPECIAL_TOKENS]
        return Transcript(ids=tuple(ids), text=self._tokenizer.decode(text_ids).strip())


def gained(samples: Samples, gain: float) -> Samples:
    """Return the clip at another level, clipped as a converter would."""
    louder: Samples = np.clip(samples * np.float32(gain), -1, 1)
    return louder
