"""The samples of one utterance, padded and cut into tokens for the mel spectrogram.

In: chunks of samples of any length, then the end. Out: for each token, the samples that its mel
frames read. It knows where padding goes and keeps only what later tokens still need.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from voxlite.engine.config import AudioConfig, cdiv


class AudioStream:
    """Pad, buffer and cut the samples of one utterance.

    With a = samples_per_token = 1,280, token k's eight mel frames read samples
    [a k - 200, a k + 1,320) of the left-padded signal, 1,520 in all. The buffer starts at sample
    -200, so that it holds them at [a k, a k + 1,520):

        signal    -200      0                 40,960
                    |zeros  |32 tokens of zeros |first sample ...
        token 0     [-------1,520------]
        token 1          [-------1,520------]
    """

    def __init__(self, audio: AudioConfig, num_right_pad_tokens: int) -> None:
        self._audio = audio
        self._num_right_pad_tokens = num_right_pad_tokens
        look_back_samples = audio.window_samples // 2
        self._buffer = np.zeros(
            look_back_samples + audio.num_left_pad_tokens * audio.samples_per_token, np.float32
        )
        self._is_finished = False
        self.num_samples = 0
        self.num_taken_tokens = 0

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def num_tokens(self) -> int:
        """All tokens of the finished utterance: 32 + ceil(samples / 1,280) + right padding."""
        assert self._is_finished
        return (
            self._audio.num_left_pad_tokens
            + cdiv(self.num_samples, self._audio.samples_per_token)
            + self._num_right_pad_tokens
        )

    @property
    def num_ready_tokens(self) -> int:
        """Tokens not yet taken whose samples are all here."""
        spare = len(self._buffer) - self._audio.span_samples
        return max(0, spare // self._audio.samples_per_token + 1)

    def append(self, samples: NDArray[np.float32]) -> None:
        """Add samples, shape (n,), 16 kHz, to the end."""
        assert not self._is_finished
        self.num_samples += len(samples)
        self._buffer = np.concatenate((self._buffer, samples))

    def finish(self) -> None:
        """End the utterance: zeros to a whole token, the right padding, and the look-ahead."""
        assert not self._is_finished
        self._is_finished = True
        missing_samples = -self.num_samples % self._audio.samples_per_token
        padding_samples = self._num_right_pad_tokens * self._audio.samples_per_token
        zeros = missing_samples + padding_samples + self._audio.look_ahead_samples
        self._buffer = np.concatenate((self._buffer, np.zeros(zeros, np.float32)))

    def take(self, num_tokens: int) -> NDArray[np.float32]:
        """Remove the next tokens: (num_tokens, 1520), the samples that each one's mel reads."""
        assert 0 < num_tokens <= self.num_ready_tokens
        step_samples = self._audio.samples_per_token
        spans = np.lib.stride_tricks.sliding_window_view(self._buffer, self._audio.span_samples)
        taken = spans[: num_tokens * step_samples : step_samples].copy()
        self._buffer = self._buffer[num_tokens * step_samples :].copy()
        self.num_taken_tokens += num_tokens
        return taken
