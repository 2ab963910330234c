"""Turn the recordings of a data folder into the clip bank `real`.

Reads `digits/`, `orders/`, `sentences/` and `prompts/` (each a `manifest.jsonl` beside its audio),
resamples to 16 kHz, writes the texts by the project's convention, finds word times where the
manifest has none, and marks what may train and what only validates. Which is which depends on the
manifest alone, so it never changes between runs.

    python -m training.prepare_data --data DATA_DIR --out WORK_DIR
"""

import argparse
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from tqdm import tqdm

from training.align import WordAligner
from training.clip_bank import SAMPLE_RATE, ClipBankWriter, Samples, Word
from training.text import normalize

REAL_BANK = "real"

VALIDATION_SPEAKER = "george"
NUM_VALIDATION_TAKES = 5
VALIDATION_CLUSTER_REMAINDER = 2
CLUSTER_MODULUS = 5
VALIDATION_SENTENCE_MODULUS = 20
VALIDATION_PROMPT_MODULUS = 15

_SENTENCE_ID = re.compile(r"arctic_([ab])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One entry of a manifest, with its split decided."""

    path: Path
    kind: str
    voice: str
    split: str
    text: str
    words: tuple[Word, ...] | None


def load_audio(path: Path) -> Samples:
    """Read an audio file as mono float32 at 16 kHz."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    if rate != SAMPLE_RATE:
        mono = soxr.resample(mono, rate, SAMPLE_RATE)
    return np.ascontiguousarray(mono, dtype=np.float32)


def is_validation(kind: str, row: dict[str, Any]) -> bool:
    """Say whether a manifest row may only validate.

    Digits: all of one speaker, and the first takes of the others. Orders: whole clusters, so that
    their speakers are new. Sentences: whole sentence numbers, so that their words are new. Prompts:
    by a checksum of the file name.
    """
    if kind == "digit":
        is_new_speaker = row["speaker"] == VALIDATION_SPEAKER
        return bool(is_new_speaker or row["take"] < NUM_VALIDATION_TAKES)
    if kind == "order":
        return bool(row["cluster"] % CLUSTER_MODULUS == VALIDATION_CLUSTER_REMAINDER)
    if kind == "sentence":
        match = _SENTENCE_ID.search(row["audio"])
        return match is not None and int(match.group(2)) % VALIDATION_SENTENCE_MODULUS == 0
    return zlib.crc32(row["audio"].encode()) % VALIDATION_PROMPT_MODULUS == 0


def read_manifest(folder: Path, kind: str) -> Iterator[Recording]:
    """Yield the recordings of one folder of the data."""
    with (folder / "manifest.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            text = normalize(row["text"])
            words: tuple[Word, ...] | None = None
            if kind == "digit":
                words = (Word(text=text, start_s=0.0, end_s=row["dur"]),)
                voice = f"digits-{row['speaker']}"
            elif kind == "order":
                voice = f"orders-{row['cluster']}"
            else:
                voice = f"{kind}s"
            if row.get("words"):
                words = tuple(
                    Word(text=word, start_s=start, end_s=end) for word, start, end in row["words"]
                )
                text = " ".join(word.text for word in words)
            split = "valid" if is_validation(kind, row) else "train"
            yield Recording(
                path=folder / row["audio"],
                kind=kind,
                voice=voice,
                split=split,
                text=text,
                words=words,
            )


def main() -> None:
    """Parse the command line and build the bank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the recordings")
    parser.add_argument("--out", type=Path, required=True, help="working folder for the banks")
    args = parser.parse_args()

    kinds = {"digits": "digit", "orders": "order", "sentences": "sentence", "prompts": "prompt"}
    recordings = [
        recording
        for folder, kind in kinds.items()
        for recording in read_manifest(args.data / folder, kind)
    ]
    aligner = WordAligner()
    num_unaligned = 0
    with ClipBankWriter(args.out, REAL_BANK) as bank:
        for recording in tqdm(recordings, desc="recordings", unit="clip"):
            samples = load_audio(recording.path)
            words = recording.words or aligner.align(samples, recording.text)
            if not words:
                num_unaligned += 1
                continue
            bank.add(
                samples,
                kind=recording.kind,
                voice=recording.voice,
                split=recording.split,
                words=words,
            )
    print(f"{len(recordings) - num_unaligned} clips, {num_unaligned} left out (not aligned)")


if __name__ == "__main__":
    main()
