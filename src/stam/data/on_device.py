"""Training images that lie in a GPU's memory: a batch of them costs next to nothing."""

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from stam.data.loader import BatchLoader, RawBatch, TrainingView
from stam.data.randomness import random_order
from stam.data.sampler import batches
from stam.data.scenes import PaintedScenes, Scenes, run_length
from stam.shapes import Int, UInt8

_MOST_OF_THE_MEMORY = 0.2
_MOST_IMAGES = 50_000  # decoding more takes longer than a short training
_SAMPLE = 48  # images by whose sizes the memory for all is estimated
_DECODED_AT_ONCE = 64


class DeviceScenes:
    """The same scenes, decoded once and kept on a device, each at the top left of its padding.

    Batches are the same as those a loader makes, in the same order.
    """

    def __init__(self, scenes: Scenes, images: Tensor, sizes: Tensor) -> None:
        """Keeps images that were decoded.

        Args:
            scenes: Where they come from.
            images: All of them, (N, 3, H, W), on the device.
            sizes: The true height and width of each, on the host.
        """
        self.classes, self.labels = scenes.classes, scenes.labels
        self.run_length = run_length(scenes)
        self._scenes, self._images, self._sizes = scenes, images, sizes
        self._labels = torch.from_numpy(scenes.labels).to(images.device)
        self._stream = torch.cuda.Stream(images.device) if images.is_cuda else None
        if self._stream is not None:  # the images may still be on their way
            self._stream.wait_stream(torch.cuda.current_stream(images.device))

    def __len__(self) -> int:
        return len(self._scenes)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Returns one image from its source: worker processes cannot use the device."""
        return self._scenes.load(index, decode_size)

    def read_ahead(self, indices: Int[np.ndarray, "_"]) -> None:
        """Reads nothing: it is all there."""

    def paint(self, indices: Int[np.ndarray, " batch"], epoch: int = 0) -> RawBatch:
        """Returns some images, the same in every epoch.

        They are copied on a stream of their own, so that they do not wait for the batch before.
        """
        chosen = torch.from_numpy(indices)
        sizes = self._sizes[chosen]
        height, width = sizes.amax(dim=0).tolist()
        with torch.cuda.stream(self._stream):  # does nothing without one
            there = chosen.to(self._images.device)
            images = self._images[there, :, :height, :width]
            labels = self._labels[there]
        if self._stream is not None:
            self._stream.synchronize()
        return RawBatch(images, sizes, labels, chosen)


def keep_on_device(
    scenes: Scenes, device: torch.device, decode_size: int | None, num_workers: int, progress: bool = True
) -> Scenes:
    """Decodes all images into a GPU's memory, if they are few and take a fifth of it at most.

    Returns:
        The scenes to train with; those that were given where they are not to be kept.
    """
    if device.type != "cuda" or isinstance(scenes, PaintedScenes) or len(scenes) > _MOST_IMAGES:
        return scenes
    room = _MOST_OF_THE_MEMORY * torch.cuda.get_device_properties(device).total_memory
    sample = np.sort(random_order(len(scenes), "sizes")[:_SAMPLE])
    (few,) = BatchLoader(scenes, [sample], TrainingView(decode_size))
    if few.images[0].numel() * len(scenes) > room:
        return scenes
    kept = kept_on(scenes, device, decode_size, num_workers, room, progress)
    return scenes if kept is None else kept


def kept_on(
    scenes: Scenes,
    device: torch.device,
    decode_size: int | None,
    num_workers: int,
    room: float,
    progress: bool = True,
) -> DeviceScenes | None:
    """Decodes all images onto a device; returns nothing where they take more bytes than there is room."""
    groups = batches(np.arange(len(scenes)), _DECODED_AT_ONCE, drop_last=False)
    loader = BatchLoader(scenes, groups, TrainingView(decode_size), num_workers)
    parts: list[RawBatch] = []
    height = width = 0
    hidden = None if progress else True  # none hides it where there is no terminal
    with tqdm(loader, "decoding", total=len(groups), unit="batch", disable=hidden) as bar:
        for part in bar:
            height, width = max(height, part.images.shape[2]), max(width, part.images.shape[3])
            if len(scenes) * 3 * height * width > room:
                return None
            parts.append(RawBatch(part.images.to(device), part.sizes, part.labels, part.indices))
    images = torch.zeros(len(scenes), 3, height, width, dtype=torch.uint8, device=device)
    for part in parts:
        place = images[part.indices[0] : part.indices[-1] + 1]
        place[:, :, : part.images.shape[2], : part.images.shape[3]] = part.images
    return DeviceScenes(scenes, images, torch.cat([part.sizes for part in parts]))
