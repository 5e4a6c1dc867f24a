"""Curves of one run: accuracy, early exit, calibration, cost, training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stam.errors import require_choice
from stam.evaluation.outcomes import TOP
from stam.evaluation.results import Curve, Evaluation, Reliability
from stam.show.figures.style import (
    COLUMN,
    LIGHT,
    LINES,
    PAGE,
    SMALL,
    Theme,
    colour_and_line,
    dress,
    legend,
    new_figure,
    plain,
)

X_LABELS = {
    "glimpses": "glimpses sensed",
    "pixels": "pixels sensed",
    "share": "share of the scene sensed (%)",
}


def x_values(evaluation: Evaluation, x: str) -> np.ndarray:
    """Returns what the glimpses of an evaluation are counted in: glimpses, pixels or share of the scene."""
    require_choice("x", x, tuple(X_LABELS))
    if x == "glimpses":
        return np.arange(1, evaluation.num_glimpses + 1)
    return np.array(evaluation.pixels) if x == "pixels" else 100 * np.array(evaluation.share)


def draw_curve(
    axes: Axes,
    at: np.ndarray,
    curve: Curve,
    label: str,
    theme: Theme,
    position: int = 0,
) -> None:
    """Draws a mean in per cent, with the band that every figure has: the 95 % interval over images.

    Results before 1.4 have no interval and are drawn without a band.
    """
    draw_band(axes, at, curve.mean, curve.low, curve.high, label, theme, position)


def draw_band(
    axes: Axes,
    at: np.ndarray,
    mean: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    label: str,
    theme: Theme,
    position: int = 0,
) -> None:
    """Draws shares as per cent, with a band from low to high where those are known."""
    middle, lower, upper = (100 * np.array(values) for values in (mean, low, high))
    colour, line = colour_and_line(theme, position)
    label = plain(label)
    if len(at) == 1:
        reach = np.maximum(0, [middle - lower, upper - middle]) if len(lower) else None
        axes.errorbar(at, middle, yerr=reach, fmt="o", color=colour, label=label, markersize=4)
        return
    axes.plot(at, middle, color=colour, linestyle=line, linewidth=1.8, label=label)
    if len(lower):
        axes.fill_between(at, lower, upper, color=colour, alpha=0.22, linewidth=0)


def accuracy(evaluation: Evaluation, x: str = "glimpses", theme: Theme = LIGHT) -> Figure:
    """Accuracy against glimpses, pixels or share of the scene, with the ceiling and the honest competitor."""
    figure, ((axes,),) = new_figure(COLUMN, 3.5)
    at = x_values(evaluation, x)
    dress(axes, theme, X_LABELS[x], "top-1 accuracy (%)")
    label = f"agent, {evaluation.policy} policy"
    draw_curve(axes, at, evaluation.accuracy.ensemble.top1, label, theme)
    whole = evaluation.whole_image
    if whole is not None:
        if whole.low_resolution:
            low = 100 * np.array([each.top1 for each in whole.low_resolution])
            label = "teacher, whole image at low resolution, as many pixels"
            places = at[[each.num_glimpses - 1 for each in whole.low_resolution]]
            axes.plot(places, low, color=theme.colours[1], linestyle="--", linewidth=1.5, label=label)
        ceiling = 100 * whole.top1
        axes.axhline(ceiling, color=theme.ink, linestyle=":", linewidth=1.3, label="teacher, whole image")
    count_axis(axes, at, x)
    if x == "glimpses":
        _share_on_top(axes, evaluation, theme)
    legend(figure, theme, columns=1)
    return figure


def policies(accuracies: Mapping[str, Sequence[float]], title: str = "", theme: Theme = LIGHT) -> Figure:
    """Accuracy against glimpses for several ways of looking; the first is drawn strongest."""
    figure, ((axes,),) = new_figure(PAGE * 0.7, 3.4)
    dress(axes, theme, X_LABELS["glimpses"], "top-1 accuracy (%)", title)
    at = np.arange(1, 1 + max(len(values) for values in accuracies.values()))
    label_at: dict[str, float] = {}
    for name, values in sorted(accuracies.items(), key=lambda item: item[1][-1]):
        label_at[name] = max(100 * values[-1], *(place + 4.5 for place in label_at.values()), 0.0)
    for position, (name, values) in enumerate(accuracies.items()):
        colour, line = colour_and_line(theme, position)
        width = 1.5 if position else 2.6
        axes.plot(at[: len(values)], 100 * np.array(values), color=colour, linestyle=line, linewidth=width)
        axes.annotate(
            f"{name} {100 * values[-1]:.0f}",
            (at[-1] * 1.01, label_at[name]),
            va="center",
            fontsize=SMALL,
            color=colour,
        )
    count_axis(axes, at, "glimpses")
    axes.set_xlim(right=at[-1] * 1.16)  # room for the names
    return figure


def count_axis(axes: Axes, at: np.ndarray, x: str) -> None:
    """Gives the axis of glimpses, pixels or share its limits and ticks."""
    axes.set_xlim(0 if x != "glimpses" else min(1, at[0]) - 0.02 * (at[-1] - at[0]), at[-1] + 0.02 * at[-1])
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    if x == "pixels" and at[-1] >= 10_000:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}K" if value else "0"))


def _share_on_top(axes: Axes, evaluation: Evaluation, theme: Theme) -> None:
    if evaluation.grid is None:  # looks may differ in size
        return
    scale = 100 / evaluation.grid.num_locations
    top = axes.secondary_xaxis(
        "top", functions=(lambda n: np.asarray(n) * scale, lambda share: np.asarray(share) / scale)
    )
    top.set_xlabel(X_LABELS["share"], fontsize=SMALL, color=theme.muted)
    top.tick_params(colors=theme.muted, labelsize=SMALL, length=3)
    top.spines["top"].set_color(theme.grid)


def readouts(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure | None:
    """Top-1 and top-5 accuracy of the ensemble and of each classifier; `None` where there is only one.

    Top-5 is left out where there are no more than five classes.
    """
    if evaluation.accuracy.class_head is None:
        return None
    tops = ("top1", "top5") if len(evaluation.data.classes) > TOP else ("top1",)
    figure, panels = new_figure(COLUMN, 4.6 if len(tops) > 1 else 3.5, len(tops), 1, sharex=True)
    at = x_values(evaluation, "glimpses")
    each = {
        "ensemble": evaluation.accuracy.ensemble,
        "class token alone": evaluation.accuracy.class_head,
        "distillation token alone": evaluation.accuracy.distill_head,
    }
    for (axes,), top in zip(panels, tops, strict=True):
        last = top == tops[-1]
        dress(axes, theme, X_LABELS["glimpses"] if last else "", f"top-{top[-1]} accuracy (%)")
        for position, (label, readout) in enumerate(each.items()):
            draw_curve(axes, at, getattr(readout, top), label, theme, position)
        count_axis(axes, at, "glimpses")
    legend(figure, theme, columns=2)
    return figure


def early_exit(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure:
    """Accuracy against the mean number of glimpses, as the threshold rises from 0 to 1."""
    figure, ((axes,),) = new_figure(COLUMN, 3.5)
    dress(axes, theme, "mean glimpses a scene", "top-1 accuracy (%)")
    fixed = evaluation.accuracy.ensemble.top1.mean
    at = x_values(evaluation, "glimpses")
    axes.plot(
        at,
        100 * np.array(fixed),
        color=theme.muted,
        linestyle=":",
        linewidth=1.5,
        label="fixed number, no early stop",
    )
    found = evaluation.early_exit
    for position, (label, sweep) in enumerate(
        (("early exit, as trained", found.uncalibrated), ("early exit, calibrated", found.calibrated))
    ):
        glimpses, share = np.array(sweep.mean_glimpses), 100 * np.array(sweep.accuracy)
        colour = theme.colours[1 - position]
        axes.plot(glimpses, share, color=colour, linestyle=LINES[1 - position], linewidth=1.8, label=label)
    _mark_thresholds(axes, evaluation, theme)
    fit = found.fit
    axes.plot(
        fit.reported.mean_glimpses,
        100 * fit.reported.accuracy,
        marker="*",
        markersize=12,
        linestyle="none",
        color=theme.colours[2],
        markeredgecolor=theme.page,
        label=f"fitted threshold {fit.threshold:.3f}, on the held-out half",
    )
    count_axis(axes, at, "glimpses")
    legend(figure, theme, columns=1)
    return figure


def _mark_thresholds(axes: Axes, evaluation: Evaluation, theme: Theme) -> None:
    """Writes a few thresholds beside the calibrated curve, as far apart as they stay legible."""
    sweep = evaluation.early_exit.calibrated
    last = -np.inf
    apart = 0.22 * evaluation.num_glimpses
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        if threshold not in sweep.thresholds:
            continue
        place = sweep.thresholds.index(threshold)
        glimpses, share = sweep.mean_glimpses[place], 100 * sweep.accuracy[place]
        if glimpses - last < apart:
            continue
        last = glimpses
        axes.plot(glimpses, share, "o", color=theme.colours[0], markersize=4)
        axes.annotate(
            rf"$\gamma$ = {threshold:g}",
            (glimpses, share),
            xytext=(5, -3),
            textcoords="offset points",
            va="top",
            fontsize=SMALL,
            color=theme.ink,
            path_effects=[withStroke(linewidth=2.5, foreground=theme.page)],
        )


def exits(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure:
    """After how many glimpses the agent stops, at the fitted threshold, on the held-out half."""
    figure, ((axes,),) = new_figure(COLUMN, 2.6)
    fit = evaluation.early_exit.fit
    counts = np.array(fit.exits, dtype=float)
    dress(axes, theme, X_LABELS["glimpses"], "scenes that stop here (%)")
    at = x_values(evaluation, "glimpses")
    axes.bar(at, 100 * counts / counts.sum(), color=theme.colours[0], width=0.8)
    mean = fit.reported.mean_glimpses
    axes.axvline(
        mean, color=theme.colours[1], linestyle="--", linewidth=1.5, label=f"mean: {mean:.1f} glimpses"
    )
    axes.grid(False, axis="x")
    count_axis(axes, at, "glimpses")
    legend(figure, theme)
    return figure


def reliability(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure:
    """Confidence against accuracy before and after calibration, with how many predictions lie where."""
    figure, panels = new_figure(
        COLUMN, 3.3, 2, 2, sharex=True, sharey="row", gridspec_kw={"height_ratios": (3, 1)}
    )
    found = evaluation.calibration
    sides: tuple[tuple[str, Reliability], ...] = (
        ("as trained", found.before),
        (f"temperature {found.temperature:.2f}", found.after),
    )
    for column, (title, side) in enumerate(sides):
        upper, lower = panels[0, column], panels[1, column]
        first = column == 0
        dress(upper, theme, "", "accuracy (%)" if first else "", f"{title}\nECE {100 * side.ece:.1f} %")
        dress(lower, theme, "confidence (%)", "answers\n(%)" if first else "")
        bins = len(side.counts)
        middle = 100 * (np.arange(bins) + 0.5) / bins
        counts = np.array(side.counts, dtype=float)
        filled = counts > 0
        upper.plot((0, 100), (0, 100), color=theme.muted, linestyle=":", linewidth=1.3)
        width = 0.9 * 100 / bins
        right = 100 * np.array(side.accuracy)
        upper.bar(middle[filled], right[filled], width=width, color=theme.colours[column])
        confidence = 100 * np.array(side.confidence)
        upper.plot(
            confidence[filled],
            right[filled],
            "o",
            color=theme.ink,
            markersize=2.5,
            label="mean confidence of the bin",
        )
        lower.bar(middle, 100 * counts / counts.sum(), width=width, color=theme.colours[column])
        upper.set_xlim(0, 100)
        upper.set_ylim(0, 100)
        upper.xaxis.set_major_locator(MaxNLocator(4))
        lower.yaxis.set_major_locator(MaxNLocator(2))
    return figure


def multiply_adds(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure | None:
    """Multiply-adds of each step and of all so far, beside one look at the whole image."""
    cost = evaluation.cost
    if cost is None:
        return None
    figure, ((axes,),) = new_figure(COLUMN, 3.2)
    at = x_values(evaluation, "glimpses")
    largest = max(cost.cumulative)
    unit, divisor = ("G", 1e9) if largest >= 1e9 else ("M", 1e6)
    dress(axes, theme, X_LABELS["glimpses"], f"multiply-adds ({unit})")
    for position, (label, values) in enumerate(
        (("this step", cost.per_step), ("all steps so far", cost.cumulative))
    ):
        axes.plot(
            at,
            np.array(values) / divisor,
            color=theme.colours[position],
            linestyle=LINES[position],
            linewidth=1.8,
            label=label,
        )
    axes.axhline(
        cost.whole_image / divisor,
        color=theme.ink,
        linestyle=":",
        linewidth=1.3,
        label="the core, once, on the whole image",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    count_axis(axes, at, "glimpses")
    legend(figure, theme)
    return figure


def latency(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure | None:
    """Measured time of each step and of all so far, for each batch size, as milliseconds a scene."""
    cost = evaluation.cost
    if cost is None or not cost.latency:
        return None
    figure, ((axes,),) = new_figure(COLUMN, 3.4)
    at = x_values(evaluation, "glimpses")
    device = cost.latency[0].device
    threads = cost.latency[0].threads
    where = f"{device}, {threads} thread{'' if threads == 1 else 's'}" if device == "cpu" else device
    dress(axes, theme, X_LABELS["glimpses"], "milliseconds a scene", where)
    for position, measured in enumerate(cost.latency):
        colour, size = theme.colours[position], measured.batch_size
        for label, line, values in (
            ("this step", "-", measured.per_step_ms),
            ("all so far", "--", measured.cumulative_ms),
        ):
            scaled = np.array(values) / size
            axes.plot(at, scaled, color=colour, linestyle=line, linewidth=1.6, label=f"batch {size}, {label}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    count_axis(axes, at, "glimpses")
    legend(figure, theme)
    return figure


def training(metrics: Sequence[Mapping[str, Any]], theme: Theme = LIGHT) -> Figure | None:
    """Losses and validation accuracy over the epochs of a run, from the lines of its `metrics.jsonl`."""
    losses = sorted({key for line in metrics for key in line if key.startswith("loss/")})
    checks = sorted(
        {key for line in metrics for key in line if key.startswith("val/accuracy@")},
        key=lambda key: int(key.split("@")[1]),
    )
    if not losses or len(metrics) < 2:
        return None
    figure, ((upper,), (lower,)) = new_figure(COLUMN, 5.0, 2, 1, sharex=True)
    dress(upper, theme, "", "loss")
    dress(lower, theme, "epoch", "validation accuracy (%)")
    for axes, keys, scale in ((upper, losses, 1.0), (lower, checks[:: -(-len(checks) // 5) or 1], 100.0)):
        for position, key in enumerate(keys):
            points = [(line["epoch"] + 1, scale * line[key]) for line in metrics if key in line]
            label = key.split("/")[1].replace("accuracy@", "glimpses: ")
            colour, line = colour_and_line(theme, position)
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=line, linewidth=1.5, label=label)
        if keys:
            box = axes.legend(fontsize=SMALL, labelcolor=theme.ink, ncols=2, facecolor=theme.page)
            box.get_frame().set_linewidth(0)
    lower.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    return figure
