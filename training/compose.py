"""Compose training utterances: clips of any bank strung together, each voice changed at random.

An utterance has a fixed length. It is filled from the left with segments (a string of single
digits, an order, a sentence, a sound with nothing to say) and the gaps between them; then room,
microphone, noise and level are drawn for the whole of it. Word times are carried through every
change.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.signal import oaconvolve

from training.clip_bank import SAMPLE_RATE, Clip, ClipBank, Samples, Word
from training.noise import SOUNDS, colored_noise, unit_rms
from training.spectrogram import NO_WARP, Spectrogram, Stretch, Warp, WarpedSpectrogram
from training.text import DIGITS, TEENS, TENS
from voxlite.engine.config import AudioConfig

Rng = np.random.Generator
T = TypeVar("T")

# How often each kind of segment is tried.
SEGMENT_WEIGHTS = {
    "digit": 0.27,
    "order": 0.20,
    "sentence": 0.07,
    "prompt": 0.06,
    "synthetic-digit": 0.24,
    "synthetic-digits": 0.15,
    "synthetic-numbers": 0.03,
    "synthetic-order": 0.09,
    "synthetic-sentence": 0.04,
    "sound": 0.04,
}
STRING_KINDS = ("digit", "synthetic-digit")
NUMBER_WORDS = frozenset((*DIGITS, *TEENS, *TENS))
SPEECH_RMS = 0.06
MIN_SPAN_S = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Source samples with the words in them (times in the source) and how to warp them."""

    samples: Samples
    words: tuple[Word, ...]
    tempo: float = 1.0
    warp: Warp = NO_WARP


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """A composed utterance: the model's input and the words with their times after warping."""

    log_mel: Spectrogram  # (mel frames, mels), left and right padding included
    words: tuple[Word, ...]


class Composer:
    """Draws utterances from clip banks; one generator, no other state."""

    def __init__(self, audio: AudioConfig, banks: Sequence[ClipBank], rng: Rng) -> None:
        self._audio = audio
        self._rng = rng
        self._spectrogram = WarpedSpectrogram(audio)
        self._clips: dict[str, list[tuple[ClipBank, Clip]]] = defaultdict(list)
        # Clips of a single word, by kind and voice: strings of words are put together from them.
        self._single_words: dict[str, dict[str, list[tuple[ClipBank, Clip]]]] = {
            kind: defaultdict(list) for kind in STRING_KINDS
        }
        self._room_noise: list[Samples] = []
        for bank in banks:
            for clip in bank:
                if clip.split != "train":
                    continue
                if clip.kind in STRING_KINDS:
                    self._single_words[clip.kind][clip.voice].append((bank, clip))
                elif len(clip.words) == 1 and clip.kind == "prompt":
                    # A voice that says more than numbers is asked for its numbers apart.
                    is_number = clip.text in NUMBER_WORDS
                    voice = clip.voice if is_number else f"{clip.voice}, other words"
                    self._single_words["digit"][voice].append((bank, clip))
                else:
                    self._clips[clip.kind].append((bank, clip))
                if clip.kind == "order" and clip.words[0].start_s > 1.0:
                    end = int((clip.words[0].start_s - 0.2) * SAMPLE_RATE)
                    self._room_noise.append(bank.samples(clip)[:end])
        has_clips = {kind for kind, voices in self._single_words.items() if voices}
        has_clips |= {kind for kind, clips in self._clips.items() if clips}
        kinds = [kind for kind in SEGMENT_WEIGHTS if kind in has_clips or kind == "sound"]
        weights = np.array([SEGMENT_WEIGHTS[kind] for kind in kinds])
        self._kinds, self._kind_weights = kinds, weights / weights.sum()

    def draw(self, num_tokens: int, num_delay_tokens: int) -> Utterance:
        """Compose one utterance of exactly `num_tokens` tokens, paddings included."""
        audio, rng = self._audio, self._rng
        right = audio.num_right_pad_tokens(num_delay_tokens)
        frames_per_token = audio.mel_frames_per_token
        num_left_frames = audio.num_left_pad_tokens * frames_per_token
        num_frames = (num_tokens - right) * frames_per_token
        hop = audio.hop_samples

        pieces: list[Samples] = []
        # Before the first sample frames reach back into the left padding.
        reach = audio.window_samples // hop
        stretches = [
            Stretch(
                first_frame=num_left_frames - reach,
                first_sample=-reach * hop,
                tempo=1.0,
                warp=NO_WARP,
            )
        ]
        words: list[Word] = []
        frame, num_samples = num_left_frames, 0

        def append(segment: Segment) -> bool:
            nonlocal frame, num_samples
            length = int(len(segment.samples) / (hop * segment.tempo))
            if length < 1 or frame + length > num_frames:
                return False
            stretches.append(
                Stretch(
                    first_frame=frame,
                    first_sample=float(num_samples),
                    tempo=segment.tempo,
                    warp=segment.warp,
                )
            )
            offset_s = (frame - num_left_frames) * hop / SAMPLE_RATE
            words.extend(_moved(segment.words, offset_s, segment.tempo))
            pieces.append(segment.samples)
            frame, num_samples = frame + length, num_samples + len(segment.samples)
            return True

        # From the first sample on, anywhere in the first token, or later.
        append(self._gap(rng.choice((0.0, 0.08, 0.3, 1.5), p=(0.2, 0.2, 0.35, 0.25))))
        is_silent = rng.random() < 0.04
        num_refused = 0
        while not is_silent and num_refused < 3:
            if append(self._segment()):
                append(self._gap(rng.choice((0.15, 0.6, 2.5), p=(0.3, 0.55, 0.15))))
            else:
                num_refused += 1
        append(self._silence((num_frames - frame) * hop / SAMPLE_RATE))

        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        # Right padding: digital silence after the last sample.
        stretches.append(
            Stretch(first_frame=frame, first_sample=float(num_samples), tempo=1.0, warp=NO_WARP)
        )
        samples = self._recorded(samples)
        power = self._spectrogram.power(samples, num_tokens * frames_per_token, stretches)
        spoken = slice(num_left_frames, frame)
        power[spoken] *= self._channel(power.shape[1])
        log_mel = self._spectrogram.log_mel(power, stretches)
        self._mask(log_mel[spoken], float(log_mel[0, 0]))
        return Utterance(log_mel=log_mel, words=tuple(words))

    # What is said

    def _segment(self) -> Segment:
        kind = self._rng.choice(self._kinds, p=self._kind_weights)
        if kind in STRING_KINDS:
            return self._voiced(*self._word_string(list(self._single_words[kind].values())))
        if kind == "sound":
            return self._sound()
        bank, clip = self._pick(self._clips[kind])
        return self._voiced(*self._span(bank.samples(clip), clip.words))

    def _word_string(self, voices: list[list[tuple[ClipBank, Clip]]]) -> tuple[Samples, list[Word]]:
        """String single words of one voice together, with gaps from none to long."""
        rng = self._rng
        # The square root: a voice with 450 clips is not drawn 20 times as often as one with 20.
        weights = np.sqrt([len(clips) for clips in voices])
        clips = voices[rng.choice(len(voices), p=weights / weights.sum())]
        parts: list[Samples] = []
        words: list[Word] = []
        num_samples = 0
        longest_gap_s = rng.choice((0.03, 0.15, 0.4, 1.0), p=(0.2, 0.35, 0.35, 0.1))
        for _ in range(rng.integers(1, 9)):
            bank, clip = self._pick(clips)
            part = bank.samples(clip) * rng.uniform(0.7, 1.3)
            words += _moved(clip.words, num_samples / SAMPLE_RATE, 1.0)
            gap = np.zeros(int(rng.uniform(0, longest_gap_s) * SAMPLE_RATE), np.float32)
            parts += [part, gap]
            num_samples += len(part) + len(gap)
        return np.concatenate(parts), words

    def _span(self, samples: Samples, words: Sequence[Word]) -> tuple[Samples, list[Word]]:
        """Cut a clip to its words, or at times to some of them, with a little room around."""
        rng = self._rng
        first, last = 0, len(words) - 1
        if rng.random() < 0.25:
            first, last = np.sort(rng.integers(0, len(words), size=2))
        # A cut in the middle of the speech leaves no room for the neighbours' sounds.
        before = rng.uniform(0.0, 0.5) if first == 0 else 0.0
        after = rng.uniform(0.05, 0.5) if last == len(words) - 1 else 0.0
        start = max(0, int((words[first].start_s - before) * SAMPLE_RATE))
        end = int((words[last].end_s + after) * SAMPLE_RATE)
        end = max(end, start + int(MIN_SPAN_S * SAMPLE_RATE))
        return samples[start:end], _moved(words[first : last + 1], -start / SAMPLE_RATE, 1.0)

    def _voiced(self, samples: Samples, words: Sequence[Word]) -> Segment:
        """Give the speech another voice: pitch, formants, tempo, level."""
        rng = self._rng
        samples = unit_rms(samples) * np.float32(SPEECH_RMS * np.exp(rng.normal(0, 0.25)))
        if rng.random() < 0.12:
            return Segment(samples=samples, words=tuple(words))
        wide = rng.random() < 0.45
        pitch = np.exp(rng.uniform(np.log(0.75), np.log(1.6)) if wide else rng.normal(0, 0.12))
        formants = np.exp(np.clip(rng.normal(0, 0.13), -0.28, 0.28))
        accent = np.exp(rng.normal(0, 0.07, len(NO_WARP)))
        rate = np.exp(np.clip(rng.normal(0, 0.15), -0.3, 0.3))
        grid = np.arange(0, len(samples) - 1, pitch)
        resampled = np.interp(grid, np.arange(len(samples)), samples).astype(np.float32)
        # Segments begin on a mel frame; what is said in them may begin anywhere in it.
        shift = np.zeros(rng.integers(self._audio.hop_samples), np.float32)
        return Segment(
            samples=np.concatenate([shift, resampled]),
            words=tuple(_moved(_moved(words, 0.0, pitch), len(shift) / SAMPLE_RATE, 1.0)),
            tempo=float(rate / pitch),
            warp=tuple((formants / pitch * accent).tolist()),
        )

    def _sound(self) -> Segment:
        rng = self._rng
        make = SOUNDS[rng.integers(len(SOUNDS))]
        samples = make(int(rng.uniform(0.3, 4.0) * SAMPLE_RATE), rng)
        level = np.float32(SPEECH_RMS * np.exp(rng.normal(-1, 1)))
        return Segment(samples=samples * level, words=())

    def _gap(self, longest_s: float) -> Segment:
        return self._silence(self._rng.uniform(0, longest_s))

    @staticmethod
    def _silence(seconds: float) -> Segment:
        return Segment(samples=np.zeros(round(seconds * SAMPLE_RATE), np.float32), words=())

    # How it is recorded

    def _recorded(self, samples: Samples) -> Samples:
        """Add room, noise and level."""
        rng = self._rng
        if not len(samples):
            return samples
        if rng.random() < 0.25:
            samples = self._reverberated(samples)
        if rng.random() < 0.75:
            noise = self._noise(len(samples))
            samples = samples + noise * np.float32(SPEECH_RMS * 10 ** (-rng.uniform(5, 50) / 20))
        if rng.random() < 0.5:
            samples = samples * np.float32(np.exp(rng.uniform(np.log(0.02), np.log(5))))
        else:
            samples = samples * np.float32(np.exp(rng.normal(0, 0.5)))
        return np.clip(samples, -1, 1)

    def _reverberated(self, samples: Samples) -> Samples:
        rng = self._rng
        decay_s = rng.uniform(0.02, 0.15)
        time = np.arange(int(4 * decay_s * SAMPLE_RATE)) / SAMPLE_RATE
        tail = rng.standard_normal(len(time)) * np.exp(-time / decay_s)
        response = unit_rms(tail.astype(np.float32)) / np.sqrt(len(time)) * rng.uniform(0.1, 0.9)
        response[0] = 1.0
        wet: Samples = oaconvolve(samples, response.astype(np.float32))[: len(samples)]
        return wet.astype(np.float32)

    def _noise(self, num_samples: int) -> Samples:
        """Return unit noise: coloured, cut from a real room, or people talking over each other."""
        rng = self._rng
        kind = rng.choice(("colored", "room", "babble"), p=(0.45, 0.4, 0.15))
        if kind == "room" and self._room_noise:
            return unit_rms(np.resize(self._pick(self._room_noise), num_samples))
        if kind == "babble" and self._clips["sentence"]:
            total = np.zeros(num_samples, np.float32)
            for _ in range(6):
                bank, clip = self._pick(self._clips["sentence"])
                total += np.roll(
                    np.resize(unit_rms(bank.samples(clip)), num_samples),
                    rng.integers(num_samples),
                )
            return unit_rms(total)
        return colored_noise(num_samples, rng)

    def _channel(self, num_bins: int) -> Spectrogram:
        """Return the microphone's and line's power response at each bin."""
        rng = self._rng
        gain_db = np.zeros(num_bins)
        if rng.random() < 0.6:
            # Knots spaced evenly in the logarithm of frequency, as hearing is.
            knots = np.geomspace(1, num_bins, 7) - 1
            gain_db += np.interp(np.arange(num_bins), knots, rng.normal(0, 4, 7))
        hz = np.linspace(0, SAMPLE_RATE / 2, num_bins)
        if rng.random() < 0.5:
            # A telephone's 4 kHz most often.
            cutoff = rng.uniform(3300, 4200) if rng.random() < 0.5 else rng.uniform(3000, 6500)
            gain_db -= np.clip((hz - cutoff) / 200, 0, 1) * rng.uniform(20, 70)
        if rng.random() < 0.3:
            cutoff = rng.uniform(100, 350)
            gain_db -= np.clip((cutoff - hz) / 80, 0, 1) * rng.uniform(10, 40)
        return (10 ** (gain_db / 10)).astype(np.float32)

    def _mask(self, log_mel: Spectrogram, floor: float) -> None:
        """Blank a few short stretches of time and bands of frequency, in place."""
        rng = self._rng
        num_frames, num_mels = log_mel.shape
        if rng.random() < 0.5 or num_frames < 50:
            return
        for _ in range(rng.integers(0, 3)):
            width = rng.integers(2, 14)
            first = rng.integers(0, num_mels - width)
            log_mel[:, first : first + width] = floor
        for _ in range(rng.integers(0, 1 + num_frames // 200)):
            length = rng.integers(1, 8)
            first = rng.integers(0, num_frames - length)
            log_mel[first : first + length] = floor

    def _pick(self, items: Sequence[T]) -> T:
        return items[int(self._rng.integers(len(items)))]


def _moved(words: Sequence[Word], offset_s: float, speed: float) -> list[Word]:
    """Return the words played `speed` times as fast and then moved by `offset_s`."""
    return [
        replace(word, start_s=word.start_s / speed + offset_s, end_s=word.end_s / speed + offset_s)
        for word in words
    ]
