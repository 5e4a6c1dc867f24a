"""Whether every image really decodes, found out before the first batch instead of in the middle of a run."""

from dataclasses import dataclass

import numpy as np

from stam.data.parallel import map_with_progress
from stam.data.scenes import Scenes
from stam.errors import DataError
from stam.shapes import Int


@dataclass(frozen=True)
class ImageReport:
    """What `check_images` found.

    Attributes:
        readable: Indices of the scenes that decode; `Subset(scenes, report.readable)` holds them.
        unreadable: One line for each of the others, with its name and the reason.
    """

    readable: Int[np.ndarray, "readable"]
    unreadable: tuple[str, ...]


def check_images(
    scenes: Scenes,
    *,
    skip_unreadable: bool = False,
    num_workers: int | None = None,
    progress: bool = True,
    description: str = "checking images",
) -> ImageReport:
    """Decodes every image once, in parallel.

    Args:
        scenes: What to check.
        skip_unreadable: Report the images that cannot be read instead of raising.
        num_workers: Threads; one a core if not given.
        progress: Whether to show a progress bar.
        description: The bar's title.

    Raises:
        DataError: An image cannot be read (unless skipped), or a class has no readable image left.
    """

    def problem(index: int) -> str | None:
        try:
            scenes.load(index)
        except DataError as error:
            return str(error)
        return None

    problems = list(map_with_progress(problem, range(len(scenes)), description, num_workers, progress))
    unreadable = tuple(found for found in problems if found is not None)
    readable = np.flatnonzero(np.array([found is None for found in problems], dtype=bool))
    if unreadable and not skip_unreadable:
        others = f" (and {len(unreadable) - 1} more of {len(scenes)} images)" if len(unreadable) > 1 else ""
        raise DataError(f"{unreadable[0]}{others}: repair or remove, or pass --skip-unreadable")
    remaining = np.bincount(scenes.labels[readable], minlength=len(scenes.classes))
    before = np.bincount(scenes.labels, minlength=len(scenes.classes))
    for name, left, had in zip(scenes.classes, remaining, before, strict=True):
        if had and not left:
            raise DataError(f"no image of class '{name}' can be read, the first: {unreadable[0]}")
    return ImageReport(readable, unreadable)
