"""Step through one session that never ends; report whether steps get slower or memory grows.

    python -m voxlite.bench.step_time --plot docs/step-time.png

In: a model, by default the bundled one, and how many steps. Out: the median step of the second and
of the last thousand, resident memory, and a plot of both. The session hears the bundled sample
again and again, 80 ms a step, in one utterance: 30,000 steps are 40 minutes of speech.

Two times are told apart: a step's wall time, which other programs on the machine lengthen too, and
the time that the engine's thread computed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import matplotlib
import numpy as np
import psutil
from numpy.typing import NDArray
from rich.progress import track

from voxlite.engine import Engine, EngineConfig, SessionOptions
from voxlite.engine.audio.audio_file import read_audio
from voxlite.server.bundled import bundled_model

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_THOUSAND: Final = 1_000
# Points of the plot are medians over so many steps.
_STEPS_PER_POINT: Final = 100


@dataclass(slots=True)
class Course:
    """What was measured, step by step; memory once in 100 steps."""

    wall_ms: list[float] = field(default_factory=list)
    thread_ms: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Compare the last thousand steps with the second thousand: the first warms up."""
        figures: dict[str, float] = {"steps": len(self.wall_ms)}
        for name, values in (("wall_ms", self.wall_ms), ("thread_ms", self.thread_ms)):
            second = median(values[_THOUSAND : 2 * _THOUSAND])
            last = median(values[-_THOUSAND:])
            figures[f"{name}_second_thousand"] = second
            figures[f"{name}_last_thousand"] = last
            figures[f"{name}_ratio"] = last / second
        per_thousand = _THOUSAND // _STEPS_PER_POINT
        figures["resident_mb_after_2000"] = self.resident_mb[2 * per_thousand - 1]
        figures["resident_mb_at_end"] = self.resident_mb[-1]
        return figures


def tokens_of(path: Path, samples_per_token: int) -> Iterator[NDArray[np.float32]]:
    """Yield a file's samples, token by token, again and again."""
    samples = np.concatenate(list(read_audio(path)))
    whole = samples[: len(samples) // samples_per_token * samples_per_token]
    while True:
        yield from whole.reshape(-1, samples_per_token)


def run(config: EngineConfig, num_steps: int) -> Course:
    """Drive an engine on this thread."""
    engine = Engine(config)
    process, course = psutil.Process(), Course()
    session = engine.open(SessionOptions(), on_event=lambda event: None)
    tokens = tokens_of(bundled_model() / "sample.wav", engine.model_config.audio.samples_per_token)
    for step in track(range(1, num_steps + 1), "steps"):
        session.append(next(tokens))
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        engine.step()
        course.wall_ms.append(1000 * (time.perf_counter() - wall_s))
        course.thread_ms.append(1000 * (time.thread_time() - thread_s))
        if step % _STEPS_PER_POINT == 0:
            course.resident_mb.append(process.memory_info().rss / 1e6)
    engine.stop()
    return course


def plot(course: Course, path: Path) -> None:
    """Draw step times and memory over the steps."""
    num_points = len(course.resident_mb)
    steps = np.arange(1, num_points + 1) * _STEPS_PER_POINT
    figure, (times, memory) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for name, values in (("wall", course.wall_ms), ("engine's thread", course.thread_ms)):
        points = np.reshape(values[: num_points * _STEPS_PER_POINT], (num_points, -1))
        times.plot(steps, np.median(points, axis=1), label=name, linewidth=1)
    times.set(xlabel="step", title=f"ms a step, median of {_STEPS_PER_POINT}", ylim=(0, None))
    times.legend(fontsize=8)
    memory.plot(steps, course.resident_mb, linewidth=1)
    top_mb = 1.25 * max(course.resident_mb)
    memory.set(xlabel="step", title="resident memory, MB", ylim=(0, top_mb))
    for axis in (times, memory):
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(bundled_model()), help="a checkpoint's folder")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--json", type=Path, help="every step's time, to this file")
    args = parser.parse_args()
    if args.steps < 3 * _THOUSAND:
        parser.error(f"--steps {args.steps}: at least {3 * _THOUSAND}, to compare two thousands")
    config = EngineConfig(model=args.model, quantization=args.quantization, max_num_seqs=1)
    course = run(config, args.steps)
    for name, value in course.summary().items():
        print(f"{name:28} {value:10.3f}")
    if args.plot:
        plot(course, args.plot)
    if args.json:
        args.json.write_text(json.dumps(asdict(course)))


if __name__ == "__main__":
    main()
