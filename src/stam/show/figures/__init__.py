"""Pictures of results: every function takes a result and returns a matplotlib figure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stam.files import make_folder, save_content

from stam.show.figures.style import DARK, LIGHT, THEMES, Theme, data_uri, to_bytes  # isort: skip  (checks for matplotlib)

from matplotlib.figure import Figure
from tqdm import tqdm

from stam.evaluation.comparison import Comparison
from stam.evaluation.examples import Example
from stam.evaluation.results import Evaluation
from stam.show.figures import answers, comparisons, curves, scenes

__all__ = [
    "DARK",
    "LIGHT",
    "THEMES",
    "Theme",
    "answer_figures",
    "answers",
    "comparison_figures",
    "comparisons",
    "curves",
    "data_uri",
    "evaluation_figures",
    "save_figures",
    "scenes",
    "to_bytes",
]


def evaluation_figures(
    evaluation: Evaluation, metrics: Sequence[Mapping[str, Any]] = (), theme: Theme = LIGHT
) -> dict[str, Figure]:
    """Returns every chart of one run by name; one that has nothing to show is left out."""
    drawn: dict[str, Callable[[], Figure | None]] = {
        "accuracy": lambda: curves.accuracy(evaluation, "glimpses", theme),
        "accuracy-pixels": lambda: curves.accuracy(evaluation, "pixels", theme),
        "accuracy-share": lambda: curves.accuracy(evaluation, "share", theme),
        "classifiers": lambda: curves.readouts(evaluation, theme),
        "early-exit": lambda: curves.early_exit(evaluation, theme),
        "exits": lambda: curves.exits(evaluation, theme),
        "reliability": lambda: curves.reliability(evaluation, theme),
        "locations": lambda: scenes.location_histograms(evaluation, theme=theme),
        "first-locations": lambda: scenes.first_locations(evaluation, theme),
        "multiply-adds": lambda: curves.multiply_adds(evaluation, theme),
        "latency": lambda: curves.latency(evaluation, theme),
        "training": lambda: curves.training(metrics, theme),
    }
    found = {name: draw() for name, draw in drawn.items()}
    return {name: figure for name, figure in found.items() if figure is not None}


def example_figures(examples: Sequence[Example], theme: Theme = LIGHT) -> dict[str, Figure]:
    """Returns the trajectory strip and the policy maps of each example by name."""
    found: dict[str, Figure | None] = {}
    for number, example in enumerate(examples, start=1):
        found[f"trajectory-{number}"] = scenes.trajectory(example, theme=theme)
        found[f"policy-{number}"] = scenes.policy_maps(example, theme=theme)
    return {name: figure for name, figure in found.items() if figure is not None}


def answer_figures(
    evaluation: Evaluation, mistakes: Sequence[Example] = (), theme: Theme = LIGHT
) -> dict[str, Figure]:
    """Returns the confusion matrix and the worst mistakes by name."""
    found = {
        "confusion": answers.confusion(evaluation, theme),
        "mistakes": answers.mistakes(evaluation, mistakes, theme),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def comparison_figures(comparison: Comparison, theme: Theme = LIGHT) -> dict[str, Figure]:
    """Returns every chart of a comparison by name."""
    found = {
        "accuracy": comparisons.curves(comparison, theme=theme),
        "accuracy-pixels": comparisons.curves(comparison, "pixels", theme=theme),
        "accuracy-share": comparisons.curves(comparison, "share", theme=theme),
        "differences": comparisons.differences(comparison, theme=theme),
        "early-exit": comparisons.early_exits(comparison, theme=theme),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def save_figures(
    figures: Mapping[str, Figure],
    folder: str | Path,
    kinds: Sequence[str] = ("png", "svg"),
    progress: bool = False,
) -> list[Path]:
    """Writes figures into a folder, each as every kind of file; returns the paths."""
    folder = Path(folder)
    make_folder(folder)
    paths = []
    for name, figure in tqdm(
        figures.items(), desc="drawing", unit="picture", disable=None if progress else True
    ):
        for kind in kinds:
            path = folder / f"{name}.{kind}"
            save_content(path, to_bytes(figure, kind))
            paths.append(path)
    return paths
