"""Speak random phrases with free synthesisers into one clip bank each.

    python -m training.synthesize --data DATA_DIR --out WORK_DIR --engine flite --hours 1.5

Engines: `flite`, `espeak` (the espeak-ng program), `festival` and `kokoro` (its folder of voices,
given with --kokoro-voices). Every utterance draws its voice, speed and pitch anew. Word times come
from forced alignment for all of them alike; what cannot be aligned is left out, which also drops
the voices that can't be understood.
"""

import argparse
import random
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from training.align import WordAligner
from training.clip_bank import SAMPLE_RATE, ClipBank, ClipBankWriter, Samples, Word
from training.phrases import OrderGrammar, draw_digits, draw_numbers, shuffled_digits
from training.prepare_data import REAL_BANK, load_audio

NUM_PER_BATCH = 40
PAD_S = 0.1
VALIDATION_SHARE = 0.02
PHRASE_WEIGHTS = {"digits": 45, "numbers": 12, "order": 28, "sentence": 15}
# Each phrase is another voice, and digits are what too few people say in the recordings.
KOKORO_PHRASE_WEIGHTS = {"all digits": 70, "numbers": 10, "order": 20}
# Between two words there is a pause where the level falls below this share of the loudest.
PAUSE_SHARE = 0.04
PAUSE_REACH_S = 0.15
SPOKEN_SHARE = 0.2
LEVEL_S = 0.02
TRIM_SHARE = 0.03
TRIM_MARGIN_S = 0.02


def trimmed(samples: Samples) -> Samples:
    """Cut the silence before and after a word, by its share of the loudest sample."""
    is_loud = np.flatnonzero(np.abs(samples) > TRIM_SHARE * np.abs(samples).max())
    margin = int(TRIM_MARGIN_S * SAMPLE_RATE)
    return samples[max(0, is_loud[0] - margin) : is_loud[-1] + margin]


def cut_words(samples: Samples, words: Sequence[Word]) -> Iterator[tuple[str, Samples]]:
    """Yield the words that stand apart from their neighbours, each trimmed to its sound.

    The aligner leaves no silence between words, so pauses are looked for around its boundaries.
    """
    window = int(LEVEL_S * SAMPLE_RATE)
    level = np.sqrt(np.convolve(samples**2, np.full(window, 1 / window), mode="same"))
    reach = int(PAUSE_REACH_S * SAMPLE_RATE)
    pauses: list[int | None] = [0]
    for word in words[:-1]:
        first = max(0, int(word.end_s * SAMPLE_RATE) - reach)
        quietest = first + int(np.argmin(level[first : first + 2 * reach]))
        pauses.append(quietest if level[quietest] < PAUSE_SHARE * level.max() else None)
    pauses.append(len(samples))
    for word, start, end in zip(words, pauses, pauses[1:], strict=False):
        if start is None or end is None:
            continue
        # A boundary in the wrong pause leaves a word without sound, or a bit of one.
        if end - start > reach and level[start:end].max() > SPOKEN_SHARE * level.max():
            yield word.text, trimmed(samples[start:end])


class Synthesizer(ABC):
    """Speaks phrases, each with a voice of its own choice."""

    @abstractmethod
    def speak(
        self, phrases: list[str], rng: random.Random, scratch: Path
    ) -> list[tuple[str, Samples]]:
        """Return (voice name, samples at 16 kHz) for every phrase.

        Args:
            phrases: what to say, words separated by spaces.
            rng: draws voice, speed and pitch.
            scratch: an empty folder for temporary files.
        """


class Flite(Synthesizer):
    """The statistical and diphone voices that come with flite."""

    VOICES = ("rms", "slt", "awb", "kal16", "kal")
    WEIGHTS = (4, 4, 4, 1, 1)

    def speak(
        self, phrases: list[str], rng: random.Random, scratch: Path
    ) -> list[tuple[str, Samples]]:
        spoken = []
        for phrase in phrases:
            voice = rng.choices(self.VOICES, self.WEIGHTS)[0]
            wav = scratch / "flite.wav"
            options = {
                "duration_stretch": rng.uniform(0.75, 1.35),
                "int_f0_target_mean": rng.uniform(85, 220),
            }
            command = ["flite", "-voice", voice, "-t", phrase, "-o", str(wav)]
            for name, value in options.items():
                command += ["--setf", f"{name}={value:.2f}"]
            subprocess.run(command, check=True, capture_output=True)
            spoken.append((f"flite-{voice}", load_audio(wav)))
        return spoken


class Espeak(Synthesizer):
    """espeak-ng: a formant synthesiser with many accents and speaker variants."""

    ACCENTS = ("en-us", "en-us", "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc")
    VARIANTS = (
        "Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario "
        "Michael Mike Storm Tweaky adam anika antonio aunty belinda benjamin boris caleb david ed "
        "edward f1 f2 f3 f4 f5 grandma grandpa gustave iven iven2 iven3 john kaukovalta klatt "
        "klatt2 klatt3 klatt4 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel norbert "
        "pablo paul pedro quincy rob robert sandro shelby steph steph2 steph3 travis victor zac"
    ).split()

    def speak(
        self, phrases: list[str], rng: random.Random, scratch: Path
    ) -> list[tuple[str, Samples]]:
        spoken = []
        for phrase in phrases:
            voice = f"{rng.choice(self.ACCENTS)}+{rng.choice(self.VARIANTS)}"
            wav = scratch / "espeak.wav"
            speed, pitch = rng.randint(110, 200), rng.randint(20, 75)
            command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch)]
            command += ["-g", str(rng.choice((0, 0, 2, 6))), "-w", str(wav), phrase]
            subprocess.run(command, check=True, capture_output=True)
            spoken.append((f"espeak-{voice}", load_audio(wav)))
        return spoken


class Festival(Synthesizer):
    """Festival's diphone and HMM voices; it starts slowly, so one process speaks a batch."""

    VOICES = ("cmu_us_slt_arctic_hts", "cmu_us_slt_arctic_hts", "kal_diphone", "ked_diphone")

    def speak(
        self, phrases: list[str], rng: random.Random, scratch: Path
    ) -> list[tuple[str, Samples]]:
        script, voices = [], []
        for index, phrase in enumerate(phrases):
            voice = rng.choice(self.VOICES)
            voices.append(voice)
            script += [
                f"(voice_{voice})",
                f"(Parameter.set 'Duration_Stretch {rng.uniform(0.8, 1.35):.2f})",
                f'(set! utt (utt.synth (Utterance Text "{phrase}")))',
                f'(utt.save.wave utt "{scratch / f"{index}.wav"}" \'riff)',
            ]
        (scratch / "batch.scm").write_text("\n".join(script))
        subprocess.run(
            ["festival", "--batch", str(scratch / "batch.scm")], check=True, capture_output=True
        )
        return [
            (f"festival-{voice}", load_audio(scratch / f"{index}.wav"))
            for index, voice in enumerate(voices)
        ]


class Kokoro(Synthesizer):
    """The neural synthesiser Kokoro-82M: every phrase in a voice of its own."""

    def __init__(self, voices: Path) -> None:
        # Imported here: its packages are needed for this engine alone.
        from training.kokoro import KokoroSpeaker

        self._speaker = KokoroSpeaker(voices)

    def speak(
        self, phrases: list[str], rng: random.Random, scratch: Path
    ) -> list[tuple[str, Samples]]:
        return [self._speaker.speak(phrase, rng) for phrase in phrases]


def main() -> None:
    """Parse the command line and fill one bank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the recordings")
    parser.add_argument("--out", type=Path, required=True, help="working folder for the banks")
    engines = ("flite", "espeak", "festival", "kokoro")
    parser.add_argument("--engine", choices=engines, required=True)
    parser.add_argument("--kokoro-voices", type=Path, help="folder of voices for the engine kokoro")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(f"{args.engine}-{args.seed}")
    engine: Synthesizer
    match args.engine:
        case "flite":
            engine = Flite()
        case "espeak":
            engine = Espeak()
        case "festival":
            engine = Festival()
        case _:
            engine = Kokoro(args.kokoro_voices)
    weights = KOKORO_PHRASE_WEIGHTS if args.engine == "kokoro" else PHRASE_WEIGHTS
    grammar = OrderGrammar(args.data / "orders" / "grammar" / "coffee_maker.yaml")
    sentences = [
        clip.text
        for clip in ClipBank.open(args.out, REAL_BANK)
        if clip.kind in ("sentence", "prompt") and clip.split == "train"
    ]

    def draw_phrase() -> tuple[str, str]:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        match kind:
            case "all digits":
                return "digits", shuffled_digits(rng)
            case "digits":
                return kind, draw_digits(rng)
            case "numbers":
                return kind, draw_numbers(rng)
            case "order":
                return kind, grammar.draw(rng)
            case _:
                return kind, rng.choice(sentences)

    aligner = WordAligner()
    pad = np.zeros(int(PAD_S * SAMPLE_RATE), dtype=np.float32)
    seconds_left = args.hours * 3600
    num_spoken = num_kept = 0
    with (
        ClipBankWriter(args.out, f"synthetic-{args.engine}") as bank,
        tqdm(total=round(seconds_left), desc=args.engine, unit="s") as progress,
    ):
        while seconds_left > 0:
            drawn = [draw_phrase() for _ in range(NUM_PER_BATCH)]
            with tempfile.TemporaryDirectory() as scratch:
                spoken = engine.speak([text for _, text in drawn], rng, Path(scratch))
            for (kind, text), (voice, speech) in zip(drawn, spoken, strict=True):
                samples = np.concatenate([pad, speech, pad])
                words = aligner.align(samples, text)
                num_spoken += 1
                if words is None:
                    continue
                num_kept += 1
                split = "valid" if rng.random() < VALIDATION_SHARE else "train"
                bank.add(samples, kind=f"synthetic-{kind}", voice=voice, split=split, words=words)
                if isinstance(engine, Kokoro) and kind == "digits":
                    # Strings in any order can then be put together in this voice.
                    for digit, sound in cut_words(samples, words):
                        end_s = len(sound) / SAMPLE_RATE
                        word = Word(text=digit, start_s=0.0, end_s=end_s)
                        bank.add(
                            sound, kind="synthetic-digit", voice=voice, split=split, words=[word]
                        )
                seconds_left -= len(samples) / SAMPLE_RATE
                progress.update(round(len(samples) / SAMPLE_RATE))
    print(f"{args.engine}: kept {num_kept} of {num_spoken} utterances")


if __name__ == "__main__":
    main()
