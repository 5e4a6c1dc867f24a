"""How every figure looks: sizes, colours for a light and a dark page, and saving."""

import base64
import io
from dataclasses import dataclass
from typing import Any

from stam.errors import require_package

require_package("matplotlib", extra="figures")

import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: E402

COLUMN = 3.9  # inches: a column of a page; legible when shrunk to 3.3
PAGE = 7.4  # inches: the whole width of a page
TEXT, SMALL = 9.0, 8.0  # points


@dataclass(frozen=True)
class Theme:
    """Colours of a figure; the palette can be told apart by colour-blind readers (Okabe and Ito's).

    Attributes:
        name: What it is called.
        ink: Text and axes.
        muted: What should stand back.
        grid: Grid lines.
        page: What lies behind a saved picture.
        colours: Lines, in order of use.
    """

    name: str
    ink: str
    muted: str
    grid: str
    page: str
    colours: tuple[str, ...]


LIGHT = Theme(
    name="light",
    ink="#1a1a1a",
    muted="#666666",
    grid="#e3e3e3",
    page="#ffffff",
    colours=(
        "#0072b2",
        "#d55e00",
        "#009e73",
        "#aa4499",
        "#b8860b",
        "#3ba3d8",
        "#5a5a5a",
        "#8b4513",
        "#c2185b",
    ),
)
DARK = Theme(
    name="dark",
    ink="#e8e8e8",
    muted="#a8a8a8",
    grid="#3a3d42",
    page="#16181c",
    colours=(
        "#56b4e9",
        "#f58a42",
        "#2fc79c",
        "#dd8fc4",
        "#f0e442",
        "#8ab6ff",
        "#bdbdbd",
        "#c99a6b",
        "#ff6f91",
    ),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
HEAT = "cividis"


def colour_and_line(theme: Theme, position: int) -> tuple[str, Any]:
    """Returns how the line at a position is drawn; those beyond the last colour have another line style."""
    turn, number = divmod(position, len(theme.colours))
    return theme.colours[number], LINES[(number + turn) % len(LINES)]


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **settings: Any
) -> tuple[Figure, np.ndarray]:
    """Makes a figure, apart from pyplot's global state, and its axes (rows, columns)."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def dress(axes: Axes, theme: Theme, x_label: str = "", y_label: str = "", title: str = "") -> None:
    """Gives axes their labels, colours and grid."""
    axes.set_xlabel(x_label, fontsize=TEXT, color=theme.ink)
    axes.set_ylabel(y_label, fontsize=TEXT, color=theme.ink)
    if title:
        axes.set_title(title, fontsize=TEXT, color=theme.ink)
    axes.tick_params(colors=theme.ink, labelsize=SMALL, length=3, which="both")
    axes.tick_params(which="minor", length=1.5)
    axes.grid(True, color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)


def plain(name: str) -> str:
    """Returns a name as matplotlib shows it to the letter: neither as a formula nor left out of a legend."""
    escaped = name.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def legend(figure: Figure, theme: Theme, columns: int = 2, axes: Axes | None = None) -> None:
    """Puts the legend below the axes, where it cannot lie on a curve."""
    handles, labels = (axes or figure.axes[0]).get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        frameon=False,
        fontsize=SMALL,
        labelcolor=theme.ink,
        handlelength=2.2,
        columnspacing=1.2,
    )


def to_bytes(
    figure: Figure, kind: str = "png", theme: Theme = LIGHT, transparent: bool = False, dpi: int = 200
) -> bytes:
    """Renders a figure as `png` or `svg`; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    background = "none" if transparent else theme.page
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "stam", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, dpi=dpi, facecolor=background, metadata=metadata)
    return buffer.getvalue()


def data_uri(content: bytes, media_type: str) -> str:
    """Returns bytes as an address that a page can carry in itself."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
