"""Several runs in one picture: their curves, and the differences between them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from stam.evaluation.comparison import AS_PUBLISHED, Comparison
from stam.show.figures.curves import X_LABELS, count_axis, draw_band, draw_curve, x_values
from stam.show.figures.style import (
    COLUMN,
    LIGHT,
    SMALL,
    Theme,
    colour_and_line,
    dress,
    legend,
    new_figure,
    plain,
)


def curves(comparison: Comparison, x: str | None = None, theme: Theme = LIGHT) -> Figure:
    """Accuracy of every run; against glimpses where all cut scenes alike, else against the share sensed."""
    x = x or ("glimpses" if comparison.same_grid else "share")
    figure, ((axes,),) = new_figure(COLUMN, 3.0 + 0.17 * len(comparison.names))
    dress(axes, theme, X_LABELS[x], "top-1 accuracy (%)")
    furthest = np.zeros(1)
    for position, (name, evaluation) in enumerate(zip(comparison.names, comparison.evaluations, strict=True)):
        at = x_values(evaluation, x)
        furthest = at if at[-1] >= furthest[-1] else furthest
        draw_curve(axes, at, evaluation.accuracy.ensemble.top1, name, theme, position)
    if x == "pixels":
        _mark_published(axes, comparison, theme)
    count_axis(axes, furthest, x)
    legend(figure, theme, columns=1 if max(map(len, comparison.names)) > 24 else 2)
    return figure


def _mark_published(axes: Axes, comparison: Comparison, theme: Theme) -> None:
    """Marks the published methods of the table by their pixels and accuracy."""
    rows = [row for row in comparison.table if row.note == AS_PUBLISHED]
    halo = [withStroke(linewidth=2.5, foreground=theme.page)]
    for row in rows:
        near = [other for other in rows if abs(other.pixels - row.pixels) < 0.15 * row.pixels]
        above = row.accuracy == max(
            other.accuracy for other in near
        )  # the best of neighbours has its name on top
        axes.plot(row.pixels, 100 * row.accuracy, "D", color=theme.muted, markersize=4)
        axes.annotate(
            row.method,
            (row.pixels, 100 * row.accuracy),
            xytext=(0, 4 if above else -4),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=SMALL,
            color=theme.ink,
            path_effects=halo,
        )


def differences(comparison: Comparison, theme: Theme = LIGHT) -> Figure | None:
    """What each run gains over its baseline, in percentage points, with the 95 % interval over images."""
    if not comparison.differences:
        return None
    count = comparison.same_grid
    figure, ((axes,),) = new_figure(COLUMN, 3.0 + 0.17 * len(comparison.differences))
    dress(axes, theme, X_LABELS["glimpses" if count else "share"], "gain in accuracy\n(percentage points)")
    axes.axhline(0, color=theme.muted, linewidth=1)
    baselines = {each.baseline for each in comparison.differences}
    grid = comparison.evaluations[0].grid
    scale = grid.num_locations if count and grid is not None else 100
    for each in comparison.differences:
        position = comparison.names.index(each.name)  # a run keeps its colour in all pictures
        label = f"{each.name} - {each.baseline}" if len(baselines) > 1 else each.name
        at = scale * np.array(each.share)
        draw_band(axes, at, each.mean, each.low, each.high, label, theme, position)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    if len(baselines) == 1:
        axes.set_title(f"over: {plain(next(iter(baselines)))}", fontsize=9, color=theme.ink)
    legend(figure, theme, columns=1)
    return figure


def early_exits(comparison: Comparison, theme: Theme = LIGHT) -> Figure:
    """Early exit of every run: accuracy against the share of the scene sensed on average."""
    figure, ((axes,),) = new_figure(COLUMN, 3.0 + 0.17 * len(comparison.names))
    dress(axes, theme, "mean share of the scene sensed (%)", "top-1 accuracy (%)", "early exit")
    for position, (name, evaluation) in enumerate(zip(comparison.names, comparison.evaluations, strict=True)):
        sweep = evaluation.early_exit.calibrated
        share = 100 * evaluation.share_after(sweep.mean_glimpses)
        colour, line = colour_and_line(theme, position)
        accuracy = 100 * np.array(sweep.accuracy)
        axes.plot(share, accuracy, color=colour, linestyle=line, linewidth=1.8, label=plain(name))
    legend(figure, theme, columns=1 if max(map(len, comparison.names)) > 24 else 2)
    return figure
