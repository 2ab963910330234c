"""Sounds with nothing to say: noise of several colours, hum, tones, sweeps, chords, clicks.

All are float32 at 16 kHz with a root mean square of about 1; the caller sets the level.
"""

from collections.abc import Callable

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from training.clip_bank import SAMPLE_RATE, Samples

_EPSILON = 1e-8


def unit_rms(samples: Samples) -> Samples:
    """Scale to a root mean square of 1; silence stays silence."""
    rms = float(np.sqrt(np.mean(samples**2))) if len(samples) else 0.0
    return (samples / rms).astype(np.float32) if rms > _EPSILON else samples


def colored_noise(num_samples: int, rng: np.random.Generator) -> Samples:
    """Return noise whose power falls by 0 (white) to 9 dB per octave."""
    size = next_fast_len(num_samples, real=True)
    spectrum = rfft(rng.standard_normal(size, dtype=np.float32))
    frequency = np.maximum(np.arange(len(spectrum)) * SAMPLE_RATE / size, 30.0)
    spectrum *= ((frequency / 1000) ** -rng.uniform(0.0, 1.5)).astype(np.float32)
    return unit_rms(np.asarray(irfft(spectrum, size)[:num_samples], dtype=np.float32))


def _seconds(num_samples: int) -> Samples:
    return (np.arange(num_samples) / SAMPLE_RATE).astype(np.float32)


def hum(num_samples: int, rng: np.random.Generator) -> Samples:
    """Return mains hum with a few harmonics."""
    base = rng.choice((50.0, 60.0))
    phase = 2 * np.pi * base * _seconds(num_samples)
    total = np.zeros(num_samples, dtype=np.float32)
    for harmonic in range(1, 9):
        total += np.sin(harmonic * phase).astype(np.float32) * rng.exponential() / harmonic
    return unit_rms(total)


def tones(num_samples: int, rng: np.random.Generator) -> Samples:
    """Return one to three steady tones, like a signal or a dial tone."""
    time = _seconds(num_samples)
    total = np.zeros(num_samples, dtype=np.float32)
    for _ in range(rng.integers(1, 4)):
        total += np.sin(2 * np.pi * rng.uniform(80, 6000) * time)
    return unit_rms(total)


def sweep(num_samples: int, rng: np.random.Generator) -> Samples:
    """Return a tone that glides between two frequencies."""
    low, high = np.exp(rng.uniform(np.log(50), np.log(7500), 2))
    frequency = np.geomspace(low, high, num_samples)
    return unit_rms(np.sin(2 * np.pi * np.cumsum(frequency) / SAMPLE_RATE).astype(np.float32))


def chords(num_samples: int, rng: np.random.Generator) -> Samples:
    """Return music of a sort: decaying chords of harmonic notes, with a beat."""
    total = np.zeros(num_samples, dtype=np.float32)
    beat = int(SAMPLE_RATE * rng.uniform(0.12, 0.6))
    decay = rng.uniform(1, 8)
    for start in range(0, num_samples, beat):
        time = _seconds(num_samples - start)
        envelope = np.exp(-decay * time)
        for semitone in rng.choice(36, size=rng.integers(1, 4), replace=False):
            pitch = 110 * 2 ** (semitone / 12)
            for harmonic in range(1, 5):
                wave = np.sin(2 * np.pi * pitch * harmonic * time) * envelope
                total[start:] += (wave / harmonic**1.5).astype(np.float32)
    return unit_rms(total)


def clicks(num_samples: int, rng: np.random.Generator) -> Samples:
    """Return short bursts at random times, like knocks or keys."""
    total = np.zeros(num_samples, dtype=np.float32)
    for start in rng.integers(0, num_samples, size=max(1, num_samples // 6000)):
        length = min(int(rng.integers(16, 800)), num_samples - start)
        burst = rng.standard_normal(length) * np.exp(-np.arange(length) / (length / 5))
        total[start : start + length] += burst.astype(np.float32)
    return unit_rms(total)


SOUNDS: tuple[Callable[[int, np.random.Generator], Samples], ...] = (
    colored_noise,
    hum,
    tones,
    sweep,
    chords,
    clicks,
)
