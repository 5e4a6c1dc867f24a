"""Training images mixed with each other, or partly hidden, with targets to match."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stam.shapes import Bool, Float, Int


def smooth_targets(
    labels: Int[Tensor, " batch"], num_classes: int, smoothing: float
) -> Float[Tensor, "batch classes"]:
    """Returns target distributions: the label, less what smoothing spreads over all classes."""
    targets = F.one_hot(labels, num_classes).float()
    return targets * (1 - smoothing) + smoothing / num_classes


def mix(
    images: Float[Tensor, "batch channels height width"],
    targets: Float[Tensor, "batch classes"],
    mixup: float,
    cutmix: float,
    random: np.random.Generator,
) -> tuple[Float[Tensor, "batch channels height width"], Float[Tensor, "batch classes"]]:
    """Mixes each image with its mirror place in the batch: blended (mixup) or with a pasted box (CutMix).

    Args:
        images: Normalised images.
        targets: Their target distributions.
        mixup: Alpha of the blend's Beta distribution; 0 turns mixup off.
        cutmix: Alpha of the box area's; 0 turns CutMix off. With both on, a coin decides for each batch.
        random: Source of randomness, on the host.
    """
    use_cutmix = cutmix > 0 and (mixup <= 0 or random.random() < 0.5)
    alpha = cutmix if use_cutmix else mixup
    if alpha <= 0 or len(images) < 2:
        return images, targets
    share = float(random.beta(alpha, alpha))
    if use_cutmix:
        height, width = images.shape[-2:]
        side = np.sqrt([1 - share])
        top, bottom = (int(end) for (end,) in _spans(height, side, random))
        left, right = (int(end) for (end,) in _spans(width, side, random))
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        mixed = images * share + images.flip(0) * (1 - share)
    return mixed, targets * share + targets.flip(0) * (1 - share)


def _spans(length: int, fraction: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns random intervals of about those fractions, cut off at the ends."""
    half = (length * fraction).astype(int) // 2
    centre = random.integers(length, size=len(fraction))
    return np.maximum(0, centre - half), np.minimum(length, centre + half)


def _inside(
    top: np.ndarray, bottom: np.ndarray, left: np.ndarray, right: np.ndarray, images: Tensor
) -> Bool[Tensor, "batch 1 height width"]:
    """Returns which pixels lie in the box of their image."""
    height, width = images.shape[-2:]
    boxes = torch.from_numpy(np.stack([top, bottom, left, right])).to(images.device)[..., None]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    inside_rows = (rows >= boxes[0]) & (rows < boxes[1])  # (B, H)
    inside_columns = (columns >= boxes[2]) & (columns < boxes[3])  # (B, W)
    return (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]


def erase(
    images: Float[Tensor, "batch channels height width"],
    probability: float,
    random: np.random.Generator,
    generator: torch.Generator,
) -> Float[Tensor, "batch channels height width"]:
    """Replaces a random box of some images by noise: 2% to a third of the area, ratio 0.3 to 3.3."""
    if probability <= 0:
        return images
    batch, _, height, width = images.shape
    area = random.uniform(0.02, 1 / 3, batch) * height * width
    ratio = np.exp(random.uniform(np.log(0.3), np.log(1 / 0.3), batch))
    tall = np.clip(np.sqrt(area * ratio), 1, height).astype(int)
    wide = np.clip(np.sqrt(area / ratio), 1, width).astype(int)
    top = (random.random(batch) * (height - tall + 1)).astype(int)
    left = (random.random(batch) * (width - wide + 1)).astype(int)
    tall = np.where(random.random(batch) < probability, tall, 0)  # nothing is erased of the others
    inside = _inside(top, top + tall, left, left + wide, images)
    noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
    return torch.where(inside, noise, images)
