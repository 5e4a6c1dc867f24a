"""What every source of labelled images looks like, and the fixed view of a scene that evaluation takes."""

from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image

from stam.errors import DataError, did_you_mean
from stam.scene.grid import Size, as_pair
from stam.shapes import Int, UInt8

_MOST_PIXELS = 50_000_000  # of an image made larger only to keep its middle


@runtime_checkable
class Scenes(Protocol):
    """Labelled images by index. `load` returns the same pixels whenever and wherever it is called."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is an index into them."""
        ...

    @property
    def labels(self) -> Int[np.ndarray, "scenes"]:
        """The label of every scene, int64."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image, of any size.

        A larger shorter side may come shrunk to `decode_size` where that makes decoding cheaper.
        """
        ...


class Subset:
    """Some scenes of another source, in the order of `indices`."""

    def __init__(self, scenes: Scenes, indices: Int[np.ndarray, "chosen"]) -> None:
        self._scenes = scenes
        self._indices = indices
        self.classes = scenes.classes
        self.labels = scenes.labels[indices]

    def __len__(self) -> int:
        return len(self._indices)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image of the subset."""
        return self._scenes.load(int(self._indices[index]), decode_size)


class Relabelled:
    """The same scenes with labels that index other class names, so an agent can be tested on new data.

    Raises:
        DataError: The scenes have a class that is not among the new ones.
    """

    def __init__(self, scenes: Scenes, classes: tuple[str, ...]) -> None:
        position = {name: label for label, name in enumerate(classes)}
        for name in scenes.classes:
            if name not in position:
                hint = did_you_mean(name, classes)
                raise DataError(f"the agent does not know the class '{name}' of this data: {hint}")
        new_label = np.array([position[name] for name in scenes.classes], dtype=np.int64)
        self._scenes = scenes
        self.classes = classes
        self.labels = new_label[scenes.labels]

    def __len__(self) -> int:
        return len(self._scenes)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image, unchanged."""
        return self._scenes.load(index, decode_size)


def prepare_for_evaluation(
    image: UInt8[np.ndarray, "height width 3"], resize_size: int | None, image_size: Size
) -> UInt8[np.ndarray, "image_height image_width 3"]:
    """Brings an image to the size that the agent evaluates (bicubic).

    Args:
        image: The decoded image.
        resize_size: What the shorter side becomes before the centre is cropped (ImageNet: 256), or more where
            the crop would not be covered. `None` resizes straight to `image_size`, aspect or no (fMoW).
        image_size: Pixels of the result, one number or (height, width).
    """
    height, width = as_pair("image_size", image_size)
    old_height, old_width = image.shape[:2]
    new_height, new_width = height, width
    if resize_size is not None:
        shorter = min(old_height, old_width)
        # Rounded up, so that both sides of the crop are covered.
        new_shorter = max(resize_size, -(-height * shorter // old_height), -(-width * shorter // old_width))
        new_height, new_width = new_shorter * old_height // shorter, new_shorter * old_width // shorter
    top, left = round((new_height - height) / 2), round((new_width - width) / 2)
    whole, kept = Image.fromarray(image), (left, top, left + width, top + height)
    if new_height * new_width > _MOST_PIXELS:  # a long strip, made as high as the crop: only that part of it
        down, right = old_height / new_height, old_width / new_width
        box = (kept[0] * right, kept[1] * down, kept[2] * right, kept[3] * down)
        return np.asarray(whole.resize((width, height), Image.Resampling.BICUBIC, box))
    if (new_height, new_width) != (old_height, old_width):
        whole = whole.resize((new_width, new_height), Image.Resampling.BICUBIC)
    return np.asarray(whole.crop(kept))
