"""Decoded images kept in memory, for data that fits: from the second epoch on nothing is decoded."""

import numpy as np
from tqdm import tqdm

from stam.data.loader import BatchLoader, TrainingView
from stam.data.sampler import batches
from stam.data.scenes import Scenes
from stam.shapes import UInt8

_GIGABYTE = 2**30


class CachedScenes:
    """The same scenes, each decoded once as long as there is room.

    What a worker process decodes stays in that process. So either load without workers, or call `fill` first:
    workers started later share the memory.
    """

    def __init__(self, scenes: Scenes, max_bytes: int = 8 * _GIGABYTE) -> None:
        """Starts with an empty cache.

        Args:
            scenes: The source.
            max_bytes: The most memory to take; scenes that no longer fit are decoded each time.
        """
        self._scenes = scenes
        self._max_bytes = max_bytes
        self._images: dict[tuple[int, int | None], np.ndarray] = {}
        self.num_bytes = 0
        self.classes = scenes.classes
        self.labels = scenes.labels

    def __len__(self) -> int:
        return len(self._scenes)

    @property
    def num_cached(self) -> int:
        """How many images are held."""
        return len(self._images)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image, from memory if it was loaded before."""
        image = self._images.get((index, decode_size))
        if image is None:
            image = self._scenes.load(index, decode_size)
            self._keep(index, decode_size, image)
        return image

    def fill(self, decode_size: int | None = None, num_workers: int = 0, progress: bool = True) -> None:
        """Decodes all scenes now, by worker processes, until the memory is used up."""
        groups = batches(np.arange(len(self)), batch_size=16, drop_last=False)
        loader = BatchLoader(self._scenes, groups, TrainingView(decode_size), num_workers)
        bar = tqdm(loader, "decoding", total=len(groups), unit="batch", disable=None if progress else True)
        for batch in bar:
            for pixels, (height, width), index in zip(batch.images, batch.sizes, batch.indices, strict=True):
                image = pixels[:, :height, :width].permute(1, 2, 0).numpy()
                if not self._keep(int(index), decode_size, np.ascontiguousarray(image)):
                    return

    def _keep(self, index: int, decode_size: int | None, image: np.ndarray) -> bool:
        """Stores an image; returns False where there is no room for it."""
        if (index, decode_size) in self._images:
            return True
        if self.num_bytes + image.nbytes > self._max_bytes:
            return False
        self._images[index, decode_size] = image
        self.num_bytes += image.nbytes
        return True
