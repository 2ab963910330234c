"""Write the evaluation sets as manifests: one JSON object a line, `audio`, `text` and `set`.

    python -m training.manifests --banks WORK_DIR/banks --out WORK_DIR/evaluation

Everything in them is held out from training. Digit strings are put together from single digits and
saved as WAV; so are the other clips, so that the folder can be moved. The same seed gives the same
sets. `all.jsonl` holds all of them but the robustness sets, which are in `robustness.jsonl`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

from training.clip_bank import SAMPLE_RATE, Clip, ClipBank, Samples
from training.noise import colored_noise, sweep
from training.prepare_data import REAL_BANK, VALIDATION_SPEAKER

NUM_DIGIT_STRINGS = 80
NUM_SYNTHETIC = 60
ROBUSTNESS_S = 300
NOISE_DBFS = -50
SWEEP_LEVEL = 0.1
SWEEP_S = 10


class Item(NamedTuple):
    """One clip to transcribe, its reference text and the set it belongs to."""

    samples: Samples
    text: str
    set_name: str


def digit_strings(
    bank: ClipBank, set_name: str, voices: dict[str, list[Clip]], rng: np.random.Generator
) -> Iterator[Item]:
    """Yield strings of 3 to 8 digits of one voice each, 30 to 400 ms apart, in a faint noise."""
    for _ in range(NUM_DIGIT_STRINGS):
        clips = voices[list(voices)[rng.integers(len(voices))]]
        chosen = [clips[rng.integers(len(clips))] for _ in range(rng.integers(3, 9))]
        parts = [_silence(rng.uniform(0.0, 0.5))]
        for clip in chosen:
            parts += [bank.samples(clip), _silence(rng.uniform(0.03, 0.4))]
        samples = np.concatenate(parts)
        samples += 3e-4 * colored_noise(len(samples), rng)
        yield Item(samples, " ".join(clip.text for clip in chosen), set_name)


def items(banks: dict[str, ClipBank], rng: np.random.Generator) -> Iterator[Item]:
    """Yield the held-out clips of all sets."""
    real = banks[REAL_BANK]
    digits: dict[str, list[Clip]] = {}
    for clip in real:
        if clip.kind == "digit" and clip.split == "valid":
            digits.setdefault(clip.voice, []).append(clip)
    unseen = {f"digits-{VALIDATION_SPEAKER}": digits.pop(f"digits-{VALIDATION_SPEAKER}")}
    yield from digit_strings(real, "digits, unseen speaker", unseen, rng)
    yield from digit_strings(real, "digits, new takes", digits, rng)
    for clip in real:
        if clip.kind != "digit" and clip.split == "valid":
            yield Item(real.samples(clip), clip.text, f"{clip.kind}s")
    for name, bank in banks.items():
        if name == REAL_BANK:
            continue
        for kind in ("digits", "order"):
            held_out = [c for c in bank if c.split == "valid" and c.kind == f"synthetic-{kind}"]
            for clip in held_out[: NUM_SYNTHETIC // len(banks)]:
                yield Item(bank.samples(clip), clip.text, f"synthetic {kind}")


def robustness(rng: np.random.Generator) -> Iterator[Item]:
    """Yield five minutes each of silence, noise and sweeps: nothing is said in them."""
    num_samples = ROBUSTNESS_S * SAMPLE_RATE
    yield Item(_silence(ROBUSTNESS_S), "", "silence")
    noise = rng.standard_normal(num_samples).astype(np.float32) * 10 ** (NOISE_DBFS / 20)
    yield Item(noise, "", "noise")
    sweeps = [sweep(SWEEP_S * SAMPLE_RATE, rng) for _ in range(ROBUSTNESS_S // SWEEP_S)]
    yield Item(SWEEP_LEVEL * np.concatenate(sweeps), "", "sweep")


def write(directory: Path, name: str, all_items: Iterator[Item]) -> int:
    """Write a manifest and its audio; return the number of clips."""
    audio = directory / name
    audio.mkdir(parents=True, exist_ok=True)
    count = 0
    with (directory / f"{name}.jsonl").open("w") as manifest:
        for count, item in enumerate(all_items, start=1):
            path = audio / f"{count:04d}.wav"
            soundfile.write(path, np.clip(item.samples, -1, 1), SAMPLE_RATE, subtype="PCM_16")
            row = {"audio": f"{name}/{path.name}", "text": item.text, "set": item.set_name}
            manifest.write(json.dumps(row) + "\n")
    return count


def _silence(seconds: float) -> Samples:
    return np.zeros(int(seconds * SAMPLE_RATE), dtype=np.float32)


def main() -> None:
    """Parse the command line and write the manifests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--banks", type=Path, required=True, help="folder with the clip banks")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    names = sorted(path.stem for path in args.banks.glob("*.pcm"))
    banks = {name: ClipBank.open(args.banks, name) for name in names}
    num_clips = write(args.out, "all", items(banks, np.random.default_rng(args.seed)))
    write(args.out, "robustness", robustness(np.random.default_rng(args.seed)))
    print(f"{num_clips} clips")


if __name__ == "__main__":
    main()
