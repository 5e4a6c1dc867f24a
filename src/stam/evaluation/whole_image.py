"""What sees the whole image: the teacher as the ceiling, and on a shrunk image as the competitor."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stam.evaluation.outcomes import TOP, require_ranks, true_rank
from stam.evaluation.results import LowResolution, WholeImage
from stam.model.teacher import Teacher
from stam.scene.grid import Grid
from stam.shapes import Float, Int


def low_resolution_size(grid: Grid, num_glimpses: int) -> tuple[int, int]:
    """Returns the (height, width) nearest the scene's shape with at most the pixels of so many glimpses."""
    height, width = grid.image_size
    budget = num_glimpses * grid.glimpse_area
    rows = max(1, math.floor(height * math.sqrt(num_glimpses / grid.num_locations) + 1e-9))
    rows = min(rows, budget)
    return rows, min(width, budget // rows)


def low_resolution(
    images: Float[Tensor, "batch channels height width"], size: tuple[int, int]
) -> Float[Tensor, "batch channels height width"]:
    """Shrinks images (bicubic, antialiased) and enlarges them again to their own size."""
    if size == tuple(images.shape[2:]):
        return images
    small = F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
    return F.interpolate(small, size=images.shape[2:], mode="bicubic", align_corners=False)


@torch.no_grad()
def whole_image_ranks(
    teacher: Teacher,
    images: Float[Tensor, "batch channels height width"],
    labels: Int[Tensor, " batch"],
    grid: Grid | None,
    num_glimpses: int,
) -> Int[np.ndarray, "batch views"]:
    """Returns the true class's rank: for the whole image, then shrunk to the pixels of 1..n glimpses.

    With `num_glimpses` 0, or without a grid, only the whole image is shown.
    """
    views = [images]
    if grid is not None:
        views += [low_resolution(images, low_resolution_size(grid, n)) for n in range(1, num_glimpses + 1)]
    ranks = torch.stack([true_rank(teacher(view), labels) for view in views], dim=1).cpu().numpy()
    require_ranks(ranks, teacher.num_classes)
    return ranks


def describe_whole_image(ranks: Int[np.ndarray, "scenes views"], grid: Grid | None) -> WholeImage:
    """Turns ranks into accuracies."""
    top1, top5 = ((ranks < top).mean(axis=0) for top in (1, TOP))
    shrunk = []
    if grid is not None:
        shrunk = [
            LowResolution(n, *low_resolution_size(grid, n), float(top1[n]), float(top5[n]))
            for n in range(1, ranks.shape[1])
        ]
    return WholeImage(float(top1[0]), float(top5[0]), tuple(shrunk))
