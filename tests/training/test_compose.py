"""Composed utterances must keep words where their sound is, through every change of the voice."""

from pathlib import Path

import numpy as np
import pytest
import torch

from training.clip_bank import SAMPLE_RATE, ClipBank, ClipBankWriter, Word
from training.compose import Composer
from training.spectrogram import NO_WARP, Stretch, WarpedSpectrogram, mel_filters
from voxlite.engine.audio.log_mel import LogMel
from voxlite.engine.config import AudioConfig

AUDIO = AudioConfig()
FRAMES_PER_SECOND = SAMPLE_RATE / AUDIO.hop_samples
NUM_LEFT_FRAMES = AUDIO.num_left_pad_tokens * AUDIO.mel_frames_per_token


@pytest.fixture
def bank(tmp_path: Path) -> ClipBank:
    """Clips of one word each: a loud buzz of 0.3 s in 0.5 s of silence."""
    time = np.arange(int(0.5 * SAMPLE_RATE)) / SAMPLE_RATE
    buzz = 0.5 * np.sign(np.sin(2 * np.pi * 150 * time)) * ((time >= 0.1) & (time < 0.4))
    with ClipBankWriter(tmp_path, "bank") as writer:
        for _ in range(3):
            writer.add(
                buzz.astype(np.float32),
                kind="digit",
                voice="buzzer",
                split="train",
                words=[Word(text="one", start_s=0.1, end_s=0.4)],
            )
        writer.add(np.zeros(100, np.float32), kind="digit", voice="mute", split="valid", words=[])
    return ClipBank.open(tmp_path, "bank")


def test_a_bank_gives_back_what_was_written(bank: ClipBank) -> None:
    assert [clip.split for clip in bank] == ["train", "train", "train", "valid"]
    clip = bank.clips[1]
    assert clip.text == "one"
    assert clip.duration_s == 0.5
    assert np.abs(bank.samples(clip)).max() == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(6))
def test_words_are_where_their_sound_is(bank: ClipBank, seed: int) -> None:
    composer = Composer(AUDIO, [bank], np.random.default_rng(seed))
    for _ in range(5):
        utterance = composer.draw(num_tokens=150, num_delay_tokens=6)
        assert utterance.log_mel.shape == (150 * AUDIO.mel_frames_per_token, AUDIO.num_mel_bins)
        loudness = utterance.log_mel[:, :64].mean(axis=1)
        for word in utterance.words:
            assert word.end_s - word.start_s > 0.1
            first = NUM_LEFT_FRAMES + round(word.start_s * FRAMES_PER_SECOND)
            end = NUM_LEFT_FRAMES + round(word.end_s * FRAMES_PER_SECOND)
            inside = np.median(loudness[first + 2 : end - 2])
            assert inside >= np.median(loudness[max(0, first - 8) : first - 2]) - 0.05


def test_the_same_seed_gives_the_same_utterance(bank: ClipBank) -> None:
    first, second = (
        Composer(AUDIO, [bank], np.random.default_rng(1)).draw(120, 6) for _ in range(2)
    )
    assert np.array_equal(first.log_mel, second.log_mel)
    assert first.words == second.words


def test_without_warps_the_spectrogram_is_the_engines() -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, 30 * 1280).astype(np.float32)
    stretches = [Stretch(first_frame=0, first_sample=0.0, tempo=1.0, warp=NO_WARP)]
    spectrogram = WarpedSpectrogram(AUDIO)
    ours = spectrogram.log_mel(spectrogram.power(samples, 240, stretches), stretches)
    half = AUDIO.window_samples // 2
    padded = np.pad(samples, (half, AUDIO.look_ahead_samples))
    spans = np.lib.stride_tricks.sliding_window_view(padded, 1280 + half + 40)[::1280]
    theirs = LogMel(AUDIO)(np.ascontiguousarray(spans)).flatten(0, 1)
    torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("warp", [0.8, 1.25])
def test_a_warp_moves_a_tone_by_its_factor(warp: float) -> None:
    hz = 1000
    at = hz * AUDIO.window_samples // SAMPLE_RATE
    heard = int(mel_filters(AUDIO, (warp,) * len(NO_WARP))[at].argmax())
    expected = int(mel_filters(AUDIO)[round(at * warp)].argmax())
    assert abs(heard - expected) <= 1
