"""Train the bundled model from nothing: data, speech, vocabulary, training, evaluation, export.

    python -m training.retrain --data DATA_DIR --work WORK_DIR --out models/demo

A step whose result is already there is not done again, and training goes on from its last
checkpoint; so the same command also resumes a run that was killed.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

# Hours of synthetic speech by engine. The first three are Debian packages.
SYNTHETIC_HOURS = {"flite": 1.5, "espeak": 1.2, "festival": 0.8, "kokoro": 0.7}


def run(module: str, *options: str | Path, num_processes: int | None = None) -> None:
    """Run one of this package's commands; its failure ends everything.

    Args:
        num_processes: of a command that is written for torchrun.
    """
    launch: list[str] = []
    title = f"== training.{module}"
    if num_processes is not None:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
        title += f", {num_processes} processes"
    print(title, flush=True)
    command = [sys.executable, *launch, "-m", f"training.{module}", *map(str, options)]
    subprocess.run(command, check=True)


def train(work: Path, *options: str | Path) -> None:
    """Train with one process a core, or with one alone where there is a GPU."""
    num_processes = 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
    run("train", "--work", work, *options, num_processes=num_processes)


def main() -> None:
    """Parse the command line and run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the recordings")
    parser.add_argument("--work", type=Path, required=True, help="working folder, 2 GB")
    parser.add_argument("--out", type=Path, required=True, help="where to export the model")
    parser.add_argument("--kokoro-voices", type=Path, help="a folder of Kokoro's voices to use too")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument(
        "--hours-factor", type=float, default=1.0, help="of the synthetic speech, for a short trial"
    )
    args = parser.parse_args()

    banks, tekken = args.work / "banks", args.work / "tekken.json"
    evaluation = args.work / "evaluation"
    checkpoint = args.work / "run" / "last.pt"
    # A marker after each bank: an index without one is half a bank.
    done = args.work / "done"
    done.mkdir(parents=True, exist_ok=True)

    def once(name: str, module: str, *options: str | Path) -> None:
        if not (done / name).exists():
            run(module, *options)
            (done / name).touch()

    once("real", "prepare_data", "--data", args.data, "--out", banks)
    hours = dict(SYNTHETIC_HOURS)
    if not args.kokoro_voices:
        del hours["kokoro"]
    for engine, engine_hours in hours.items():
        options: list[str | Path] = ["--hours", str(engine_hours * args.hours_factor)]
        if engine == "kokoro":
            options += ["--kokoro-voices", args.kokoro_voices]
        where = ("--data", args.data, "--out", banks)
        once(engine, "synthesize", *where, "--engine", engine, *options)
    once("accents", "accents", "--out", banks)
    once("vocabulary", "vocabulary", "--banks", banks, "--out", tekken)
    once("manifests", "manifests", "--banks", banks, "--out", evaluation)
    manifest = evaluation / "all.jsonl"
    train(args.work, "--steps", str(args.steps), "--manifest", manifest)
    run("plot", args.work / "run" / "metrics.jsonl", args.out / "training.png")
    run("export", checkpoint, args.out, "--tekken", tekken)
    delays = ("240", "480", "960", "2400")
    checkpoint_options = ("--checkpoint", checkpoint, "--tekken", tekken)
    run("evaluate", *checkpoint_options, "--manifest", manifest, "--delay-ms", *delays)
    run("evaluate", *checkpoint_options, "--manifest", evaluation / "robustness.jsonl")


if __name__ == "__main__":
    main()
