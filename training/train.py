"""Train a Voxtral-Realtime model on composed utterances.

    torchrun --nproc-per-node 2 -m training.train --work WORK_DIR --steps 3000

On a CPU, start one process a core: each works through its own share of every batch on one thread,
and gradients are averaged once a step, which loses less time to waiting than many threads do.

The working folder holds the clip banks (`banks/`), `tekken.json`, and what training writes to
`run/`: `last.pt` (everything needed to go on) and `metrics.jsonl` (losses and word error rates). A
killed run goes on from `last.pt` when the same command is given again; other options may then
differ, so a run can be made longer or given other data on the way.

The learning rate rises for `--warmup` steps, stays, and falls to zero over the last `--cooldown`
share of the steps, or of the time where `--minutes` ends the run earlier.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from training.align import pronunciation_dictionary
from training.dataset import IGNORED, NUM_SPECIAL_TOKENS, Batch, UtteranceStream, batches
from training.evaluate import QuickEvaluation
from training.lexicon import Lexicon
from training.model import ModelShape, TrainingModel, voxtral_weights
from training.muon import Muon
from voxlite.engine.config import AudioConfig

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
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    return {
        "token": (each * weights.flatten()).sum() / weights.sum(),
        "word": F.cross_entropy(word_logits.flatten(0, 1).float(), batch.word_labels.flatten()),
        "sound": F.cross_entropy(
            sound_logits.flatten(0, 1).float(), batch.sound_labels.flatten(), ignore_index=IGNORED
        ),
    }


class Schedule:
    """The learning rate: it rises, stays, and falls to zero where the run ends."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._started_at = time.monotonic()

    def learning_rate(self, step: int) -> float:
        """Return the rate at `step`, the same in all processes; 0 when the run is over."""
        left = 1 - step / self._args.steps
        if self._args.minutes:
            elapsed_s = time.monotonic() - self._started_at
            left = min(left, 1 - elapsed_s / (60 * self._args.minutes))
        rising = (step + 1) / self._args.warmup
        factor = max(0.0, min(1.0, rising, left / self._args.cooldown))
        rate = torch.tensor(self._args.learning_rate * factor)
        if dist.is_initialized():
            # Clocks differ between processes; the first one's counts.
            dist.broadcast(rate, src=0)
        return rate.item()


class Trainer:
    """A model with its optimizers and how far they have come; saved and loaded as one."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_sounds: int,
        device: torch.device,
        weight_decay: float,
        helper_weight: float,
    ) -> None:
        """Args:
        helper_weight: of the helper losses, relative to the loss of the tokens.
        """
        self.shape = shape
        self.step = 0
        self._audio = AudioConfig()
        self._device = device
        self._helper_weight = helper_weight
        num_words = shape.vocab_size - NUM_SPECIAL_TOKENS + 1
        self.model = TrainingModel(shape, num_sounds, num_words).to(device)
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            is_inner = parameter.ndim == 2 and "embed" not in name and "head" not in name
            (matrices if is_inner else others).append(parameter)
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=0.0, weight_decay=weight_decay),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def update(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """Learn from one batch; return the losses and the gradient's norm."""
        with torch.autocast(self._device.type, torch.bfloat16):
            parts = losses(self.model, batch.to(self._device), self._audio)
        helpers = parts["word"] + parts["sound"]
        (parts["token"] + self._helper_weight * helpers).backward()
        if dist.is_initialized():
            self._average_gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return {name: part.item() for name, part in parts.items()} | {"gradient_norm": norm.item()}

    def _average_gradients(self) -> None:
        """Replace every gradient by its mean over the processes, in one exchange."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        shares = flat.split([gradient.numel() for gradient in gradients])
        for gradient, share in zip(gradients, shares, strict=True):
            gradient.copy_(share.view_as(gradient))

    def save(self, path: Path) -> None:
        """Write a checkpoint; a kill at any moment leaves the old or the new one, whole."""
        partial = path.with_suffix(".partial")
        state = {
            "step": self.step,
            "shape": self.shape.as_dict(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same shape.

        Raises:
            ValueError: the checkpoint has another shape.
        """
        state = torch.load(path, map_location=self._device)
        if state["shape"] != self.shape.as_dict():
            raise ValueError(f"{path} holds a model of shape {state['shape']}, not {self.shape}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="working folder")
    parser.add_argument("--name", default="run", help="name of the run's folder in it")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, help="end earlier, after this time")
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--cooldown", type=float, default=0.3)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--helper-weight", type=float, default=0.5)
    parser.add_argument("--tokens-per-batch", type=int, default=1800)
    parser.add_argument("--utterance-tokens", type=int, nargs=2, default=(150, 310))
    parser.add_argument("--manifest", type=Path, help="held-out clips for the word error curves")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps")
    parser.add_argument("--clips-per-set", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    run: Path = args.work / args.name
    run.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        ModelShape(),
        num_sounds=Lexicon(pronunciation_dictionary()).num_sounds,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        weight_decay=args.weight_decay,
        helper_weight=args.helper_weight,
    )
    last = run / "last.pt"
    if last.exists():
        trainer.load(last)
    tekken = args.work / "tekken.json"
    stream = UtteranceStream(
        audio=AudioConfig(),
        bank_directory=args.work / "banks",
        bank_names=sorted(path.stem for path in (args.work / "banks").glob("*.pcm")),
        tekken=tekken,
        dictionary=pronunciation_dictionary(),
        tokens_per_batch=args.tokens_per_batch // num_processes,
        utterance_tokens=tuple(args.utterance_tokens),
        # After a resume the stream must not repeat what was already seen.
        seed=(args.seed, rank, trainer.step),
    )
    schedule = Schedule(args)
    if rank > 0:
        for batch in batches(stream, num_workers=1):
            rate = schedule.learning_rate(trainer.step)
            if rate == 0.0:
                return
            trainer.update(batch, rate)
    quick_evaluation = (
        QuickEvaluation(args.manifest, tekken, args.clips_per_set) if args.manifest else None
    )

    sums: dict[str, float] = defaultdict(float)
    num_summed = 0  # a resumed run's first report covers fewer steps than others
    saved_at = time.monotonic()
    with (
        (run / "metrics.jsonl").open("a", buffering=1) as metrics,
        tqdm(total=args.steps, initial=trainer.step, desc="train", mininterval=5) as progress,
    ):
        for batch in batches(stream, num_workers=1):
            rate = schedule.learning_rate(trainer.step)
            if rate == 0.0:
                break
            for name, value in trainer.update(batch, rate).items():
                sums[name] += value
            num_summed += 1
            progress.update()
            if trainer.step % REPORT_EVERY == 0:
                means = {name: total / num_summed for name, total in sums.items()}
                row = {"step": trainer.step, "time": time.time(), "learning_rate": rate, **means}
                metrics.write(json.dumps(row) + "\n")
                progress.set_postfix(token=f"{means['token']:.3f}", sound=f"{means['sound']:.2f}")
                sums.clear()
                num_summed = 0
            if quick_evaluation and trainer.step % args.evaluate_every == 0:
                weights = voxtral_weights(trainer.model.state_dict())
                rates = quick_evaluation(trainer.shape.config(), weights)
                metrics.write(json.dumps({"step": trainer.step, "word_error_rate": rates}) + "\n")
            if time.monotonic() - saved_at > SAVE_EVERY_S:
                trainer.save(last)
                saved_at = time.monotonic()
    trainer.save(last)


if __name__ == "__main__":
    main()
