"""Log-mel spectrograms with a rubber time axis and a rubber frequency axis.

Without warps this is the model's own spectrogram. Warps are what makes one recorded voice into
many: the frames of a stretch of audio may be taken closer together or further apart (tempo, with
the pitch unchanged), and its frequency axis may be scaled (length of the vocal tract).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from training.clip_bank import Samples
from voxlite.engine.config import AudioConfig

Spectrogram = npt.NDArray[np.float32]

# A warp is a factor for each of these frequencies: what lies at f is heard at f * factor, and in
# between by interpolation. Equal factors change the length of the vocal tract; unequal ones move
# the formants against each other, as accents and other throats do.
WARP_KNOTS_HZ = (0.0, 600.0, 1200.0, 2000.0, 3200.0, 5000.0, 8000.0)
Warp = tuple[float, ...]
NO_WARP: Warp = (1.0,) * len(WARP_KNOTS_HZ)

_POWER_FLOOR = 1e-10


def _hz_to_slaney_mel(hz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Convert to Slaney's mel scale: linear to 1 kHz, then logarithmic."""
    log_step = np.log(6.4) / 27
    return np.where(hz < 1000, hz * 3 / 200, 15 + np.log(np.maximum(hz, 1000) / 1000) / log_step)


def _slaney_mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    log_step = np.log(6.4) / 27
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(log_step * (mel - 15)))


def mel_filters(audio: AudioConfig, warp: Warp = NO_WARP) -> Spectrogram:
    """Return the mel filters as a (bins, mels) matrix.

    Args:
        audio: sizes of the spectrogram.
        warp: factors at `WARP_KNOTS_HZ`.
    """
    nyquist = audio.sampling_rate_hz / 2
    num_bins = audio.window_samples // 2 + 1
    hz = np.linspace(0, nyquist, num_bins)
    knots = np.array(WARP_KNOTS_HZ)
    heard = np.minimum(np.maximum.accumulate(knots * np.array(warp)), nyquist)
    hz = np.interp(hz, knots, heard)
    top = _hz_to_slaney_mel(np.array(nyquist))
    edges = _slaney_mel_to_hz(np.linspace(0, float(top), audio.num_mel_bins + 2))
    width = np.diff(edges)
    rising = (hz[:, None] - edges[:-2]) / width[:-1]
    falling = (edges[2:] - hz[:, None]) / width[1:]
    area = 2 / (edges[2:] - edges[:-2])
    filters: Spectrogram = (np.maximum(0, np.minimum(rising, falling)) * area).astype(np.float32)
    return filters


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Mel frames [first_frame, ...) up to the next stretch, and the audio they look at.

    Frame `first_frame + i` is centred on sample `first_sample + i * hop * tempo` of the audio.
    """

    first_frame: int
    first_sample: float
    tempo: float
    warp: Warp


class WarpedSpectrogram:
    """Computes power spectra and log-mel spectrograms."""

    def __init__(self, audio: AudioConfig) -> None:
        self._audio = audio
        size = audio.window_samples
        self._window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)
        self._plain_filters = torch.from_numpy(mel_filters(audio))

    def power(self, samples: Samples, num_frames: int, stretches: list[Stretch]) -> Spectrogram:
        """Return the (num_frames, bins) power spectra of `samples`, zeros around them.

        Args:
            samples: the audio; frames that look past its ends see zeros.
            num_frames: mel frames wanted; those before the first stretch are silent.
            stretches: in order of `first_frame`.
        """
        size, hop = self._audio.window_samples, self._audio.hop_samples
        half = size // 2
        padded = np.concatenate([np.zeros(size, np.float32), samples, np.zeros(size, np.float32)])
        centers = np.full(num_frames, -half, dtype=np.int64)
        for stretch, end in self._with_ends(stretches, num_frames):
            steps = np.arange(end - stretch.first_frame) * (hop * stretch.tempo)
            centers[stretch.first_frame : end] = np.rint(stretch.first_sample + steps)
        starts = np.clip(centers - half + size, 0, len(padded) - size)
        frames = np.lib.stride_tricks.sliding_window_view(padded, size)[starts]
        # torch, not numpy: its products keep to the one thread that data workers are given.
        spectrum = torch.fft.rfft(torch.from_numpy(frames * self._window))
        power: Spectrogram = (spectrum.real.square() + spectrum.imag.square()).numpy()
        return power

    def log_mel(self, power: Spectrogram, stretches: list[Stretch]) -> Spectrogram:
        """Return the (frames, mels) input of the model for (frames, bins) power spectra."""
        mel = np.empty((len(power), self._audio.num_mel_bins), dtype=np.float32)
        first = stretches[0].first_frame if stretches else len(power)
        mel[:first] = self._filtered(power[:first], NO_WARP)
        for stretch, end in self._with_ends(stretches, len(power)):
            frames = slice(stretch.first_frame, end)
            mel[frames] = self._filtered(power[frames], stretch.warp)
        log = np.log10(np.maximum(mel, _POWER_FLOOR))
        floor = self._audio.global_log_mel_max - 8
        scaled: Spectrogram = ((np.maximum(log, floor) + 4) / 4).astype(np.float32)
        return scaled

    @staticmethod
    def _with_ends(stretches: list[Stretch], num_frames: int) -> list[tuple[Stretch, int]]:
        ends = [stretch.first_frame for stretch in stretches[1:]] + [num_frames]
        return list(zip(stretches, ends, strict=True))

    def _filtered(self, power: Spectrogram, warp: Warp) -> Spectrogram:
        filters = self._plain_filters
        if warp != NO_WARP:
            filters = torch.from_numpy(mel_filters(self._audio, warp))
        mel: Spectrogram = (torch.from_numpy(power) @ filters).numpy()
        return mel
