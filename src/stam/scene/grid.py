"""Where glimpses and patches lie in a scene.

A scene is cut into a grid of glimpses, and each glimpse into a grid of patches. A *location* is the index
`row * columns + column` of a glimpse. Patch tokens are *glimpse-major*: the patches of one glimpse stay
together, row by row; their *position* is the row-major index of the patch in the whole image.
"""

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from stam.errors import ConfigError, StamError
from stam.shapes import Float, Int

Size = int | tuple[int, int]
Location = int | tuple[int, int] | list[int]


class LocationError(StamError, ValueError):
    """A location that is not on the grid."""


def as_pair(name: str, size: Size) -> tuple[int, int]:
    """Reads a size as (height, width); one number means a square."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ConfigError(f"{name} must be one positive number or (height, width), got {size!r}")
    return pair[0], pair[1]


@dataclass(frozen=True, init=False)
class Grid:
    """The geometry of a scene: `Grid(224, 32, 16)` is the paper's 7x7 glimpses of 2x2 patches.

    Sizes are in pixels, (height, width) or one number for a square; each must divide the one before.
    """

    image_size: tuple[int, int]
    glimpse_size: tuple[int, int]
    patch_size: tuple[int, int]

    def __init__(self, image_size: Size, glimpse_size: Size, patch_size: Size) -> None:
        sizes = {"image_size": image_size, "glimpse_size": glimpse_size, "patch_size": patch_size}
        for name, size in sizes.items():
            object.__setattr__(self, name, as_pair(name, size))
        self._require_divides("image_size", self.image_size, "glimpse_size", self.glimpse_size)
        self._require_divides("glimpse_size", self.glimpse_size, "patch_size", self.patch_size)

    @staticmethod
    def _require_divides(outer: str, whole: tuple[int, int], inner: str, part: tuple[int, int]) -> None:
        for axis, whole_side, part_side in zip(("height", "width"), whole, part, strict=True):
            if whole_side % part_side == 0:
                continue
            down, up = whole_side - whole_side % part_side, whole_side + part_side - whole_side % part_side
            nearest = f"{down} or {up}" if down else f"{up}"
            raise ConfigError(
                f"{inner} {axis} {part_side} does not divide {outer} {axis} {whole_side}: "
                f"use {outer} {nearest}, or another {inner}"
            )

    @property
    def rows(self) -> int:
        """Rows of glimpses."""
        return self.image_size[0] // self.glimpse_size[0]

    @property
    def columns(self) -> int:
        """Columns of glimpses."""
        return self.image_size[1] // self.glimpse_size[1]

    @property
    def num_locations(self) -> int:
        """Glimpses in a scene."""
        return self.rows * self.columns

    @property
    def centre(self) -> int:
        """The location in the middle; of an even number of rows or columns the later one."""
        return self.rows // 2 * self.columns + self.columns // 2

    @property
    def glimpse_patches(self) -> tuple[int, int]:
        """Rows and columns of patches in a glimpse."""
        return self.glimpse_size[0] // self.patch_size[0], self.glimpse_size[1] // self.patch_size[1]

    @property
    def patches_per_glimpse(self) -> int:
        """Patches in a glimpse."""
        rows, columns = self.glimpse_patches
        return rows * columns

    @property
    def image_patches(self) -> tuple[int, int]:
        """Rows and columns of patches in the whole image."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def num_patches(self) -> int:
        """Patches in the whole image."""
        rows, columns = self.image_patches
        return rows * columns

    @property
    def glimpse_area(self) -> int:
        """Pixels in a glimpse."""
        return self.glimpse_size[0] * self.glimpse_size[1]

    def index(self, location: Location) -> int:
        """Returns the grid index of a location given as an index or as (row, column)."""
        try:
            if isinstance(location, (tuple, list)):
                row, column = map(operator.index, location)
                if 0 <= row < self.rows and 0 <= column < self.columns:
                    return row * self.columns + column
            elif 0 <= operator.index(location) < self.num_locations:
                return operator.index(location)
        except (TypeError, ValueError):
            pass  # no whole numbers, or not two
        raise LocationError(
            f"location {location} is not on the grid: allowed are 0 to {self.num_locations - 1}, "
            f"or (row, column) below ({self.rows}, {self.columns})"
        )

    def row_column(self, location: Location) -> tuple[int, int]:
        """Returns the row and column of a location."""
        return divmod(self.index(location), self.columns)

    def pixel_box(self, location: Location) -> tuple[int, int, int, int]:
        """Returns (top, left, bottom, right) of a glimpse in pixels, the last two exclusive."""
        row, column = self.row_column(location)
        height, width = self.glimpse_size
        return row * height, column * width, (row + 1) * height, (column + 1) * width

    def location_at(self, y: int, x: int) -> int:
        """Returns the location of the glimpse that holds a pixel."""
        height, width = self.image_size
        if not (0 <= y < height and 0 <= x < width):
            raise LocationError(f"pixel ({y}, {x}) is not in an image of {height}x{width}")
        return self.index((y // self.glimpse_size[0], x // self.glimpse_size[1]))

    def patch_positions(self) -> Int[Tensor, "locations patches"]:
        """Returns, for each location, the whole-image positions of its patches in token order."""
        rows, columns = self.image_patches
        patch_rows, patch_columns = self.glimpse_patches
        positions = torch.arange(rows * columns).view(self.rows, patch_rows, self.columns, patch_columns)
        return positions.transpose(1, 2).reshape(self.num_locations, self.patches_per_glimpse)

    def require_images(self, images: Tensor, channels: int) -> None:
        """Raises unless `images` is a batch of whole scenes of this grid."""
        expected = (channels, *self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise StamError(
                f"expected images (batch, {', '.join(map(str, expected))}), got {tuple(images.shape)}: "
                "resize and crop them, or build the agent for this image size"
            )

    def cut(
        self,
        images: Float[Tensor, "scenes channels height width"],
        locations: Int[Tensor, "batch glimpses"],
        scenes: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch glimpses channels glimpse_height glimpse_width"]:
        """Cuts the glimpses at `locations` out of the images, and touches no other pixel.

        Args:
            images: Whole scenes.
            locations: Grid indices.
            scenes: Which image each row of `locations` is of; by default all of them, in order.
        """
        height, width = self.glimpse_size
        tiles = images.unfold(2, height, height).unfold(3, width, width)  # (B, C, R, K, h, w), a view
        scene = torch.arange(images.shape[0], device=images.device) if scenes is None else scenes
        rows = locations.div(self.columns, rounding_mode="floor")
        return tiles[scene[:, None], :, rows, locations % self.columns]  # (B, n, C, h, w)

    def patches(
        self, glimpses: Float[Tensor, "batch glimpses channels glimpse_height glimpse_width"]
    ) -> Float[Tensor, "batch tokens pixels"]:
        """Cuts glimpses into flat patches in token order, each as (channel, row, column)."""
        batch, count, channels = glimpses.shape[:3]
        (rows, columns), (height, width) = self.glimpse_patches, self.patch_size
        tiles = glimpses.reshape(batch, count, channels, rows, height, columns, width)
        tiles = tiles.permute(0, 1, 3, 5, 2, 4, 6)  # (B, n, rows, columns, C, h, w)
        return tiles.reshape(batch, count * rows * columns, channels * height * width)
