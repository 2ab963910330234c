"""Deterministic signals that look like speech to a mel spectrogram, for tests without recordings.

In: a length and a seed. Out: 16 kHz mono float32: syllables of voiced harmonics under moving
formants, hissing consonants, pauses and a faint noise floor, at the level of a close microphone.
"""

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE_HZ = 16_000
VOICED_RMS = 0.08
BURST_RMS = 0.03
NOISE_FLOOR_RMS = 0.0005
FORMANT_RANGES_HZ = ((280, 800), (900, 2300), (2400, 3200))
HIGHEST_HARMONIC_HZ = 5_000


def speechlike(seconds: float, seed: int) -> NDArray[np.float32]:
    """Return (n,) float32 with n = round(seconds * 16000).

    A shorter signal of the same seed is a prefix of a longer one: sounds are made one after the
    other and the last is cut, never stretched or rescaled.
    """
    rng = np.random.default_rng(seed)
    num_samples = round(seconds * SAMPLE_RATE_HZ)
    sounds: list[NDArray[np.float64]] = [np.zeros(0)]
    made_samples = 0
    while made_samples < num_samples:
        kind = rng.choice(["syllable", "burst", "pause"], p=[0.6, 0.2, 0.2])
        if kind == "syllable":
            sound = _syllable(rng, _num_samples(rng, 0.12, 0.35))
        elif kind == "burst":
            sound = _burst(rng, _num_samples(rng, 0.03, 0.10))
        else:
            sound = np.zeros(_num_samples(rng, 0.05, 0.40))
        sounds.append(sound + NOISE_FLOOR_RMS * rng.standard_normal(len(sound)))
        made_samples += len(sound)
    return np.concatenate(sounds)[:num_samples].astype(np.float32)


def _num_samples(rng: np.random.Generator, shortest_s: float, longest_s: float) -> int:
    return round(rng.uniform(shortest_s, longest_s) * SAMPLE_RATE_HZ)


def _fade(num_samples: int) -> NDArray[np.float64]:
    """Return a swell from 0 to 1 and back: no clicks where sounds meet."""
    return np.sin(np.pi * np.arange(num_samples) / num_samples) ** 0.5


def _syllable(rng: np.random.Generator, num_samples: int) -> NDArray[np.float64]:
    """Return harmonics of a gliding pitch, each as loud as the formants around it allow."""
    glide = np.linspace(0, 1, num_samples)

    def moving(low: float, high: float) -> NDArray[np.float64]:
        start, end = rng.uniform(low, high, 2)
        return start + (end - start) * glide

    pitch_hz = rng.uniform(90, 220) * (1 + rng.uniform(-0.15, 0.15) * glide)
    formants_hz = [moving(low, high) for low, high in FORMANT_RANGES_HZ]
    phase = 2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE_HZ
    out = np.zeros(num_samples)
    for harmonic in range(1, int(HIGHEST_HARMONIC_HZ / pitch_hz.max()) + 1):
        hertz = harmonic * pitch_hz
        # Resonances 120 Hz wide over a source that falls with frequency, as a glottis does.
        gain = sum(1 / (1 + ((hertz - formant_hz) / 120) ** 2) for formant_hz in formants_hz)
        out += gain / harmonic**0.5 * np.sin(harmonic * phase)
    out *= _fade(num_samples)
    return out * VOICED_RMS / np.sqrt(np.mean(out**2))


def _burst(rng: np.random.Generator, num_samples: int) -> NDArray[np.float64]:
    """Return noise without its low frequencies, like an s or a t."""
    noise = np.diff(rng.standard_normal(num_samples + 1)) * _fade(num_samples)
    return noise * BURST_RMS / np.sqrt(np.mean(noise**2))
