"""Pictures of scenes: where the agent looks, what it saw so far, where it wants to look next."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from stam.evaluation.examples import Example
from stam.evaluation.results import Evaluation
from stam.show.figures.style import HEAT, LIGHT, PAGE, SMALL, Theme, new_figure
from stam.show.pictures import Story, draw_frame, draw_scene, readable, views_of

RIGHT, WRONG = "✓", "✗"
_FINE = 336  # pixels of a frame's longer side, enough for print
_MAP_COUNTS = (1, 2, 3, 5, 8, 13, 21)


def story_of(example: Example, num_glimpses: int | None = None) -> Story:
    """Returns what is drawn of an example: all of it, or its first glimpses."""
    kept = slice(num_glimpses)
    names = [readable(name) for name in example.classes]
    return Story(
        name=names[example.label],
        image=example.image,
        grid=example.grid,
        locations=example.locations[kept].tolist(),
        labels=[names[prediction] for prediction in example.predictions[kept].tolist()],
        confidences=example.confidences[kept].tolist(),
        right=example.is_right[kept].tolist(),
        views=views_of(example.boxes[kept], example.sizes[kept]),
        shares=(example.pixels[kept] / np.prod(example.image.shape[:2])).tolist(),
    )


def location_histograms(
    evaluation: Evaluation, num_steps: int = 21, theme: Theme = LIGHT, columns: int = 7
) -> Figure | None:
    """How often each location is sensed at each step, one panel a step (the paper's Figure 5)."""
    grid = evaluation.grid
    if grid is None or evaluation.locations is None:
        return None
    counts = np.array(evaluation.locations.counts, dtype=float)[:num_steps]
    share = 100 * counts / counts.sum(axis=1, keepdims=True)
    columns = min(columns, len(share))
    rows = -(-len(share) // columns)
    cell_height, cell_width = grid.glimpse_size
    aspect = cell_height / cell_width
    # All panels are one picture: cells of the grid, with room for a number above each panel.
    across, down = grid.columns + 0.12 * grid.columns, grid.rows + 0.32 * grid.columns / aspect
    figure, ((axes,),) = new_figure(4.6, 4.5 * aspect * (rows * down) / (columns * across) + 0.7)
    bare(axes)
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(share.max()), 1e-9))
    for step, panel in enumerate(share):
        top, left = (step // columns) * down, (step % columns) * across
        axes.imshow(
            panel.reshape(grid.rows, grid.columns),
            cmap=HEAT,
            norm=norm,
            extent=(left, left + grid.columns, top + grid.rows, top),
            interpolation="nearest",
        )
        name = f"glimpse {step + 1}" if step == 0 else str(step + 1)
        place = (left + grid.columns / 2, top - 0.04 * down)
        axes.text(*place, name, ha="center", va="bottom", fontsize=SMALL, color=theme.ink)
    axes.set_xlim(-0.02 * across, columns * across - 0.1 * grid.columns)
    axes.set_ylim(rows * down - 0.28 * grid.columns / aspect, -0.3 * grid.columns / aspect)
    axes.set_aspect(aspect)
    axes.set_facecolor("none")
    bar = figure.colorbar(
        ScalarMappable(norm, HEAT), ax=axes, location="bottom", aspect=40, shrink=0.8, pad=0.02
    )
    _dress_bar(bar, theme, "scenes in which the agent looks here (%)")
    return figure


def first_locations(evaluation: Evaluation, theme: Theme = LIGHT) -> Figure | None:
    """Accuracy over the first glimpses by where looking begins; `None` where it was not measured."""
    found, grid = evaluation.first_locations, evaluation.grid
    if found is None or grid is None:
        return None
    figure, ((axes,),) = new_figure(3.4, 3.4 * grid.image_size[0] / grid.image_size[1] + 0.5)
    bare(axes)
    share = 100 * np.array(found.accuracy).reshape(grid.rows, grid.columns)
    image = axes.imshow(share, cmap=HEAT, aspect=grid.glimpse_size[0] / grid.glimpse_size[1])
    for row, column in np.ndindex(*share.shape):
        dark = share[row, column] < (share.min() + share.max()) / 2
        colour, text = "white" if dark else "black", f"{share[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color=colour)
    for location, colour in ((found.present, theme.colours[5]), (found.chosen, theme.colours[1])):
        row, column = grid.row_column(location)
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=2, clip_on=False))
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, shrink=0.8, pad=0.02)
    _dress_bar(bar, theme, f"mean accuracy over the first {found.num_glimpses} glimpses (%)")
    return figure


def bare(axes: Axes) -> None:
    """Leaves nothing but the picture."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _dress_bar(bar: object, theme: Theme, label: str) -> None:
    bar.set_label(label, fontsize=SMALL, color=theme.ink)  # type: ignore[attr-defined]
    bar.ax.tick_params(colors=theme.ink, labelsize=SMALL, length=2)  # type: ignore[attr-defined]
    bar.outline.set_visible(False)  # type: ignore[attr-defined]


def shorten(text: str, length: int = 13) -> str:
    """Cuts a long class name, with an ellipsis, so that it fits under a picture."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def verdict(story: Story, count: int, length: int = 13) -> str:
    """Returns the answer and its confidence after so many glimpses, with a mark for right or wrong."""
    mark = RIGHT if story.right and story.right[count - 1] else WRONG
    return f"{mark} {shorten(story.labels[count - 1], length)}\n{100 * story.confidences[count - 1]:.0f} %"


def trajectory(
    example: Example, steps: Sequence[int] | None = None, theme: Theme = LIGHT, columns: int = 8
) -> Figure:
    """The scene, then what the agent saw after each glimpse, with its answer under each (Figure 4).

    Args:
        example: The scene and what the agent made of it.
        steps: Numbers of glimpses to show; by default the first fifteen.
        theme: Colours.
        columns: Pictures in a row.
    """
    story = story_of(example)
    shown = list(steps or range(1, min(story.num_glimpses, 2 * columns - 1) + 1))
    rows = -(-(len(shown) + 1) // columns)
    aspect = example.image.shape[0] / example.image.shape[1]
    figure, panels = new_figure(PAGE, rows * (PAGE / columns * aspect + 0.5), rows, columns)
    for axes in panels.flat[len(shown) + 1 :]:
        axes.set_visible(False)
    first = panels.flat[0]
    picture(first, draw_scene(story, _FINE), theme)
    first.set_title("the scene", fontsize=SMALL, color=theme.muted, pad=2)
    first.set_xlabel(f"true class:\n{shorten(story.name)}", fontsize=SMALL, color=theme.ink)
    for axes, count in zip(panels.flat[1:], shown, strict=False):
        picture(axes, draw_frame(story, count, _FINE), theme)
        axes.set_title(f"{count}", fontsize=SMALL, color=theme.muted, pad=2)
        colour = theme.colours[0 if example.is_right[count - 1] else 1]
        axes.set_xlabel(verdict(story, count), fontsize=SMALL, color=colour)
    return figure


def picture(axes: Axes, frame: Image.Image, theme: Theme) -> None:
    """Shows a frame, and nothing around it."""
    bare(axes)
    axes.set_facecolor(theme.grid)  # seen where the frame is transparent
    axes.imshow(frame, interpolation="antialiased")


def map_counts(example: Example) -> list[int]:
    """Returns after how many glimpses policy maps are shown; none for an example without maps."""
    return [count for count in _MAP_COUNTS if count < len(example.locations)] if example.has_maps else []


def highest_chance(example: Example, counts: Sequence[int]) -> float:
    """Returns the largest probability of any location in the policy maps after these glimpses."""
    return max(float(example.maps[count - 1].max()) for count in counts)


def draw_map(example: Example, count: int, highest: float, longer_side: int = _FINE) -> Image.Image:
    """Draws what was seen after so many glimpses, and over the rest the policy's probabilities as colours."""
    colours = colormaps[HEAT](example.maps[count - 1].astype(float) / highest, bytes=True)[:, :3]
    return draw_frame(story_of(example), count, longer_side, colours)


def policy_maps(
    example: Example, steps: Sequence[int] | None = None, theme: Theme = LIGHT, columns: int = 6
) -> Figure | None:
    """Where the agent wants to look next, after some glimpses; `None` without a learned policy."""
    shown = list(steps or map_counts(example)[:columns])
    if not shown or not example.has_maps:
        return None
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    aspect = example.image.shape[0] / example.image.shape[1]
    width = 4.6
    figure, panels = new_figure(width, rows * (width / columns * aspect + 0.25) + 0.55, rows, columns)
    highest = highest_chance(example, shown)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, count in zip(panels.flat, shown, strict=False):
        picture(axes, draw_map(example, count, highest), theme)
        axes.set_title(f"after {count}", fontsize=SMALL, color=theme.ink, pad=2)
    colours = ScalarMappable(Normalize(0, 100 * highest), HEAT)
    bar = figure.colorbar(colours, ax=panels, location="bottom", aspect=40, shrink=0.8, pad=0.02)
    _dress_bar(bar, theme, "probability of looking here next (%)")
    return figure
