"""The log-mel spectrogram of the model, in float32 on the CPU whatever the model's dtype.

In: the samples that a token's mel frames read. Out: its mel frames. It knows nothing of streams.
Facts (DESIGN.md section 1): 400-point DFT of a periodic Hann window, power, 128 Slaney mel bins
over 0 to 8 kHz, log10 of at least 1e-10, floored 8 below a fixed maximum, then (x + 4) / 4.
"""

from __future__ import annotations

import numpy as np
import torch
from mistral_common.audio import mel_filter_bank
from numpy.typing import NDArray
from torch import Tensor

from voxlite.engine.config import AudioConfig


class LogMel:
    """Turn samples into mel frames, bit-equal however the samples arrived.

    A matrix product's last bits depend on its shape, so every token's is a product of its own, in
    one shape only. All else is computed for each number by itself.
    """

    def __init__(self, audio: AudioConfig) -> None:
        self._audio = audio
        self._window = torch.hann_window(audio.window_samples, periodic=True)
        filters = mel_filter_bank(
            num_frequency_bins=audio.window_samples // 2 + 1,
            num_mel_bins=audio.num_mel_bins,
            min_frequency=0.0,
            max_frequency=audio.sampling_rate_hz / 2,
            sampling_rate=audio.sampling_rate_hz,
        )
        self._filters = torch.from_numpy(filters).to(torch.float32)  # (201, 128)

    def __call__(self, spans: NDArray[np.float32]) -> Tensor:
        """Compute the mel frames of tokens.

        Args:
            spans: (tokens, 1520), for each token the samples from 200 before its start to 40 after
                its end.

        Returns:
            (tokens, 8, 128) float32 on the CPU.
        """
        samples = torch.from_numpy(spans)
        frames = samples.unfold(1, self._audio.window_samples, self._audio.hop_samples)
        spectrum = torch.fft.rfft(frames * self._window)  # (tokens, 8, 201)
        power = spectrum.real.square() + spectrum.imag.square()
        mel = torch.bmm(power, self._filters.expand(len(spans), -1, -1))  # (tokens, 8, 128)
        log_mel = torch.log10(torch.clamp(mel, min=1e-10))
        floor = self._audio.global_log_mel_max - 8.0
        return (torch.clamp(log_mel, min=floor) + 4.0) / 4.0
