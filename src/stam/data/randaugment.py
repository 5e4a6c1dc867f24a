"""RandAugment over a batch, on whatever device it is: timm's "increasing" operations, PIL's arithmetic.

An operation maps uint8 images (n, 3, H, W) and one argument for each of them to uint8 images. What is done to
which image is drawn on the host, so that nothing ever waits for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stam.data.resample import move_rows, rotate_about_centre, to_bytes
from stam.scene.pixels import to_device
from stam.settings import MAX_MAGNITUDE
from stam.shapes import Bool, Float, Int, UInt8

NUM_DRAWS = 6  # random numbers that one operation on one image takes


@dataclass(frozen=True)
class Drawn:
    """What happens to each image of a batch: some operations, one after the other.

    Attributes:
        ops: Indices into `OPERATIONS`, -1 where the image is left as it is.
        arguments: In the operation's own unit: degrees, bits, a factor...
        bicubic: Whether a geometric operation interpolates so, or bilinearly.
    """

    ops: Int[np.ndarray, "batch num_ops"]
    arguments: Float[np.ndarray, "batch num_ops"]
    bicubic: Bool[np.ndarray, "batch num_ops"]

    def __getitem__(self, part: slice) -> "Drawn":
        """Returns what happens to some of the images."""
        return Drawn(self.ops[part], self.arguments[part], self.bicubic[part])


def draw(
    uniform: Float[np.ndarray, f"batch num_ops {NUM_DRAWS}"],
    magnitude: float = 9.0,
    magnitude_std: float = 0.5,
    op_probability: float = 0.5,
    interpolation: str = "random",
) -> Drawn:
    """Turns uniform random numbers into operations: with replacement, of noisy magnitude and random sign.

    Args:
        uniform: In 0..1.
        magnitude: Mean strength, 0 to `MAX_MAGNITUDE`.
        magnitude_std: Standard deviation of the strength.
        op_probability: How likely an operation is applied at all.
        interpolation: One of `settings.INTERPOLATIONS`, for the geometric operations.
    """
    which, applied, radius, angle, sign, cubic = np.moveaxis(uniform, -1, 0)  # (B, num_ops) each
    ops = np.floor(which * len(OPERATIONS)).astype(np.int64)
    normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)  # Box-Muller
    level = (magnitude + magnitude_std * normal).clip(0, MAX_MAGNITUDE) / MAX_MAGNITUDE
    signs = np.where(sign < 0.5, -1.0, 1.0)
    arguments = np.choose(ops, [operation.argument(level, signs) for operation in OPERATIONS.values()])
    bicubic = cubic < {"random": 0.5, "bilinear": 0.0, "bicubic": 1.0}[interpolation]
    return Drawn(np.where(applied < op_probability, ops, -1), arguments, bicubic)


def apply(
    images: UInt8[Tensor, "batch 3 height width"], drawn: Drawn, fill: tuple[int, int, int]
) -> UInt8[Tensor, "batch 3 height width"]:
    """Applies what was drawn, to all images that share an operation at once; `images` stay as they are.

    Args:
        images: On any device.
        drawn: One row for each image.
        fill: Colour of what a geometric operation brings in from outside the image.
    """
    device = images.device
    functions = [operation.function for operation in OPERATIONS.values()] + [_leave]
    colour = to_device(np.array(fill, dtype=np.float32).reshape(3, 1, 1), device)
    for ops, values, bicubic in zip(drawn.ops.T, drawn.arguments.T, drawn.bicubic.T, strict=True):
        order = np.argsort(ops, kind="stable")  # (B,) images that share an operation become neighbours
        numbers = np.stack([values, bicubic])[:, order].astype(np.float32)
        value, is_bicubic = to_device(numbers, device)  # (B,) each
        to_neighbours, back = to_device(np.stack([order, np.argsort(order)]), device)  # (B,) each
        grouped = images.index_select(0, to_neighbours)
        changed = []
        for index, start, stop in _groups(ops[order]):
            arguments = Arguments(value[start:stop], is_bicubic[start:stop], colour)
            changed.append(functions[index](grouped[start:stop], arguments))
        images = torch.cat(changed).index_select(0, back)
    return images


def _groups(sorted_ops: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields each operation with where its images start and stop."""
    starts = np.flatnonzero(np.diff(sorted_ops, prepend=-2)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(sorted_ops)], strict=True):
        yield int(sorted_ops[start]), start, stop


@dataclass(frozen=True)
class Arguments:
    """What an operation needs besides the images, on their device."""

    value: Tensor  # (n,) float
    bicubic: Tensor  # (n,) float, 1 or 0
    fill: Tensor  # (3, 1, 1) float


def _leave(images: Tensor, _: Arguments) -> Tensor:
    return images


# Colour operations. All but the last two replace each grey level by another: only their tables differ.


def auto_contrast(images: Tensor, _: Arguments) -> Tensor:
    """Stretches each channel to the full range."""
    present = _histograms(images) > 0  # (n, 3, 256)
    levels = _grey_levels(images)
    lowest = torch.where(present, levels, 255).amin(dim=2, keepdim=True)  # (n, 3, 1)
    highest = torch.where(present, levels, 0).amax(dim=2, keepdim=True)  # (n, 3, 1)
    stretched = (levels - lowest) * 255 // (highest - lowest).clamp(min=1)
    return _look_up(images, torch.where(highest > lowest, stretched, levels))


def equalize(images: Tensor, _: Arguments) -> Tensor:
    """Makes the grey levels of each channel equally frequent."""
    histograms = _histograms(images)  # (n, 3, 256)
    levels = _grey_levels(images)
    highest = torch.where(histograms > 0, levels, 0).amax(dim=2, keepdim=True)  # (n, 3, 1)
    num_pixels = images.shape[2] * images.shape[3]
    step = (num_pixels - histograms.gather(2, highest)) // 255  # (n, 3, 1)
    num_below = histograms.cumsum(dim=2) - histograms
    equalized = (num_below + step // 2) // step.clamp(min=1)
    return _look_up(images, torch.where(step > 0, equalized, levels))


def invert(images: Tensor, _: Arguments) -> Tensor:
    """Turns the image into its negative."""
    return 255 - images


def posterize(images: Tensor, arguments: Arguments) -> Tensor:
    """Keeps the upper bits of each grey level; at the largest magnitude none, as timm has it."""
    dropped = 2 ** (8 - _per_table(arguments.value).long())  # (n, 1, 1)
    levels = _grey_levels(images)
    return _look_up(images, levels - levels % dropped)


def solarize(images: Tensor, arguments: Arguments) -> Tensor:
    """Inverts the grey levels from a threshold on."""
    levels = _grey_levels(images)
    return _look_up(images, torch.where(levels < _per_table(arguments.value), levels, 255 - levels))


def solarize_add(images: Tensor, arguments: Arguments) -> Tensor:
    """Brightens the darker half of the grey levels."""
    levels = _grey_levels(images)
    return _look_up(images, torch.where(levels < 128, levels + _per_table(arguments.value), levels))


def brightness(images: Tensor, arguments: Arguments) -> Tensor:
    """Blends with black."""
    return _look_up(images, _grey_levels(images) * _per_table(arguments.value))


def contrast(images: Tensor, arguments: Arguments) -> Tensor:
    """Blends with the mean grey."""
    total = _luminance(images).sum(dim=(1, 2, 3))  # (n,)
    num_pixels = images.shape[2] * images.shape[3]
    mean = _per_table((total + num_pixels // 2) // num_pixels)  # (n, 1, 1)
    return _look_up(images, mean + _per_table(arguments.value) * (_grey_levels(images) - mean))


def colour(images: Tensor, arguments: Arguments) -> Tensor:
    """Blends with the image in grey."""
    return _blend(_luminance(images).float(), images, arguments.value)


def sharpness(images: Tensor, arguments: Arguments) -> Tensor:
    """Blends with a smoothed image; the outermost pixels stay."""
    pixels = images.short()
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]  # (n, 3, H - 2, W)
    inner = pixels[:, :, 1:-1, 1:-1]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner  # (n, 3, H - 2, W - 2)
    smooth = total.float().mul_(1 / 13).add_(0.5).floor_()
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = _blend(smooth, inner, arguments.value)
    return result


# Geometric operations.


def rotate(images: Tensor, arguments: Arguments) -> Tensor:
    """Rotates counter-clockwise, by degrees."""
    return rotate_about_centre(images, arguments.value, arguments.bicubic, arguments.fill)


def shear_x(images: Tensor, arguments: Arguments) -> Tensor:
    """Moves each row left by its distance from the upper edge, times a factor."""
    rows = torch.arange(images.shape[2], device=images.device) + 0.5
    return move_rows(images, arguments.value[:, None] * rows, arguments.bicubic, arguments.fill)


def shear_y(images: Tensor, arguments: Arguments) -> Tensor:
    """Moves each column up by its distance from the left edge, times a factor."""
    return shear_x(images.mT, arguments).mT


def translate_x(images: Tensor, arguments: Arguments) -> Tensor:
    """Moves the image left by a fraction of its width."""
    distances = (arguments.value[:, None] * images.shape[3]).expand(-1, images.shape[2])
    return move_rows(images, distances, arguments.bicubic, arguments.fill)


def translate_y(images: Tensor, arguments: Arguments) -> Tensor:
    """Moves the image up by a fraction of its height."""
    return translate_x(images.mT, arguments).mT


def _per_table(values: Tensor) -> Tensor:
    return values[:, None, None]  # (n, 1, 1), beside tables (n, 3, 256)


def _grey_levels(images: Tensor) -> Tensor:
    return torch.arange(256, device=images.device)


def _histograms(images: Tensor) -> Tensor:
    pixels = images.flatten(2).long()  # (n, 3, H W)
    counts = torch.zeros((*images.shape[:2], 256), dtype=torch.long, device=images.device)
    return counts.scatter_add_(2, pixels, torch.ones_like(pixels[:1, :1, :1]).expand_as(pixels))


def _look_up(images: Tensor, table: Tensor) -> Tensor:
    table = table.clamp(0, 255).byte().expand(*images.shape[:2], 256)
    return table.gather(2, images.flatten(2).long()).view_as(images)


def _luminance(images: Tensor) -> Tensor:
    red, green, blue = images.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16  # (n, 1, H, W)


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return to_bytes((images - base).mul_(factor[:, None, None, None]).add_(base))


@dataclass(frozen=True)
class Operation:
    """An operation, and its argument as a function of the level in 0..1 and a sign."""

    function: Callable[[Tensor, Arguments], Tensor]
    argument: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _no_argument(level: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.zeros_like(level)


def _blend_factor(level: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return np.maximum(0.1, 1 + sign * level * 0.9)


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": Operation(auto_contrast, _no_argument),
    "Equalize": Operation(equalize, _no_argument),
    "Invert": Operation(invert, _no_argument),
    "Rotate": Operation(rotate, lambda level, sign: sign * level * 30),
    "Posterize": Operation(posterize, lambda level, _: 4 - np.floor(level * 4)),
    "Solarize": Operation(solarize, lambda level, _: 256 - np.floor(level * 256)),
    "SolarizeAdd": Operation(solarize_add, lambda level, _: np.floor(level * 110)),
    "Colour": Operation(colour, _blend_factor),
    "Contrast": Operation(contrast, _blend_factor),
    "Brightness": Operation(brightness, _blend_factor),
    "Sharpness": Operation(sharpness, _blend_factor),
    "ShearX": Operation(shear_x, lambda level, sign: sign * level * 0.3),
    "ShearY": Operation(shear_y, lambda level, sign: sign * level * 0.3),
    "TranslateX": Operation(translate_x, lambda level, sign: sign * level * 0.45),
    "TranslateY": Operation(translate_y, lambda level, sign: sign * level * 0.45),
}
