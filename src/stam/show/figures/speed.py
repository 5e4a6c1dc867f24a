"""How fast training is: images a second and memory, against batch and glimpses."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stam.evaluation.speed import TrainingSpeed
from stam.show.figures.style import LIGHT, LINES, PAGE, TEXT, Theme, dress, legend, new_figure

QUANTITIES = {"images_per_second": "images a second", "memory_gib": "memory (GiB)"}


def training_speed(speeds: Sequence[TrainingSpeed], theme: Theme = LIGHT) -> Figure:
    """Draws every core size against the batch (at its most glimpses) and glimpses (at its largest batch)."""
    shown = [name for name in QUANTITIES if any(getattr(speed, name) is not None for speed in speeds)]
    figure, grid = new_figure(PAGE, 2.8 * len(shown), len(shown), 2)
    sizes = list(dict.fromkeys(speed.size for speed in speeds))
    for row, quantity in zip(grid, shown, strict=True):
        for axes, x, fixed in zip(
            row, ("batch_size", "num_glimpses"), ("num_glimpses", "batch_size"), strict=True
        ):
            dress(axes, theme, {"batch_size": "batch", "num_glimpses": "glimpses"}[x], QUANTITIES[quantity])
            for position, size in enumerate(sizes):
                own = [speed for speed in speeds if speed.size == size and speed.source == "device"]
                most = max((getattr(speed, fixed) for speed in own), default=0)
                points = sorted(
                    (getattr(speed, x), getattr(speed, quantity))
                    for speed in own
                    if getattr(speed, fixed) == most and getattr(speed, quantity) is not None
                )
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=4,
                    color=theme.colours[position],
                    linestyle=LINES[position],
                    label=size,
                )
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.set_title(
                "at the most glimpses" if x == "batch_size" else "at the largest batch",
                fontsize=TEXT,
                color=theme.ink,
            )
    legend(figure, theme)
    return figure
