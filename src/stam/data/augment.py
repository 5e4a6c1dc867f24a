"""DeiT's training augmentation of a whole batch at once, on whatever device the batch is.

Random resized crop and flips (one resampling), then RandAugment, then normalisation. Every random number
comes from the seed of the call and is drawn on the host: the same seed gives the same result, and nothing
waits for the device.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stam.data import randaugment
from stam.data.randomness import random_words
from stam.data.resample import resample, resize_and_centre_crop
from stam.scene.grid import Size, as_pair
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD, normalise
from stam.settings import AugmentConfig
from stam.shapes import Float, Int, UInt8

_CPU_PART = 16  # images
_CROP_TRIES = 10
_NUM_FLIP_DRAWS = 2
_NUM_CROP_DRAWS = 2 * _CROP_TRIES + 2  # area and ratio of each try, and one place


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
        share: tuple[int, int] = (0, 1),
    ) -> Float[Tensor, "batch 3 height width"]:
        """Augments and normalises a batch, on the device of the images.

        Args:
            images: Each in the upper left corner of its frame.
            sizes: Each image's own height and width, on the host (on a device, the call would wait for it).
            seed: One number, or several that name the batch, such as (run seed, epoch, step).
            share: Which part of the batch this is, of how many: each of several processes has one, and what
                is drawn for an image does not depend on how many there are.
        """
        return self._run(images, sizes, seed, lambda pixels: normalise(pixels, self.mean, self.std), share)

    def pixels(
        self,
        images: UInt8[Tensor, "batch 3 max_height max_width"],
        sizes: Int[Tensor, "batch 2"],
        seed: int | Sequence[int],
    ) -> UInt8[Tensor, "batch 3 height width"]:
        """Augments a batch without normalising it, so that it can be shown."""
        return self._run(images, sizes, seed, lambda pixels: pixels)

    def _run(
        self,
        images: Tensor,
        sizes: Tensor,
        seed: int | Sequence[int],
        finish: Callable[[Tensor], Tensor],
        share: tuple[int, int] = (0, 1),
    ) -> Tensor:
        config, sizes = self.config, sizes.cpu()
        num_draws = _NUM_FLIP_DRAWS + _NUM_CROP_DRAWS + config.num_ops * randaugment.NUM_DRAWS
        first, of_all = (number * len(images) for number in share)
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
