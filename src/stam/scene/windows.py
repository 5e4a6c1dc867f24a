"""Scenes of any size: a window of the scene is what the agent takes for its image."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from stam.errors import SensorError, require
from stam.scene.grid import Grid, Location
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD, to_rgb
from stam.scene.sensor import as_pixels
from stam.shapes import Float

Read = Callable[[int, int, int, int], Any]  # (top, left, height, width) -> those pixels of the scene


class Window(NamedTuple):
    """A rectangle of a scene, in the scene's own pixels."""

    top: int
    left: int
    height: int
    width: int


class WindowSensor:
    """Looks at a window of a scene that may be far larger than the images the agent was trained on.

    The window is cut into the agent's grid. A glimpse covers its cell of the window, however many pixels
    that is, and is resampled to the glimpse size (bicubic, as evaluation resizes images). Only the pixels
    of the cells asked for are ever read.
    """

    def __init__(
        self,
        read: Read,
        window: Window,
        grid: Grid,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        """Sets up the sensor; nothing is read yet.

        Args:
            read: `read(top, left, height, width)` returns those pixels of the scene, as a PIL image or as
                uint8 (height, width, channels).
            window: What to look at. Whole scene: `Window(0, 0, height, width)`.
            grid: The agent's grid.
            mean: The agent's channel means.
            std: The agent's channel standard deviations.
        """
        require(
            window.height >= grid.rows and window.width >= grid.columns,
            f"a window of {window.height}x{window.width} pixels cannot be cut into "
            f"{grid.rows}x{grid.columns} glimpses: use a larger one",
        )
        require(
            len(mean) in (1, 3),
            f"a window is read as a grey or RGB image, and the agent takes {len(mean)} channels: write a "
            "sensor of your own",
        )
        self.grid, self.window = grid, window
        self._read, self._mean, self._std = read, mean, std

    def scene_box(self, location: Location) -> Window:
        """Returns the rectangle of the scene that the glimpse at a location covers."""
        row, column = self.grid.row_column(location)
        top, bottom = (index * self.window.height // self.grid.rows for index in (row, row + 1))
        left, right = (index * self.window.width // self.grid.columns for index in (column, column + 1))
        return Window(self.window.top + top, self.window.left + left, bottom - top, right - left)

    def sense(self, location: Location) -> Float[Tensor, "channels height width"]:
        """Reads the pixels of a location and resamples them to a glimpse."""
        box = self.scene_box(location)
        image = _as_image(self._read(*box), box)
        height, width = self.grid.glimpse_size
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return as_pixels(image, self.grid.glimpse_size, "glimpse", self._mean, self._std)


def _as_image(pixels: Any, box: Window) -> Image.Image:
    if not isinstance(pixels, Image.Image):
        array = np.asarray(pixels)
        if array.dtype != np.uint8 or array.ndim not in (2, 3):
            raise SensorError(
                f"read must return a PIL image or uint8 (height, width, channels), got {array.dtype} "
                f"{array.shape}"
            )
        pixels = Image.fromarray(array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array)
    if pixels.size != (box.width, box.height):
        raise SensorError(
            f"read was asked for {box.height}x{box.width} pixels, got {pixels.size[1]}x{pixels.size[0]}"
        )
    try:
        return to_rgb(pixels)  # resampled as what it shows, not as numbers of a palette
    except ValueError as error:
        raise SensorError(f"what read returned cannot be used: {error}") from error


def windows(scene_size: tuple[int, int], window_size: tuple[int, int], overlap: float = 0.0) -> list[Window]:
    """Covers a scene with windows of one size, row by row; the last ones are flush with the border.

    Args:
        scene_size: (height, width) of the scene.
        window_size: (height, width) of a window; where it exceeds the scene, the scene's.
        overlap: The least share of a window that its neighbour covers too, so that what lies on a border is
            whole in one of them.
    """
    require(0 <= overlap < 1, f"overlap must be in [0, 1), got {overlap}")
    require(
        min(*scene_size, *window_size) >= 1,
        f"sizes must be at least 1 pixel, got scene {scene_size} and window {window_size}",
    )
    height, width = (min(pair) for pair in zip(scene_size, window_size, strict=True))
    tops = _starts(scene_size[0], height, overlap)
    lefts = _starts(scene_size[1], width, overlap)
    return [Window(top, left, height, width) for top in tops for left in lefts]


def _starts(whole: int, part: int, overlap: float) -> list[int]:
    stride = max(1, int(part * (1 - overlap)))
    gaps = math.ceil((whole - part) / stride)
    return [round(index * (whole - part) / gaps) for index in range(gaps + 1)] if gaps else [0]
