"""Whether every image really decodes, found out before the first batch instead of in the middle of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from stam.data.memory import one_at_a_time, recall, remember
from stam.data.parallel import map_with_progress
from stam.data.scenes import Scenes
from stam.errors import DataError
from stam.shapes import Int


@runtime_checkable
class Fingerprinted(Protocol):
    """Scenes that can tell whether they are the same as at an earlier time without decoding any."""

    def fingerprint(self) -> str:
        """Returns a hash that changes with every image."""
        ...


@runtime_checkable
class CheckedBefore(Protocol):
    """Scenes that know whether all of them were decoded when they were stored."""

    def was_checked(self) -> bool:
        """Tells so; raises a `DataError` where they have become fewer since."""
        ...


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

    What was found in a folder of images or in tars is remembered (see `stam.data.memory`): as long as no file
    changes, the next check decodes only those that could not be read, and of several processes only one
    checks. What `stam prepare shards` packed was checked then.

    Args:
        scenes: What to check.
        skip_unreadable: Report the images that cannot be read instead of raising.
        num_workers: Threads; one a core if not given.
        progress: Whether to show a progress bar.
        description: The bar's title.

    Raises:
        DataError: An image cannot be read (unless skipped), or a class has no readable image left.
    """

    def check(indices: Sequence[int]) -> dict[int, str]:
        found = map_with_progress(
            lambda index: _problem(scenes, index), indices, description, num_workers, progress
        )
        return {index: problem for index, problem in zip(indices, found, strict=True) if problem is not None}

    problems = _remembered(scenes, check)
    unreadable = tuple(problems.values())
    is_readable = np.ones(len(scenes), dtype=bool)
    is_readable[list(problems)] = False
    readable = np.flatnonzero(is_readable)
    if unreadable and not skip_unreadable:
        others = f" (and {len(unreadable) - 1} more of {len(scenes)} images)" if len(unreadable) > 1 else ""
        raise DataError(f"{unreadable[0]}{others}: repair or remove, or pass --skip-unreadable")
    remaining = np.bincount(scenes.labels[readable], minlength=len(scenes.classes))
    before = np.bincount(scenes.labels, minlength=len(scenes.classes))
    for name, left, had in zip(scenes.classes, remaining, before, strict=True):
        if had and not left:
            raise DataError(f"no image of class '{name}' can be read, the first: {unreadable[0]}")
    return ImageReport(readable, unreadable)


def _problem(scenes: Scenes, index: int) -> str | None:
    """Returns why a scene cannot be read; nothing where it can."""
    try:
        scenes.load(index)
    except DataError as error:
        return str(error)
    return None


def _remembered(scenes: Scenes, check: Callable[[Sequence[int]], dict[int, str]]) -> dict[int, str]:
    """Returns the problem of each scene that cannot be read, checking no more than is not known."""
    everything = range(len(scenes))
    if isinstance(scenes, CheckedBefore) and scenes.was_checked():
        return {}
    if not isinstance(scenes, Fingerprinted):
        return check(everything)
    key = scenes.fingerprint()
    with one_at_a_time(key):
        suspects = recall(key, len(scenes))
        problems = check(everything if suspects is None else suspects)
        if suspects is None:
            remember(key, len(scenes), problems)
    return problems
