"""From an image of any size and its grey levels to the numbers an agent takes."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stam.errors import SensorError
from stam.scene.grid import Size, as_pair
from stam.shapes import Float, UInt8

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_RANGE_MARGIN = 2.0  # normalised floats may leave the range of pixels by this many times its width
_MOST_PIXELS = 50_000_000  # of an image made larger only to keep its middle


def normalise(
    pixels: UInt8[Tensor, "*batch channels height width"],
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
) -> Float[Tensor, "*batch channels height width"]:
    """Brings grey levels 0..255 to zero mean and unit variance, given those of 0..1."""
    means, deviations = torch.tensor(mean), torch.tensor(std)
    numbers = torch.stack([1 / (255 * deviations), -means / deviations])[..., None, None]
    factor, offset = to_device(numbers, pixels.device)  # (channels, 1, 1) each
    return pixels.float().mul_(factor).add_(offset)


def require_normalised(
    values: Float[Tensor, "*batch channels height width"],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    what: str,
    advice: str,
) -> None:
    """Raises where floats are far outside the range that normalised pixels can have, as 0..255 are.

    Args:
        values: The floats.
        mean: Channel means of the normalisation.
        std: Channel standard deviations.
        what: What to call them in the error.
        advice: What to do about it.
    """
    if not values.numel():
        return
    darkest = min(-average / deviation for average, deviation in zip(mean, std, strict=True))
    brightest = max((1 - average) / deviation for average, deviation in zip(mean, std, strict=True))
    margin = _RANGE_MARGIN * (brightest - darkest)
    lowest, highest = (float(value) for value in values.aminmax())
    if lowest < darkest - margin or highest > brightest + margin:
        raise SensorError(
            f"{what} of floats must be normalised, so about {darkest:.1f} to {brightest:.1f}, got "
            f"{lowest:.1f} to {highest:.1f}: {advice}"
        )


def to_device(values: Sequence[float] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Sends a few host values to a device without waiting for the work queued there."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait
    return tensor.to(device, non_blocking=True)


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


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns an image of any mode as RGB.

    Transparent pixels are laid on white. 16-bit greyscale keeps its upper 8 bits, so 65535 is white.

    Raises:
        ValueError: Its pixels need more than 16 bits.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 65535:
            raise ValueError("its pixels need more than 16 bits; save it with 8 or 16 bits")
        return Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert("RGB")
    return image.convert("RGB")
