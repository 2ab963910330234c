"""Word error rate per set of a training checkpoint, decoded greedily without a teacher.

    python -m training.evaluate --checkpoint WORK_DIR/run/last.pt --tekken WORK_DIR/tekken.json \
        --manifest WORK_DIR/evaluation/all.jsonl --delay-ms 240 480 960 2400
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from torch import Tensor
from transformers import VoxtralRealtimeConfig

from training.decode import Transcriber, gained, load_for_decoding
from training.model import load_checkpoint
from training.prepare_data import load_audio
from voxlite.engine.config import AudioConfig
from voxlite.server.commands.evaluate import Clip, normalize, read_manifest, score_sets


def load_transcriber(checkpoint: Path, tekken: Path) -> Transcriber:
    """Return a transcriber for a checkpoint that training wrote."""
    model = load_for_decoding(*load_checkpoint(checkpoint))
    return Transcriber(model, Tekkenizer.from_file(tekken), AudioConfig())


class QuickEvaluation:
    """Scores a model on the first clips of each set, often enough to draw a curve."""

    def __init__(self, manifest: Path, tekken: Path, clips_per_set: int) -> None:
        by_set: dict[str, list[Clip]] = defaultdict(list)
        for clip in read_manifest(manifest):
            by_set[clip.set_name].append(clip)
        self._clips = [clip for clips in by_set.values() for clip in clips[:clips_per_set]]
        self._samples = [load_audio(clip.audio) for clip in self._clips]
        self._tokenizer = Tekkenizer.from_file(tekken)

    def __call__(
        self, config: VoxtralRealtimeConfig, weights: dict[str, Tensor]
    ) -> dict[str, float]:
        """Return the word error rate of each set that has words, at the default delay."""
        audio = AudioConfig()
        transcriber = Transcriber(load_for_decoding(config, weights), self._tokenizer, audio)
        transcripts = transcriber.transcribe(self._samples, audio.default_delay_ms)
        scores = score_sets(self._clips, [transcript.text for transcript in transcripts])
        return {s.set_name: s.num_errors / s.num_words for s in scores if s.num_words}


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
    clips = read_manifest(args.manifest)
    if args.sets:
        clips = [clip for clip in clips if clip.set_name in args.sets]
    samples = [gained(load_audio(clip.audio), args.gain) for clip in clips]
    transcriber = load_transcriber(args.checkpoint, args.tekken)
    table: dict[int, dict[str, float | None]] = {}
    for delay_ms in args.delay_ms:
        texts = [t.text for t in transcriber.transcribe(samples, delay_ms)]
        table[delay_ms] = {}
        for score in score_sets(clips, texts):
            rate = table[delay_ms][score.set_name] = score.word_error_rate
            print(
                f"{delay_ms:5d} ms  {score.set_name:24s} "
                f"{'-' if rate is None else f'{100 * rate:.2f} %':>8s}  "
                f"{score.num_errors} errors, {score.num_words} words, {score.num_clips} clips"
            )
        if args.show_errors:
            for clip, text in zip(clips, texts, strict=True):
                if normalize(text) != normalize(clip.text):
                    print(f"[{clip.set_name}]\n  said  {clip.text}\n  wrote {text}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
