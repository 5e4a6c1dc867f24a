"""DeiT's training augmentation of a whole batch at once, on whatever device the batch is.

Random resized crop and flips (one resampling), then RandAugment, then normalisation. Every random number
comes from the seed of the call and is drawn on the host: the same seed gives the same result, and nothing
waits for the device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stam.config import IMAGENET_MEAN, IMAGENET_STD, require, require_choice, require_sensible_numbers
from stam.data import randaugment
from stam.data.randomness import random_words
from stam.data.resample import resample, resize_and_centre_crop
from stam.learning import distributed
from stam.scene.grid import Size, as_pair
from stam.scene.pixels import normalise
from stam.shapes import Float, Int, UInt8

_CPU_PART = 16  # images
_CROP_TRIES = 10
_NUM_FLIP_DRAWS = 2
_NUM_CROP_DRAWS = 2 * _CROP_TRIES + 2  # area and ratio of each try, and one place


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to a training image; by default what DeiT does, "rand-m9-mstd0.5-inc1" in timm's notation.

    Attributes:
        random_crop: Whether a random part of the image is cut; otherwise its centre is kept.
        crop_scale: Smallest and largest area of a random crop, as a fraction of the image's.
        mild_crop: Smallest area where crops are to be mild: in the last epochs, if `mild_share` says so.
        crop_ratio: Smallest and largest width of a random crop divided by its height.
        horizontal_flip: Probability of mirroring.
        vertical_flip: Probability of turning upside down, for images that have no up (fMoW).
        num_ops: Operations of RandAugment for each image; 0 turns it off.
        magnitude: Mean strength of an operation, 0 to 10.
        magnitude_std: Standard deviation of the strength.
        op_probability: Probability that a drawn operation is applied at all.
        interpolation: How rotations, shears and translations interpolate: random takes bilinear or bicubic
            each time, which is timm's default; DeiT's own script set bicubic.
    """

    random_crop: bool = True
    crop_scale: tuple[float, float] = (0.08, 1.0)
    mild_crop: float = 0.8
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    num_ops: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    op_probability: float = 0.5
    interpolation: str = "random"

    def __post_init__(self) -> None:
        require_sensible_numbers(self)
        for name in ("horizontal_flip", "vertical_flip", "op_probability"):
            given = getattr(self, name)
            require(0 <= given <= 1, f"{name} is a probability, 0 to 1, got {given}")
        low, high = self.crop_scale
        require(0 < low <= high <= 1, f"crop_scale must be 0 < least <= most <= 1, got {low}, {high}")
        require(0 < self.mild_crop <= 1, f"mild_crop must be above 0 and at most 1, got {self.mild_crop}")
        low, high = self.crop_ratio
        require(0 < low <= high, f"crop_ratio must be 0 < least <= most, got {low}, {high}")
        require(self.num_ops >= 0, f"num_ops must be 0 (no RandAugment) or more, got {self.num_ops}")
        most = randaugment.MAX_MAGNITUDE
        require(0 <= self.magnitude <= most, f"magnitude must be 0 to {most:g}, got {self.magnitude}")
        require(self.magnitude_std >= 0, f"magnitude_std must be 0 or more, got {self.magnitude_std}")
        require_choice("interpolation", self.interpolation, randaugment.INTERPOLATIONS)

    @classmethod
    def off(cls) -> "AugmentConfig":
        """Returns the settings that only bring an image to size, its aspect kept and its centre shown."""
        return cls(random_crop=False, horizontal_flip=0.0, vertical_flip=0.0, num_ops=0)


def mild(config: AugmentConfig) -> AugmentConfig:
    """Returns the settings with larger crops, which show things about as large as they are in use."""
    low, high = config.crop_scale
    return dataclasses.replace(config, crop_scale=(min(max(low, config.mild_crop), high), high))


class Augment:
    """Turns decoded images into a normalised training batch; holds settings only, no state."""

    def __init__(
        self,
        config: AugmentConfig,
        image_size: Size,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        self.config = config
        self.image_size = as_pair("image_size", image_size)
        self.mean = mean
        self.std = std

    def __call__(
        self,
        images: UInt8[Tensor, "batch 3 max_height max_width"],
        sizes: Int[Tensor, "batch 2"],
        seed: int | Sequence[int],
    ) -> Float[Tensor, "batch 3 height width"]:
        """Augments and normalises a batch, on the device of the images.

        Args:
            images: Each in the upper left corner of its frame.
            sizes: Each image's own height and width, on the host (on a device, the call would wait for it).
            seed: One number, or several that name the batch, such as (run seed, epoch, step, rank).
        """
        return self._run(images, sizes, seed, lambda pixels: normalise(pixels, self.mean, self.std))

    def pixels(
        self,
        images: UInt8[Tensor, "batch 3 max_height max_width"],
        sizes: Int[Tensor, "batch 2"],
        seed: int | Sequence[int],
    ) -> UInt8[Tensor, "batch 3 height width"]:
        """Augments a batch without normalising it, so that it can be shown."""
        return self._run(images, sizes, seed, lambda pixels: pixels)

    def _run(
        self, images: Tensor, sizes: Tensor, seed: int | Sequence[int], finish: Callable[[Tensor], Tensor]
    ) -> Tensor:
        config, sizes = self.config, sizes.cpu()
        num_draws = _NUM_FLIP_DRAWS + _NUM_CROP_DRAWS + config.num_ops * randaugment.NUM_DRAWS
        first, of_all = distributed.rank() * len(images), distributed.world_size() * len(images)
        uniform = _uniform(of_all * num_draws, seed).reshape(of_all, num_draws)[first : first + len(images)]
        ends = np.cumsum([_NUM_FLIP_DRAWS, _NUM_CROP_DRAWS])
        for_flips, for_crops, for_ops = np.split(uniform, ends, axis=1)
        flips = torch.from_numpy(for_flips < (config.vertical_flip, config.horizontal_flip))
        boxes = torch.from_numpy(draw_crops(for_crops, sizes.numpy(), config.crop_scale, config.crop_ratio))
        drawn = randaugment.draw(
            for_ops.reshape(len(images), config.num_ops, randaugment.NUM_DRAWS),
            config.magnitude,
            config.magnitude_std,
            config.op_probability,
            config.interpolation,
        )
        red, green, blue = (min(255, round(255 * value)) for value in self.mean)

        def augment(part: slice) -> Tensor:
            if config.random_crop:
                pixels = resample(images[part], boxes[part], self.image_size, flips[part])
            else:
                size = self.image_size
                pixels = resize_and_centre_crop(images[part], sizes[part], size, size, flips[part])
            return finish(randaugment.apply(pixels, drawn[part], fill=(red, green, blue)))

        if images.device.type == "cpu":
            return _in_parts(augment, len(images))
        return augment(slice(None))


def _in_parts(augment: Callable[[slice], Tensor], num_images: int) -> Tensor:
    """Augments a few images at a time, which stay in a CPU's cache, in one thread.

    The single steps take microseconds, and threads wait for each other after each: at best two are not twice
    as fast as one, and where loading keeps the cores busy they are many times slower.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = augment(slice(0, _CPU_PART))
        result = first.new_empty((num_images, *first.shape[1:]))
        result[:_CPU_PART] = first
        for start in range(_CPU_PART, num_images, _CPU_PART):
            part = slice(start, start + _CPU_PART)
            result[part] = augment(part)
    finally:
        torch.set_num_threads(num_threads)
    return result


def draw_crops(
    uniform: Float[np.ndarray, f"batch {_NUM_CROP_DRAWS}"],
    sizes: Int[np.ndarray, "batch 2"],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Int[np.ndarray, "batch 4"]:
    """Turns uniform random numbers into a crop of each image: top, left, height, width.

    Area and log ratio are uniform. Of ten tries the first that fits into the image counts; if none does, the
    largest central crop of an allowed ratio is taken.

    Args:
        uniform: In 0..1.
        sizes: Height and width of each image.
        scale: Least and most area of a crop, as a fraction of the image's.
        ratio: Least and most width divided by height.
    """
    for_area, for_ratio, place = np.split(uniform, [_CROP_TRIES, 2 * _CROP_TRIES], axis=1)
    height, width = sizes[:, :1], sizes[:, 1:]  # (B, 1)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * for_area)  # (B, 10)
    aspect = ratio[0] * (ratio[1] / ratio[0]) ** for_ratio  # (B, 10)
    rows, columns = np.rint(np.sqrt(area / aspect)), np.rint(np.sqrt(area * aspect))  # (B, 10)
    fits = (rows > 0) & (rows <= height) & (columns > 0) & (columns <= width)
    first = fits.argmax(axis=1, keepdims=True)
    box = np.concatenate([np.take_along_axis(sides, first, axis=1) for sides in (rows, columns)], axis=1)
    corner = np.floor(place * (sizes - box + 1))

    tallest = np.minimum(height, np.rint(width / ratio[0]))
    widest = np.minimum(width, np.rint(height * ratio[1]))
    central = np.concatenate([tallest, widest], axis=1).clip(1)  # (B, 2)
    found = fits.any(axis=1, keepdims=True)
    box, corner = np.where(found, box, central), np.where(found, corner, (sizes - central) // 2)
    return np.concatenate([corner, box], axis=1).astype(np.int64)


def _uniform(count: int, seed: int | Sequence[int]) -> Float[np.ndarray, "count"]:
    words = random_words(count, "augmentation", *([seed] if isinstance(seed, int) else seed))
    return (words >> np.uint64(11)) * 2.0**-53
