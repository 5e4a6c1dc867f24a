"""Time and memory from the start of a training loop to its first batch, with as many images as ImageNet has.

The images are made up (one grey pixel each), so that what is measured is the plan of the run, not the disk.
Example: `python benchmarks/startup.py --images 1281167`.
"""

import argparse
import itertools
import resource
import time

import numpy as np

from stam.data import RawBatch
from stam.learning.loop import load_batches
from stam.learning.recipes import get_recipe
from stam.learning.training import plan
from stam.settings import DataConfig


class MadeUpScenes:
    """As many scenes as asked for, all alike."""

    def __init__(self, count: int) -> None:
        self.classes = ("one", "two")
        self.labels = np.zeros(count, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        """Returns a grey pixel."""
        return np.zeros((1, 1, 3), dtype=np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1_281_167, help="training images (default: ImageNet's)")
    parser.add_argument("--recipe", default="imagenet-small", help="whose plan to follow")
    parser.add_argument("--batches", type=int, default=30, help="batches to load after it (default: 30)")
    arguments = parser.parse_args()
    scenes, config = MadeUpScenes(arguments.images), get_recipe(arguments.recipe)
    before, began = peak_megabytes(), time.perf_counter()
    made = plan(len(scenes), config)
    loaded = load_batches(scenes, made.batches_from((0, 0)), DataConfig(num_workers=0))
    print(f"{made.num_batches()} batches of {made.batch_size} in {made.epochs} epochs")
    report("the first batch", next(loaded), began, before)
    rest = list(itertools.islice(loaded, arguments.batches))
    report(f"{arguments.batches} more", rest[-1], began, before)


def report(name: str, batch: tuple[object, RawBatch], began: float, before: float) -> None:
    """Prints what was taken since the beginning."""
    taken = f"{time.perf_counter() - began:.2f} s, {peak_megabytes() - before:.0f} MB"
    print(f"{name}, at {batch[0]}: {taken} more than before")


def peak_megabytes() -> float:
    """Returns the most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
