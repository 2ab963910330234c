"""Plot a run's losses and word error rates as a PNG.

python -m training.plot WORK_DIR/run/metrics.jsonl training.png
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def main() -> None:
    """Parse the command line and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("out", type=Path, help="PNG to write")
    args = parser.parse_args()

    curves: dict[str, dict[str, list[tuple[int, float]]]] = {
        "loss": defaultdict(list),
        "word error rate, %": defaultdict(list),
    }
    for line in args.metrics.read_text().splitlines():
        row = json.loads(line)
        for name in ("token", "word", "sound"):
            if name in row:
                curves["loss"][name].append((row["step"], row[name]))
        for name, rate in row.get("word_error_rate", {}).items():
            curves["word error rate, %"][name].append((row["step"], 100 * rate))

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, (title, lines) in zip(axes, curves.items(), strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        axis.set(xlabel="step", title=title, yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=90)


if __name__ == "__main__":
    main()
