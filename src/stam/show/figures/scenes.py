"""Pictures of scenes: where the agent looks, what it saw so far, where it wants to look next."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from stam.evaluation.examples import Example
from stam.evaluation.results import Evaluation
from stam.show.figures.style import HEAT, LIGHT, PAGE, SMALL, Theme, dress, new_figure

RIGHT, WRONG = "✓", "✗"
NEWEST = "#ff9f1c"  # the outline of the newest glimpse; seen on dark and on bright scenes
NEXT = "#ffffff"
UNSEEN = 112


def location_histograms(
    evaluation: Evaluation, num_steps: int = 21, theme: Theme = LIGHT, columns: int = 7
) -> Figure:
    """How often each location is sensed at each step, one panel a step (the paper's Figure 5)."""
    grid = evaluation.grid
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


def outline(axes: Axes, example: Example, location: int, colour: str, width: float = 1.6) -> Rectangle:
    """Draws a frame around a glimpse, and returns it."""
    top, left, bottom, right = example.grid.pixel_box(location)
    frame = Rectangle(
        (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=width
    )
    axes.add_patch(frame)
    return frame


def shorten(text: str, length: int = 13) -> str:
    """Cuts a long class name, with an ellipsis, so that it fits under a picture."""
    text = text.replace("_", " ")
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def verdict(example: Example, step: int, length: int = 13) -> str:
    """Returns the label and confidence after a glimpse, with a mark for right or wrong."""
    label = shorten(example.classes[int(example.predictions[step])], length)
    mark = RIGHT if example.is_right[step] else WRONG
    return f"{mark} {label}\n{100 * example.confidences[step]:.0f} %"


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
    shown = list(steps or range(1, min(len(example.locations), 2 * columns - 1) + 1))
    rows = -(-(len(shown) + 1) // columns)
    aspect = example.grid.image_size[0] / example.grid.image_size[1]
    figure, panels = new_figure(PAGE, rows * (PAGE / columns * aspect + 0.5), rows, columns)
    colours = {True: theme.colours[0], False: theme.colours[1]}
    for axes in panels.flat[len(shown) + 1 :]:
        axes.set_visible(False)
    first = panels.flat[0]
    _picture(first, example.image)
    first.set_title("the scene", fontsize=SMALL, color=theme.muted, pad=2)
    truth = f"true class:\n{shorten(example.classes[example.label])}"
    first.set_xlabel(truth, fontsize=SMALL, color=theme.ink)
    for axes, count in zip(panels.flat[1:], shown, strict=False):
        _picture(axes, example.seen(count, UNSEEN))
        outline(axes, example, int(example.locations[count - 1]), NEWEST)
        axes.set_title(f"{count}", fontsize=SMALL, color=theme.muted, pad=2)
        colour = colours[bool(example.is_right[count - 1])]
        axes.set_xlabel(verdict(example, count - 1), fontsize=SMALL, color=colour)
    return figure


def _picture(axes: Axes, image: np.ndarray) -> None:
    bare(axes)
    axes.imshow(image, interpolation="nearest" if max(image.shape) < 128 else "antialiased")


def policy_maps(
    example: Example, steps: Sequence[int] | None = None, theme: Theme = LIGHT, columns: int = 6
) -> Figure | None:
    """Where the agent wants to look next, after some glimpses; `None` without a learned policy."""
    if not example.has_maps:
        return None
    shown = list(steps or _spread_steps(len(example.locations) - 1, columns))
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    aspect = example.grid.image_size[0] / example.grid.image_size[1]
    width = 4.6
    figure, panels = new_figure(width, rows * (width / columns * aspect + 0.25) + 0.55, rows, columns)
    norm = Normalize(0, 100 * max(float(example.maps[count - 1].max()) for count in shown))
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, count in zip(panels.flat, shown, strict=False):
        draw_policy(axes, example, count, norm)
        axes.set_title(f"after {count}", fontsize=SMALL, color=theme.ink, pad=2)
    bar = figure.colorbar(
        ScalarMappable(norm, HEAT), ax=panels, location="bottom", aspect=40, shrink=0.8, pad=0.02
    )
    _dress_bar(bar, theme, "probability of looking here next (%)")
    return figure


def _spread_steps(most: int, count: int) -> list[int]:
    """Returns a few numbers of glimpses, closer together at the start."""
    wanted = [1, 2, 3, 5, 8, 13, 21, 34]
    return [n for n in wanted if n <= most][:count] or [1]


def draw_policy(axes: Axes, example: Example, count: int, norm: Normalize) -> None:
    """Draws what was seen after so many glimpses, and over the rest the policy's probabilities."""
    grid = example.grid
    seen = example.locations[:count]
    chances = 100 * example.maps[count - 1].reshape(grid.rows, grid.columns).astype(float)
    heat = ScalarMappable(norm, HEAT).to_rgba(chances, bytes=True)[..., :3]
    picture = np.repeat(np.repeat(heat, grid.glimpse_size[0], axis=0), grid.glimpse_size[1], axis=1)
    for location in seen:
        top, left, bottom, right = grid.pixel_box(int(location))
        picture[top:bottom, left:right] = example.image[top:bottom, left:right]
    _picture(axes, picture)
    outline(axes, example, int(seen[-1]), NEWEST)
    if count < len(example.locations):
        outline(axes, example, int(example.locations[count]), NEXT)


def animation(
    example: Example, num_glimpses: int = 20, theme: Theme = LIGHT, seconds_a_step: float = 0.6
) -> bytes:
    """Returns an animated GIF: the scene uncovered glimpse by glimpse, and the agent's confidence."""
    most = min(num_glimpses, len(example.locations))
    scene = _MovingScene(example, most, theme)
    frames = [scene.frame(count) for count in range(1, most + 1)]
    palette = frames[-1].quantize(255, dither=Image.Dither.NONE)
    quantized = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [int(1000 * seconds_a_step)] * (most - 1) + [2500]
    buffer = io.BytesIO()
    quantized[0].save(
        buffer, format="GIF", save_all=True, append_images=quantized[1:], duration=durations, loop=0
    )
    return buffer.getvalue()


class _MovingScene:
    """One figure that is drawn again for every frame: left what was seen, right the confidence."""

    def __init__(self, example: Example, most: int, theme: Theme) -> None:
        aspect = example.grid.image_size[1] / example.grid.image_size[0]
        figure, ((left, right),) = new_figure(
            2.6 * aspect + 2.6, 3.25, 1, 2, gridspec_kw={"width_ratios": (aspect, 1)}
        )
        figure.set_facecolor(theme.page)
        figure.set_dpi(100)
        self._example, self._left, self._canvas = example, left, FigureCanvasAgg(figure)
        _picture(left, example.seen(1, UNSEEN))
        left.set_title(self._answer(1), fontsize=10, color=theme.ink)
        left.set_xlabel(self._progress(1), fontsize=SMALL, color=theme.muted)
        self._frame = outline(left, example, int(example.locations[0]), NEWEST, 2.2)
        dress(right, theme, "glimpses sensed", "confidence (%)")
        (self._line,) = right.plot([], [], color=theme.muted, linewidth=1.2)
        kinds = (("right", "o", theme.colours[0]), ("wrong", "X", theme.colours[1]))
        self._points = [
            right.plot([], [], marker, color=colour, markersize=5, label=name)[0]
            for name, marker, colour in kinds
        ]
        right.set_xlim(0, most + 1)
        right.set_ylim(0, 104)
        right.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        right.legend(loc="lower right", frameon=False, fontsize=SMALL, labelcolor=theme.ink)
        for _ in range(2):  # the picture's fixed shape moves its title only once its place is known
            figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, so that nothing jumps from frame to frame

    def _answer(self, count: int) -> str:
        label = shorten(self._example.classes[int(self._example.predictions[count - 1])], 24)
        return f"{RIGHT if self._example.is_right[count - 1] else WRONG} {label}"

    def _progress(self, count: int) -> str:
        truth = shorten(self._example.classes[self._example.label], 24)
        return f"{count} of {self._example.grid.num_locations} glimpses\ntrue class: {truth}"

    def frame(self, count: int) -> Image.Image:
        """Draws the scene after so many glimpses."""
        example = self._example
        self._left.images[0].set_data(example.seen(count, UNSEEN))
        self._left.title.set_text(self._answer(count))
        self._left.xaxis.label.set_text(self._progress(count))
        top, left, _, _ = example.grid.pixel_box(int(example.locations[count - 1]))
        self._frame.set_xy((left - 0.5, top - 0.5))
        at, confidences = np.arange(1, count + 1), 100 * example.confidences[:count]
        self._line.set_data(at, confidences)
        for good, points in zip((True, False), self._points, strict=True):
            chosen = example.is_right[:count] == good
            points.set_data(at[chosen], confidences[chosen])
        self._canvas.draw()
        return Image.fromarray(np.asarray(self._canvas.buffer_rgba())[..., :3].copy())
