"""Draws what `real_images.py` measured: every agent's curve beside the authors' points.

python experiments/draw_real_images.py experiments/results --out docs/images
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from stam.evaluation import load_evaluation
from stam.figures import evaluation_figures, to_bytes
from stam.figures.style import COLUMN, LIGHT, LINES, dress, legend, new_figure

# measured once with the authors' code: glimpses and accuracy in %
AUTHORS = {
    "imagenette": {1: 48.1, 2: 73.7, 3: 82.1, 5: 89.2, 8: 93.6, 12: 95.9, 21: 97.7},
    "aid": {1: 38.0, 2: 61.4, 3: 69.8, 5: 77.1, 8: 83.0, 12: 86.9, 21: 89.8},
}
KEPT = ("early-exit", "locations")


def draw(results: Path, dataset: str) -> bytes:
    figure, ((axes,),) = new_figure(COLUMN, 3.6)
    dress(axes, LIGHT, "glimpses sensed", "top-1 accuracy (%)")
    for position, result in enumerate(json.loads(results.read_text())):
        mean, std = 100 * np.array(result["mean"]), 100 * np.array(result["std"])
        at = np.arange(1, len(mean) + 1)
        colour = LIGHT.colours[position % len(LIGHT.colours)]
        axes.plot(at, mean, color=colour, linestyle=LINES[position % len(LINES)], label=result["name"])
        axes.fill_between(at, mean - 5 * std, mean + 5 * std, color=colour, alpha=0.2, linewidth=0)
    points = AUTHORS[dataset]
    axes.plot(list(points), list(points.values()), "x", color=LIGHT.ink, label="the authors' code")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, LIGHT)
    return to_bytes(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dataset in AUTHORS:
        results, learned = (arguments.results / f"{dataset}{end}.json" for end in ("", "-learned"))
        if results.exists():
            (arguments.out / f"{dataset}-curves.png").write_bytes(draw(results, dataset))
        if learned.exists():
            figures = evaluation_figures(load_evaluation(learned))
            for name in KEPT:
                if name in figures:
                    (arguments.out / f"{dataset}-{name}.png").write_bytes(to_bytes(figures[name]))
    print("\n".join(sorted(path.name for path in arguments.out.glob("*.png"))))


if __name__ == "__main__":
    main()
