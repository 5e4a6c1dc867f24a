"""Draws the results of `real_images.py` and `who_chooses.py`: curves, the authors' points, paths.

python experiments/draw_real_images.py experiments/results --out docs/images
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stam.evaluation import load_evaluation
from stam.show.figures import evaluation_figures, to_bytes
from stam.show.figures.style import LIGHT, LINES, PAGE, SMALL, dress, legend, new_figure

# measured with the authors' code in 240 s: accuracy in % by number of glimpses
AUTHORS = {
    "imagenette": {1: 48.1, 2: 73.7, 3: 82.1, 5: 89.2, 8: 93.6, 12: 95.9, 21: 97.7},
    "aid": {1: 38.0, 2: 61.4, 3: 69.8, 5: 77.1, 8: 83.0, 12: 86.9, 21: 89.8},
}
KEPT = ("early-exit", "locations")


def two_panels(difference: str) -> tuple[Figure, Axes, Axes]:
    """Returns a figure with two panels over the glimpses: accuracy and differences of accuracy."""
    figure, ((whole, apart),) = new_figure(PAGE, 3.4, 1, 2)
    for axes, what in ((whole, "top-1 accuracy (%)"), (apart, difference)):
        dress(axes, LIGHT, "glimpses sensed", what)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, whole, apart


def draw(results: list[dict[str, Any]], points: dict[int, float]) -> bytes:
    """Draws an agent's curve, and how far it and others are above the interpolated points of the authors."""
    figure, whole, apart = two_panels("points above the authors' code")
    joined = np.interp(np.arange(1, len(results[0]["mean"]) + 1), list(points), list(points.values())) / 100
    add_curve(whole, 0, results[0])
    for position, result in enumerate(results):
        add_curve(apart, position, result, joined)
    for axes, values in ((whole, list(points.values())), (apart, [0.0] * len(points))):
        axes.plot(list(points), values, "x", color=LIGHT.ink, label="the authors' code, 240 s")
    apart.axhline(0, color=LIGHT.ink, linewidth=0.8)
    legend(figure, LIGHT, columns=3, axes=apart)
    return to_bytes(figure)


def draw_same_start(results: list[dict[str, Any]]) -> bytes:
    """Draws the curves of several agents, and how far each is from the first."""
    figure, whole, apart = two_panels(f"points above {results[0]['name']}")
    for position, result in enumerate(results):
        add_curve(whole, position, result)
        add_curve(apart, position, result, np.array(results[0]["mean"]))
    apart.set_ylim(-4, 2.5)
    legend(figure, LIGHT, columns=4)
    return to_bytes(figure)


def add_curve(axes: Axes, position: int, result: dict[str, Any], zero: np.ndarray | float = 0.0) -> None:
    """Draws a mean and one standard deviation over first locations: the results keep no single images."""
    mean, std = 100 * (np.array(result["mean"]) - zero), 100 * np.array(result["std"])
    at = np.arange(1, len(mean) + 1)
    colour = LIGHT.colours[position % len(LIGHT.colours)]
    axes.plot(at, mean, color=colour, linestyle=LINES[position % len(LINES)], label=result["name"])
    axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)


def draw_paths(found: dict[str, Any], columns: int = 4) -> bytes:
    """Draws where an agent looked in each scene until it stopped; cells show the number of the glimpse."""
    grid_rows, grid_columns = found["grid"]
    rows = -(-len(found["paths"]) // columns)
    figure, panels = new_figure(PAGE, 1.95 * rows, rows, columns)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, path in zip(panels.flat, found["paths"], strict=False):
        sure = [confidence > found["threshold"] for confidence in path["confidences"]]
        count = sure.index(True) + 1 if any(sure) else len(sure)
        shade = np.full((grid_rows, grid_columns), np.nan)
        places = [divmod(location, grid_columns) for location in path["locations"][:count]]
        for number, (row, column) in enumerate(places, 1):
            shade[row, column] = number
            axes.text(column, row, str(number), ha="center", va="center", fontsize=SMALL, color=LIGHT.ink)
        axes.imshow(shade, cmap="Blues_r", vmin=-12, vmax=len(sure) + 12, extent=None)
        axes.plot([c for _, c in places], [r for r, _ in places], color=LIGHT.muted, linewidth=0.6)
        axes.set(xlim=(-0.5, grid_columns - 0.5), ylim=(grid_rows - 0.5, -0.5))
        axes.set_axis_on()
        axes.set_xticks(np.arange(0.5, grid_columns - 1), [])
        axes.set_yticks(np.arange(0.5, grid_rows - 1), [])
        axes.grid(True, color=LIGHT.grid, linewidth=0.6)
        axes.tick_params(length=0)
        said = path["predictions"][count - 1]
        right = said == path["label"]
        title = f"{said}, {100 * path['confidences'][count - 1]:.0f}%"
        axes.set_title(
            title if right else f"{title}\n(is {path['label']})",
            fontsize=SMALL,
            color=LIGHT.ink if right else LIGHT.colours[1],
        )
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
        same_start = arguments.results / f"{dataset}-same-start.json"
        if same_start.exists():
            picture = draw_same_start(json.loads(same_start.read_text()))
            (arguments.out / f"{dataset}-same-start.png").write_bytes(picture)
        short, long, learned, choosers = (
            arguments.results / f"{dataset}{end}.json" for end in ("-240s", "-long", "-learned", "-choosers")
        )
        if short.exists():
            longer = json.loads(long.read_text())[:1] if long.exists() else []
            picture = draw(json.loads(short.read_text()) + longer, AUTHORS[dataset])
            (arguments.out / f"{dataset}-240s.png").write_bytes(picture)
        if choosers.exists():
            picture = draw_paths(json.loads(choosers.read_text()))
            (arguments.out / f"{dataset}-paths.png").write_bytes(picture)
        if learned.exists():
            figures = evaluation_figures(load_evaluation(learned))
            for name in KEPT:
                if name in figures:
                    (arguments.out / f"{dataset}-{name}.png").write_bytes(to_bytes(figures[name]))
    print("\n".join(sorted(path.name for path in arguments.out.glob("*.png"))))


if __name__ == "__main__":
    main()
