"""Word error rate per set of a training checkpoint, decoded greedily without a teacher.

    python -m training.evaluate --checkpoint WORK_DIR/run/last.pt --tekken WORK_DIR/tekken.json \
        --manifest WORK_DIR/evaluation/all.jsonl --delay-ms 240 480 960 2400
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jiwer
import torch
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from torch import Tensor
from transformers import VoxtralRealtimeConfig

from engine.config import AudioConfig
from training.decode import Transcriber, gained, load_for_decoding
from training.model import load_checkpoint
from training.prepare_data import load_audio


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of one set at one delay."""

    num_clips: int
    num_words: int
    num_errors: int

    @property
    def word_error_rate(self) -> float:
        """Errors per reference word; for sets without words, the number of words made up."""
        return self.num_errors / max(1, self.num_words)


def read_manifest(path: Path) -> list[dict[str, str]]:
    """Return the rows of a manifest, audio paths resolved against its folder."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row | {"audio": str(path.parent / row["audio"])} for row in rows]


def score(rows: list[dict[str, str]], texts: list[str]) -> dict[str, Score]:
    """Return the score of each set."""
    by_set: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row, text in zip(rows, texts, strict=True):
        by_set[row["set"]].append((row["text"], text))
    scores = {}
    for name, pairs in by_set.items():
        num_words = sum(len(reference.split()) for reference, _ in pairs)
        if num_words:
            references, hypotheses = (list(column) for column in zip(*pairs, strict=True))
            output = jiwer.process_words(references, hypotheses)
            num_errors = output.substitutions + output.deletions + output.insertions
        else:
            num_errors = sum(len(text.split()) for _, text in pairs)
        scores[name] = Score(num_clips=len(pairs), num_words=num_words, num_errors=num_errors)
    return scores


def load_transcriber(checkpoint: Path, tekken: Path) -> Transcriber:
    """Return a transcriber for a checkpoint that training wrote."""
    model = load_for_decoding(*load_checkpoint(checkpoint))
    return Transcriber(model, Tekkenizer.from_file(tekken), AudioConfig())


class QuickEvaluation:
    """Scores a model on the first clips of each set, often enough to draw a curve."""

    def __init__(self, manifest: Path, tekken: Path, clips_per_set: int) -> None:
        by_set: dict[str, list[dict[str, str]]] = defaultdict(list)
        for row in read_manifest(manifest):
            by_set[row["set"]].append(row)
        self._rows = [row for rows in by_set.values() for row in rows[:clips_per_set]]
        self._clips = [load_audio(Path(row["audio"])) for row in self._rows]
        self._tokenizer = Tekkenizer.from_file(tekken)

    def __call__(
        self, config: VoxtralRealtimeConfig, weights: dict[str, Tensor]
    ) -> dict[str, float]:
        """Return the word error rate of each set at the default delay."""
        audio = AudioConfig()
        transcriber = Transcriber(load_for_decoding(config, weights), self._tokenizer, audio)
        transcripts = transcriber.transcribe(self._clips, audio.default_delay_ms)
        scores = score(self._rows, [transcript.text for transcript in transcripts])
        return {name: value.word_error_rate for name, value in scores.items()}


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tekken", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--delay-ms", type=int, nargs="+", default=[480])
    parser.add_argument("--gain", type=float, default=1.0, help="play the clips at another level")
    parser.add_argument("--sets", nargs="+", help="only these sets")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-errors", action="store_true", help="print the clips with errors")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    rows = read_manifest(args.manifest)
    if args.sets:
        rows = [row for row in rows if row["set"] in args.sets]
    clips = [gained(load_audio(Path(row["audio"])), args.gain) for row in rows]
    transcriber = load_transcriber(args.checkpoint, args.tekken)
    results: dict[int, dict[str, Score]] = {}
    for delay_ms in args.delay_ms:
        texts = [t.text for t in transcriber.transcribe(clips, delay_ms)]
        results[delay_ms] = score(rows, texts)
        for name, value in results[delay_ms].items():
            print(
                f"{delay_ms:5d} ms  {name:24s} {100 * value.word_error_rate:6.2f} %  "
                f"{value.num_errors} errors, {value.num_words} words, {value.num_clips} clips"
            )
        if args.show_errors:
            for row, text in zip(rows, texts, strict=True):
                if text != row["text"]:
                    print(f"[{row['set']}]\n  said  {row['text']}\n  wrote {text}")
    if args.json:
        table = {
            delay: {name: value.word_error_rate for name, value in scores.items()}
            for delay, scores in results.items()
        }
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
