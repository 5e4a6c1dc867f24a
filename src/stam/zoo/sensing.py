"""How the systems of the zoo sense a scene: crops at continuous places, several scales, the whole at once.

A place is (y, x) from -1 to 1: the centre of the scene is (0, 0), its corners are (-1, -1) and (1, 1).
Boxes are top, left, bottom and right, as shares of the scene, which a crop may exceed: there it is black.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stam.shapes import Float

Places = Float[Tensor, "batch 2"]
Boxes = Float[Tensor, "batch 4"]


def crop(
    images: Float[Tensor, "batch channels height width"], places: Places, side: int
) -> Float[Tensor, "batch channels side side"]:
    """Senses a square of `side` pixels at one place of each scene, bilinearly."""
    return crops(images, places[:, None], side)[:, 0]


def crops(
    images: Float[Tensor, "batch channels height width"], places: Float[Tensor, "batch count 2"], side: int
) -> Float[Tensor, "batch count channels side side"]:
    """Senses a square of `side` pixels at several places of each scene, bilinearly."""
    height, width = images.shape[2:]
    # centres of the crop's pixels around its own, where 2 is the whole scene: few kernels, since all wait
    rows, columns = (
        places[..., axis, None]
        + torch.linspace((1 - side) / size, (side - 1) / size, side, device=images.device)
        for axis, size in enumerate((height, width))
    )  # (B, k, side)
    grid = torch.stack(torch.broadcast_tensors(columns[:, :, None, :], rows[:, :, :, None]), dim=-1)
    # one below the other, (B, k * side, side, 2): all crops of a scene in one call
    sensed = F.grid_sample(images, grid.flatten(1, 2).to(images.dtype), align_corners=False)
    return sensed.unflatten(2, (places.shape[1], side)).transpose(1, 2)


def pyramid(images: Tensor, num_scales: int) -> list[Tensor]:
    """Returns scenes at full size, half of it, a quarter and so on."""
    return [images if scale == 0 else F.avg_pool2d(images, 2**scale) for scale in range(num_scales)]


def retina(levels: list[Tensor], places: Places, side: int) -> Float[Tensor, "batch channels side side"]:
    """Senses squares of growing extent at each place, each with `side` pixels (Mnih et al., section 3.1)."""
    return torch.cat([crop(level, places, side) for level in levels], dim=1)


def retina_boxes(
    places: Places, side: int, num_scales: int, image_size: tuple[int, int]
) -> Float[Tensor, "batch scales 4"]:
    """Returns the boxes of `retina`, from the finest to the coarsest."""
    return torch.stack(
        [crop_boxes(places, side * 2**scale, image_size) for scale in range(num_scales)], dim=1
    )


def crop_boxes(places: Places, side: float, image_size: tuple[int, int]) -> Boxes:
    """Returns the boxes of squares of some pixels of the scene around places."""
    centres = (places + 1) / 2
    half = torch.stack([torch.full_like(places[:, 0], side / size / 2) for size in image_size], dim=1)
    return torch.cat((centres - half, centres + half), dim=1)


def inside(places: Places, side: int, image_size: tuple[int, int]) -> Places:
    """Brings places in -1..1 to where a crop of some pixels lies wholly in the scene."""
    # numbers, not a tensor made of them: while a CUDA graph is captured nothing may come from the host
    each = (places[..., axis] * (1 - side / size) for axis, size in enumerate(image_size))
    return torch.stack(list(each), dim=-1)


def shrunk(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Senses the whole scene at low resolution (antialiased)."""
    size = (size, size) if isinstance(size, int) else size
    if size == tuple(images.shape[2:]):
        return images
    return F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)


def whole_boxes(batch_size: int, device: torch.device) -> Float[Tensor, "batch 1 4"]:
    """Returns the box of the whole scene."""
    return torch.tensor([0.0, 0.0, 1.0, 1.0], device=device).expand(batch_size, 1, 4)


def grid_places(count: int, device: torch.device) -> Float[Tensor, "cells 2"]:
    """Returns the places of a grid of count x count cells, row by row: from -1 to 1, ends included."""
    line = torch.linspace(-1, 1, count, device=device) if count > 1 else torch.zeros(1, device=device)
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    return torch.stack((rows, columns), dim=-1).reshape(-1, 2)


def all_crops(images: Tensor, count: int, side: int) -> Float[Tensor, "batch cells channels side side"]:
    """Senses the square at every place of a grid whose crops lie wholly in the scene."""
    places = inside(grid_places(count, images.device), side, (images.shape[2], images.shape[3]))
    return crops(images, places.expand(len(images), -1, 2), side)
