"""What an agent looks through: a sensor yields one glimpse at a time.

The contract is one method and one attribute, so that a camera on a gimbal, a microscope stage or a file on
a slow link can be one. `check_sensor` tests somebody else's sensor against it.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stam.errors import SensorError
from stam.scene.grid import Grid, Location
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD, normalise, to_rgb
from stam.shapes import Float


@runtime_checkable
class Sensor(Protocol):
    """Senses one scene.

    `sense` takes a location, as a grid index or (row, column), and returns the glimpse there as a float
    tensor (channels, height, width), normalised as the agent expects. Sensing the same location twice is
    allowed, and a glimpse once returned never changes.
    """

    grid: Grid

    def sense(self, location: Location) -> Tensor:
        """Returns the glimpse at a location."""
        ...


def as_pixels(
    value: Any,
    size: tuple[int, int],
    what: str = "glimpse",
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
) -> Float[Tensor, "channels height width"]:
    """Reads a glimpse or scene in any form a sensor may hand over, or says what is wrong with it.

    Bytes (a PIL image, or uint8 as (height, width, channels) or (channels, height, width)) are normalised
    here; floats (channels, height, width) are taken as normalised already.
    """
    channels = len(mean)
    if isinstance(value, Image.Image):
        try:
            value = np.array(to_rgb(value) if channels == 3 else to_rgb(value).convert("L"))
        except ValueError as error:
            raise SensorError(f"a {what} cannot be read: {error}") from error
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(np.ascontiguousarray(value))
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise SensorError(f"a {what} must be a tensor, an array or a PIL image, got {kind}") from error
    if value.ndim == 2 and channels == 1:
        value = value[None]
    if value.dtype == torch.uint8 and tuple(value.shape) == (*size, channels) != (channels, *size):
        value = value.permute(2, 0, 1)
    if tuple(value.shape) != (channels, *size):
        raise SensorError(
            f"a {what} must be (channels, height, width) = {(channels, *size)}, got {tuple(value.shape)}"
        )
    if value.dtype == torch.uint8:
        return normalise(value, mean, std)
    if not value.is_floating_point():
        raise SensorError(
            f"a {what} must be uint8 in 0..255 or normalised floats, got {value.dtype}: convert it first"
        )
    if not torch.isfinite(value).all():
        raise SensorError(f"a {what} holds NaN or infinity: drop it and sense that location again")
    return value.float()


class ImageSensor:
    """A sensor over an image that lies in memory: a tensor (C, H, W), or a PIL image."""

    def __init__(
        self,
        image: Tensor | Image.Image,
        grid: Grid,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        if isinstance(image, Image.Image) and image.size != (grid.image_size[1], grid.image_size[0]):
            raise SensorError(
                f"the image is {image.size[1]}x{image.size[0]}, the grid needs "
                f"{grid.image_size[0]}x{grid.image_size[1]}: resize or crop it first"
            )
        self.grid = grid
        self._image = as_pixels(image, grid.image_size, "scene", mean, std)

    def sense(self, location: Location) -> Float[Tensor, "channels height width"]:
        """Returns a copy of the glimpse at a location."""
        top, left, bottom, right = self.grid.pixel_box(location)
        return self._image[:, top:bottom, left:right].clone()


class CallbackSensor:
    """A sensor that asks a function for each glimpse: `callback(row, column)` returns what was sensed.

    The function may return a PIL image, uint8 pixels, or normalised floats. What it raises is passed on.
    """

    def __init__(
        self,
        callback: Callable[[int, int], Any],
        grid: Grid,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        self.grid = grid
        self._callback = callback
        self._mean, self._std = mean, std

    def sense(self, location: Location) -> Float[Tensor, "channels height width"]:
        """Asks the callback for the glimpse at a location."""
        sensed = self._callback(*self.grid.row_column(location))
        return as_pixels(sensed, self.grid.glimpse_size, "glimpse", self._mean, self._std)


def check_sensor(
    sensor: Any, channels: int = 3, locations: list[int] | None = None, noise: float = 0.1
) -> None:
    """Raises `SensorError` at the first way in which a sensor breaks the contract.

    Args:
        sensor: The sensor to check.
        channels: Channels a glimpse must have.
        locations: Grid indices to try; by default the four corners and the centre.
        noise: How much two glimpses of one place may differ, on average over their normalised pixels; a
            camera never sends the same pixels twice. 0.1 is some 6 of 255 grey levels.
    """
    grid = getattr(sensor, "grid", None)
    if not isinstance(grid, Grid):
        raise SensorError("a sensor needs an attribute `grid` holding a stam.scene.grid.Grid")
    if not callable(getattr(sensor, "sense", None)):
        raise SensorError("a sensor needs a method `sense(location)`")
    last = grid.num_locations - 1
    corners = [0, grid.columns - 1, last - grid.columns + 1, last]
    tried = [*corners, grid.centre] if locations is None else locations
    kept: list[tuple[int, Tensor, Tensor]] = []
    for location in dict.fromkeys(tried):
        glimpse = sensor.sense(location)
        _check_glimpse(glimpse, grid, channels, location)
        again = sensor.sense(grid.row_column(location))
        if glimpse.shape != again.shape or float((glimpse - again).abs().mean()) > noise:
            raise SensorError(
                f"location {location} and {grid.row_column(location)} are one place, but sensed differently"
            )
        kept.append((location, glimpse, glimpse.clone()))
    for location, glimpse, copy in kept:
        if not torch.equal(glimpse, copy):
            raise SensorError(
                f"the glimpse of location {location} changed later: return a copy, not a buffer"
            )
    for outside in (-1, grid.num_locations):
        try:
            sensor.sense(outside)
        except Exception:
            continue
        raise SensorError(f"location {outside} is not on the grid, but the sensor returned a glimpse for it")


def _check_glimpse(glimpse: Any, grid: Grid, channels: int, location: int) -> None:
    where = f"the glimpse of location {location}"
    if not isinstance(glimpse, Tensor):
        raise SensorError(f"{where} must be a torch.Tensor, got {type(glimpse).__name__}")
    if not glimpse.is_floating_point():
        raise SensorError(f"{where} must hold normalised floats, got {glimpse.dtype}")
    expected = (channels, *grid.glimpse_size)
    if tuple(glimpse.shape) != expected:
        raise SensorError(f"{where} must have the shape {expected}, got {tuple(glimpse.shape)}")
    if not torch.isfinite(glimpse).all():
        raise SensorError(f"{where} holds NaN or infinity")
