"""transformers' Voxtral-Realtime as the reference: loading, its features, its greedy ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import VoxtralRealtimeForConditionalGeneration

from voxlite.engine.audio.audio_stream import AudioStream
from voxlite.engine.audio.log_mel import LogMel
from voxlite.engine.config import AudioConfig


def load_reference(folder: Path, **options: Any) -> VoxtralRealtimeForConditionalGeneration:
    """Load a checkpoint in transformers' format; `options` are those of `from_pretrained`."""
    model = VoxtralRealtimeForConditionalGeneration.from_pretrained(folder, **options)
    model.generation_config.eos_token_id = None  # an end id in mid-stream ends nothing
    return model.eval()


def mel_features(
    audio: AudioConfig, samples: NDArray[np.float32], num_delay_tokens: int
) -> torch.Tensor:
    """(1, 128, 8 T) mel frames as transformers wants them; the mel has tests of its own."""
    stream = AudioStream(audio, audio.num_right_pad_tokens(num_delay_tokens))
    stream.append(samples)
    stream.finish()
    return LogMel(audio)(stream.take(stream.num_tokens)).flatten(0, 1).T[None]


@torch.inference_mode()
def greedy_ids(
    model: VoxtralRealtimeForConditionalGeneration,
    features: torch.Tensor,
    prompt: Sequence[int],
    num_delay_tokens: int,
) -> list[int]:
    """Return the prompt and all ids that are generated for the audio."""
    ids = model.generate(
        input_ids=torch.tensor([prompt]),
        input_features=features,
        num_delay_tokens=num_delay_tokens,
        do_sample=False,
        max_new_tokens=1000,  # clamped to the audio
    )
    return ids[0].tolist()
