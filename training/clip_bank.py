"""A clip bank: many short recordings with word times in two flat files, cheap to sample from.

`NAME.pcm` holds the samples of all clips one after the other (int16, 16 kHz, mono); `NAME.jsonl`
holds one object a clip: where it lies in the samples, who speaks, what kind of speech it is,
whether it may train, and its words with times. The bank knows nothing of augmentation or targets.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TextIO

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000
PCM_SCALE = 32_768.0

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One spoken word and when it was spoken, in seconds from the start of its clip."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One recording of a bank: its place in the samples and what is said in it.

    `kind` groups clips that are drawn and evaluated alike ("digit", "order", "sentence", ...),
    `voice` names who or what speaks, and `split` is "train" or "valid".
    """

    first_sample: int
    num_samples: int
    kind: str
    voice: str
    split: str
    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """The words joined by spaces."""
        return " ".join(word.text for word in self.words)

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.num_samples / SAMPLE_RATE


class ClipBank:
    """Read access to a bank; the samples stay on disk and are mapped into memory."""

    def __init__(self, clips: Sequence[Clip], pcm: npt.NDArray[np.int16]) -> None:
        self.clips = list(clips)
        self._pcm = pcm

    @classmethod
    def open(cls, directory: Path, name: str) -> Self:
        """Open the bank `name` of `directory`."""
        clips = []
        with (directory / f"{name}.jsonl").open() as lines:
            for line in lines:
                row = json.loads(line)
                row["words"] = tuple(Word(**word) for word in row["words"])
                clips.append(Clip(**row))
        pcm = np.memmap(directory / f"{name}.pcm", dtype=np.int16, mode="r")
        return cls(clips, pcm)

    def samples(self, clip: Clip) -> Samples:
        """Return the clip's samples, -1 to 1."""
        end = clip.first_sample + clip.num_samples
        return self._pcm[clip.first_sample : end].astype(np.float32) / PCM_SCALE

    def __iter__(self) -> Iterator[Clip]:
        return iter(self.clips)

    def __len__(self) -> int:
        return len(self.clips)


class ClipBankWriter:
    """Writes a bank clip by clip; use it as a context manager."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._pcm: BinaryIO = (directory / f"{name}.pcm").open("wb")
        self._index: TextIO = (directory / f"{name}.jsonl").open("w")
        self._num_samples = 0

    def add(
        self, samples: Samples, *, kind: str, voice: str, split: str, words: Sequence[Word]
    ) -> None:
        """Append one clip; samples beyond -1 to 1 are clipped."""
        pcm = np.clip(np.rint(samples * PCM_SCALE), -PCM_SCALE, PCM_SCALE - 1).astype(np.int16)
        clip = Clip(
            first_sample=self._num_samples,
            num_samples=len(pcm),
            kind=kind,
            voice=voice,
            split=split,
            words=tuple(words),
        )
        self._pcm.write(pcm.tobytes())
        self._index.write(json.dumps(asdict(clip)) + "\n")
        self._num_samples += len(pcm)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pcm.close()
        self._index.close()
