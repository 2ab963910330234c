"""Batches of composed utterances with everything the losses need, made in worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.clip_bank import ClipBank, Word
from training.compose import Composer
from training.lexicon import Lexicon
from training.targets import target_ids
from voxlite.engine.config import LEGAL_DELAYS_MS, AudioConfig

IntArray = npt.NDArray[np.int64]

NUM_SPECIAL_TOKENS = 1000
IGNORED = -100
DEFAULT_DELAY_SHARE = 0.4
# The encoder is causal: it can name a sound or a word only some time after it began.
SOUND_LAG_S = 0.08
WORD_LAG_S = 0.16
# Share of text tokens that are replaced at random in the decoder's input, so that one wrong word
# in its own output does not lead it astray.
CORRUPTED_SHARE = 0.08
LENGTH_STEP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B utterances of T tokens."""

    log_mel: Tensor  # (B, mels, 8 T) float32
    input_ids: Tensor  # (B, T) what the decoder reads, in part corrupted
    target_ids: Tensor  # (B, T) the token at each position
    num_delay_tokens: Tensor  # (B,)
    word_labels: Tensor  # (B, T) id of the word being spoken, 0 for none
    sound_labels: Tensor  # (B, 4 T) id of the sound being spoken, IGNORED where not known

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def encode_word(tokenizer: Tekkenizer, word: str) -> list[int]:
    """Return the ids of a word as it stands in a transcript, with its leading space."""
    return tokenizer.encode(f" {word}", bos=False, eos=False)


class UtteranceStream(IterableDataset[Batch]):
    """An endless stream of batches; worker w of n draws from a generator of its own."""

    def __init__(
        self,
        *,
        audio: AudioConfig,
        bank_directory: Path,
        bank_names: Sequence[str],
        tekken: Path,
        dictionary: Path,
        tokens_per_batch: int,
        utterance_tokens: tuple[int, int],
        seed: tuple[int, ...],
    ) -> None:
        """Args:
        tokens_per_batch: about how many positions a batch holds.
        utterance_tokens: shortest and longest utterance, in tokens.
        """
        self._audio = audio
        self._bank_directory = bank_directory
        self._bank_names = bank_names
        self._tekken = tekken
        self._dictionary = dictionary
        self._tokens_per_batch = tokens_per_batch
        self._utterance_tokens = utterance_tokens
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = np.random.default_rng((*self._seed, worker.id if worker else 0))
        banks = [ClipBank.open(self._bank_directory, name) for name in self._bank_names]
        composer = Composer(self._audio, banks, rng)
        self._tokenizer = Tekkenizer.from_file(self._tekken)
        self._lexicon = Lexicon(self._dictionary)
        while True:
            # Few different lengths: kernels and memory of one shape are used again and again.
            shortest, longest = self._utterance_tokens
            num_tokens = int(rng.choice(np.arange(shortest, longest + 1, LENGTH_STEP)))
            num_utterances = max(1, round(self._tokens_per_batch / num_tokens))
            yield self._batch(composer, rng, num_utterances, num_tokens)

    def _batch(
        self, composer: Composer, rng: np.random.Generator, num_utterances: int, num_tokens: int
    ) -> Batch:
        rows = []
        for _ in range(num_utterances):
            delay = self._draw_delay(rng)
            utterance = composer.draw(num_tokens, delay)
            targets = np.array(
                target_ids(self._audio, utterance.words, delay, num_tokens, self._encode_word)
            )
            inputs = targets.copy()
            corrupted = (inputs >= NUM_SPECIAL_TOKENS) & (rng.random(num_tokens) < CORRUPTED_SHARE)
            if corrupted.any():
                text = targets[targets >= NUM_SPECIAL_TOKENS]
                inputs[corrupted] = rng.choice(text, corrupted.sum())
            rows.append(
                (
                    utterance.log_mel.T,
                    inputs,
                    targets,
                    delay,
                    self._word_labels(utterance.words, num_tokens),
                    self._sound_labels(utterance.words, num_tokens),
                )
            )
        columns = (
            torch.from_numpy(np.stack([np.asarray(value) for value in column]))
            for column in zip(*rows, strict=True)
        )
        names = (field.name for field in fields(Batch))
        return Batch(**dict(zip(names, columns, strict=True)))

    def _draw_delay(self, rng: np.random.Generator) -> int:
        is_default = rng.random() < DEFAULT_DELAY_SHARE
        delay_ms = self._audio.default_delay_ms if is_default else rng.choice(LEGAL_DELAYS_MS)
        return self._audio.num_delay_tokens(int(delay_ms))

    def _encode_word(self, word: str) -> list[int]:
        return encode_word(self._tokenizer, word)

    def _word_labels(self, words: Sequence[Word], num_tokens: int) -> IntArray:
        labels = np.zeros(num_tokens, dtype=np.int64)
        token_s = self._audio.token_s
        for word in words:
            first, end = (
                int((time_s + WORD_LAG_S) / token_s + 0.5) + self._audio.num_left_pad_tokens
                for time_s in (word.start_s, word.end_s)
            )
            labels[first : max(end, first + 1)] = (
                1 + self._encode_word(word.text)[0] - NUM_SPECIAL_TOKENS
            )
        return labels

    def _sound_labels(self, words: Sequence[Word], num_tokens: int) -> IntArray:
        frames_per_token = self._audio.mel_frames_per_token // 2
        labels = np.zeros(num_tokens * frames_per_token, dtype=np.int64)
        frame_s = self._audio.token_s / frames_per_token
        offset = self._audio.num_left_pad_tokens * frames_per_token
        for word in words:
            start_s, duration_s = word.start_s + SOUND_LAG_S, word.end_s - word.start_s
            sounds = self._lexicon.sounds(word.text) or [(IGNORED, 1.0)]
            for sound, share in sounds:
                end_s = start_s + share * duration_s
                first, end = (offset + round(time_s / frame_s) for time_s in (start_s, end_s))
                labels[first:end] = sound
                start_s = end_s
        return labels


def batches(stream: UtteranceStream, num_workers: int) -> Iterator[Batch]:
    """Iterate over a stream's batches, made ahead by `num_workers` processes."""
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        persistent_workers=bool(num_workers),
    )
    return iter(loader)
