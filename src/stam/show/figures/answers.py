"""Pictures of what was answered: the confusion matrix, and the worst mistakes with their glimpses."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from stam.evaluation.examples import Example
from stam.evaluation.results import Evaluation
from stam.show.figures.scenes import picture, shorten, story_of, verdict
from stam.show.figures.style import COLUMN, HEAT, LIGHT, PAGE, SMALL, TEXT, Theme, new_figure
from stam.show.pictures import draw_frame, draw_scene, readable

_MOST_CLASSES = 30  # more are not legible: then the most confused ones are drawn alone
_MOST_WRITTEN = 15  # classes whose shares are written into the cells
_MOST_NAME = 18
_STEPS = (1, 2, 3, 5, 8, 13, 21, 34)
_FINE = 300  # pixels of a frame's longer side


def shown_classes(evaluation: Evaluation, most: int = _MOST_CLASSES) -> list[int]:
    """Returns the classes of the confusion matrix: all, or of many the most confused."""
    answers = evaluation.answers
    everything = list(range(len(evaluation.data.classes)))
    if answers is None or len(everything) <= most:
        return everything
    chosen: dict[int, None] = {}
    for truth, answer, _ in answers.confusion.mistaken():
        if len(chosen.keys() | {truth, answer}) <= most:
            chosen |= {truth: None, answer: None}
    return sorted(chosen) or everything[:most]


def confusion(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure | None:
    """How often each class was taken for each other after the last glimpse, in per cent of the true class."""
    if evaluation.answers is None:
        return None
    classes = shown_classes(evaluation)
    share = 100 * evaluation.answers.confusion.shares(classes)
    count = len(classes)
    side = min(PAGE, max(COLUMN, 1.6 + 0.21 * count))
    figure, ((axes,),) = new_figure(side, side)
    image = axes.imshow(share, cmap=HEAT, norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    names = [shorten(readable(evaluation.data.classes[label]), _MOST_NAME) for label in classes]
    axes.set_xticks(range(count), names, rotation=90, fontsize=SMALL, color=theme.ink)
    axes.set_yticks(range(count), names, fontsize=SMALL, color=theme.ink)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("answer", fontsize=TEXT, color=theme.ink)
    axes.set_ylabel("true class", fontsize=TEXT, color=theme.ink)
    total = len(evaluation.data.classes)
    which = "" if count == total else f": the {count} most confused of {total:,} classes"
    title = f"after {evaluation.num_glimpses} glimpses, % of the true class{which}"
    axes.set_title(title, fontsize=SMALL, color=theme.ink)
    if count <= _MOST_WRITTEN:
        for row, column in zip(*np.nonzero(share >= 0.5), strict=True):
            colour = "white" if share[row, column] < 40 else "black"
            axes.text(
                column,
                row,
                f"{share[row, column]:.0f}",
                ha="center",
                va="center",
                fontsize=SMALL - 1,
                color=colour,
            )
    else:
        bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, pad=0.01)
        bar.ax.tick_params(colors=theme.ink, labelsize=SMALL, length=2)
        bar.outline.set_visible(False)
    return figure


def mistakes(
    evaluation: Evaluation, examples: Sequence[Example], theme: Theme = LIGHT, columns: int = 7
) -> Figure | None:
    """The worst mistakes, one a row: the scene with the path of the looks, and what was seen and answered."""
    if not examples or evaluation.answers is None:
        return None
    first = examples[0]
    last = len(first.predictions)
    steps = [*[step for step in _STEPS if step < last][: columns - 2], last]
    aspect = first.image.shape[0] / first.image.shape[1]
    columns = len(steps) + 1
    width = PAGE * columns / 7
    figure, panels = new_figure(
        width, len(examples) * (width / columns * aspect + 0.62), len(examples), columns
    )
    for row, example in zip(panels, examples, strict=True):
        story = story_of(example)
        picture(row[0], draw_scene(story, _FINE), theme)
        _draw_path(row[0], example, theme)
        row[0].set_title("the scene", fontsize=SMALL, color=theme.muted, pad=2)
        row[0].set_xlabel(f"true class:\n{shorten(story.name)}", fontsize=SMALL, color=theme.ink)
        for axes, step in zip(row[1:], steps, strict=True):
            picture(axes, draw_frame(story, step, _FINE), theme)
            axes.set_title(f"{step}", fontsize=SMALL, color=theme.muted, pad=2)
            colour = theme.colours[0 if example.is_right[step - 1] else 1]
            axes.set_xlabel(verdict(story, step), fontsize=SMALL, color=colour)
    return figure


def _draw_path(axes: Axes, example: Example, theme: Theme, most: int = 8) -> None:
    """Draws the path of the first looks over a scene, from centre to centre of what each sensed last."""
    parts = example.boxes[:most]  # (n, parts, 4)
    sensed = [look[look[:, 2] > look[:, 0]] for look in parts]
    centres = np.array([(box[-1][:2] + box[-1][2:]) / 2 for box in sensed if len(box)])
    if not len(centres):
        return
    height, width = example.image.shape[:2]
    scale = _FINE / max(height, width)
    down, across = (centres * scale * (height, width)).T
    edge = [withStroke(linewidth=3, foreground="black")]
    axes.plot(across, down, color="white", linewidth=1.2, path_effects=edge)
    axes.plot(across[0], down[0], "o", color=theme.colours[1], markersize=4, markeredgecolor="white")
