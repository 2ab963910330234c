"""Train a Voxtral-Realtime model on composed utterances.

    python -m training.train --work WORK_DIR --steps 3000

The working folder holds the clip banks (`banks/`), `tekken.json`, and what training writes to
`run/`: `last.pt` (everything needed to go on), `metrics.jsonl` (one line a report). A killed run
goes on from `last.pt` when the same command is given again; other options may then differ, so a run
can be made longer or given other data on the way.

The learning rate rises for `--warmup` steps, stays, and falls to zero over the last `--cooldown`
share of the steps.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from engine.config import AudioConfig
from training.align import pronunciation_dictionary
from training.dataset import IGNORED, NUM_SPECIAL_TOKENS, Batch, UtteranceStream, batches
from training.lexicon import Lexicon
from training.model import ModelShape, TrainingModel
from training.muon import Muon

TEXT_WEIGHT = 3.0
MAX_GRADIENT_NORM = 1.0
SAVE_EVERY_S = 120
REPORT_EVERY = 20


def losses(model: TrainingModel, batch: Batch, audio: AudioConfig) -> dict[str, Tensor]:
    """Return the losses by name: `token`, and the helpers `word` and `sound`.

    Text tokens weigh more than the choice between pads and the start of a word: there are few of
    them, and they are what the model is for.
    """
    logits, word_logits, sound_logits = model(
        batch.log_mel, batch.input_ids, batch.num_delay_tokens
    )
    targets = batch.target_ids[:, 1:]
    positions = torch.arange(1, batch.target_ids.shape[1], device=targets.device)
    prompt = audio.num_left_pad_tokens + 1 + batch.num_delay_tokens
    is_generated = positions >= prompt[:, None]
    weights = 1.0 + (TEXT_WEIGHT - 1.0) * (targets >= NUM_SPECIAL_TOKENS)
    weights = weights * is_generated
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
    return {
        "token": (each * weights.flatten()).sum() / weights.sum(),
        "word": F.cross_entropy(word_logits.flatten(0, 1).float(), batch.word_labels.flatten()),
        "sound": F.cross_entropy(
            sound_logits.flatten(0, 1).float(), batch.sound_labels.flatten(), ignore_index=IGNORED
        ),
    }


def optimizers(
    model: nn.Module, learning_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for everything else."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "head" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(matrices, lr=learning_rate, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, num_steps: int, warmup: int, cooldown: float) -> float:
    """Return the share of the learning rate in force at `step`."""
    rising = (step + 1) / warmup
    falling = (num_steps - step) / max(1.0, cooldown * num_steps)
    return max(0.0, min(1.0, rising, falling))


def save(path: Path, **state: Any) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old or the new one, whole."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="working folder")
    parser.add_argument("--run", default="run", help="name of the run's folder in it")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--cooldown", type=float, default=0.25)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--helper-weight", type=float, default=0.5)
    parser.add_argument("--tokens-per-batch", type=int, default=1800)
    parser.add_argument("--utterance-tokens", type=int, nargs=2, default=(120, 290))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run: Path = args.work / args.run
    run.mkdir(parents=True, exist_ok=True)
    audio = AudioConfig()
    shape = ModelShape()
    num_sounds = Lexicon(pronunciation_dictionary()).num_sounds
    num_words = shape.vocab_size - NUM_SPECIAL_TOKENS + 1
    model = TrainingModel(shape.config(), num_sounds, num_words).to(device)
    optimizers_ = optimizers(model, args.learning_rate, args.weight_decay)

    step = 0
    last = run / "last.pt"
    if last.exists():
        state = torch.load(last, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers_, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]

    stream = UtteranceStream(
        audio=audio,
        bank_directory=args.work / "banks",
        bank_names=sorted(path.stem for path in (args.work / "banks").glob("*.pcm")),
        tekken=args.work / "tekken.json",
        dictionary=pronunciation_dictionary(),
        tokens_per_batch=args.tokens_per_batch,
        utterance_tokens=tuple(args.utterance_tokens),
        # After a resume the stream must not repeat what was already seen.
        seed=args.seed + step,
    )

    def checkpoint() -> None:
        save(
            last,
            step=step,
            shape=shape.as_dict(),
            model=model.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in optimizers_],
        )

    sums: dict[str, float] = defaultdict(float)
    saved_at = reported_at = time.monotonic()
    with (
        (run / "metrics.jsonl").open("a", buffering=1) as metrics,
        tqdm(total=args.steps, initial=step, desc="train", mininterval=5) as progress,
    ):
        for batch in batches(stream, num_workers=1):
            if step >= args.steps:
                break
            factor = learning_rate_factor(step, args.steps, args.warmup, args.cooldown)
            for optimizer in optimizers_:
                for group in optimizer.param_groups:
                    group["lr"] = args.learning_rate * factor
            with torch.autocast(device.type, torch.bfloat16):
                parts = losses(model, batch.to(device), audio)
            helpers = parts["word"] + parts["sound"]
            (parts["token"] + args.helper_weight * helpers).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            for optimizer in optimizers_:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            progress.update()
            for name, value in parts.items():
                sums[name] += value.item() / REPORT_EVERY
            sums["gradient_norm"] += norm.item() / REPORT_EVERY
            if step % REPORT_EVERY == 0:
                now = time.monotonic()
                seconds = (now - reported_at) / REPORT_EVERY
                row = {"step": step, "lr": args.learning_rate * factor, "step_s": seconds, **sums}
                metrics.write(json.dumps(row) + "\n")
                progress.set_postfix(token=f"{sums['token']:.3f}", sound=f"{sums['sound']:.2f}")
                sums.clear()
                reported_at = now
            if time.monotonic() - saved_at > SAVE_EVERY_S:
                checkpoint()
                saved_at = time.monotonic()
    checkpoint()


if __name__ == "__main__":
    main()
