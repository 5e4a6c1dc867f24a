"""From grey levels to the numbers a network takes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stam.config import IMAGENET_MEAN, IMAGENET_STD
from stam.shapes import Float, UInt8


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


def to_device(values: Sequence[float] | np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Sends a few host values to a device without waiting for the work queued there."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait
    return tensor.to(device, non_blocking=True)
