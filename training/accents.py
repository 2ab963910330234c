"""Speak single digits with the sounds of other languages into the clip bank `synthetic-accents`.

    python -m training.accents --out WORK_DIR/banks

English vowels differ more between accents than between throats: the vowel of "two" may lie anywhere
between the back of the mouth and the front, and no change of pitch or formants turns one into the
other. espeak-ng reads English digits, given as sounds, with the phonemes of many languages, so that
the recorded speakers' accents are not the only ones heard in training.
"""

import argparse
import random
import subprocess
import tempfile
from pathlib import Path

from tqdm import tqdm

from training.clip_bank import SAMPLE_RATE, ClipBankWriter, Word
from training.prepare_data import load_audio
from training.synthesize import Espeak, trimmed

LANGUAGES = "de it es nl sv fr pt-br cs el ro hi ru tr fi id en-029 en-gb-x-gbclan".split()
# Each digit as espeak-ng phonemes; where there is a choice, a voice makes it once.
SOUNDS = {
    "zero": ("z'i:ro:", "z'e:ro:", "z'iro"),
    "one": ("w'an", "w'On", "w'an"),
    "two": ("t'u:", "t'u:", "tu"),
    "three": ("tr'i:", "tr'i:", "sr'i:"),
    "four": ("f'o:r", "f'o:", "f'Or"),
    "five": ("f'aIv", "f'aIv", "f'a:v"),
    "six": ("s'iks", "s'Iks", "s'iks"),
    "seven": ("s'even", "s'evn", "s'even"),
    "eight": ("'eIt", "'e:t", "'eIt"),
    "nine": ("n'aIn", "n'aIn", "n'a:n"),
}


def main() -> None:
    """Parse the command line and fill the bank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the banks")
    parser.add_argument("--voices", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ClipBankWriter(args.out, "synthetic-accents") as bank,
    ):
        wav = Path(scratch) / "digit.wav"
        for index in tqdm(range(args.voices), desc="accents", unit="voice"):
            voice = f"{rng.choice(LANGUAGES)}+{rng.choice(Espeak.VARIANTS)}"
            speed, pitch = rng.randint(120, 220), rng.randint(15, 80)
            for digit, choices in SOUNDS.items():
                command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch)]
                command += ["-w", str(wav), f"[[{rng.choice(choices)}]]"]
                subprocess.run(command, check=True, capture_output=True)
                samples = trimmed(load_audio(wav))
                bank.add(
                    samples,
                    kind="synthetic-digit",
                    voice=f"accent-{index}-{voice}",
                    split="train",
                    words=[Word(text=digit, start_s=0.0, end_s=len(samples) / SAMPLE_RATE)],
                )


if __name__ == "__main__":
    main()
