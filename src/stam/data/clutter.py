"""Cluttered translated MNIST, made on the fly from digits in an `.npz` file (Mnih et al. 2014, section 4.1).

A scene of 60 pixels shows one 28 pixel digit anywhere, and four 8 pixel pieces of other digits. Scenes are
painted in batches on any device, without a loop over samples. Every random number is a hash of (seed, epoch,
scene), so a scene is the same on every device and in every batch; each epoch of training has fresh ones.

The file holds `train_images` (digits, height, width) as bytes, `train_labels`, `test_images`, `test_labels`.
"""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stam.data.loader import RawBatch
from stam.data.randomness import random_key
from stam.data.splits import SplitRecord, Splits
from stam.errors import DataError, require
from stam.shapes import Int, UInt8

_PARTS = ("train_images", "train_labels", "test_images", "test_labels")
_MOST_BYTES = 2**30
_MOST_CLASSES = 100_000


class ClutteredScenes:
    """Scenes of one digit anywhere among pieces of other digits; those of training differ in every epoch.

    Attributes:
        classes: The digits' names.
        labels: The digit in each scene.
        scene_size: Pixels of a scene's side.
    """

    def __init__(
        self,
        digits: UInt8[np.ndarray, "digits height width"],
        labels: Int[np.ndarray, " digits"],
        *,
        seed: int = 0,
        scene_size: int = 60,
        num_pieces: int = 4,
        piece_size: int = 8,
    ) -> None:
        """Keeps the digits; a scene for each is painted when it is asked for.

        Args:
            digits: Grey levels of each digit.
            labels: Its class.
            seed: Seed of the scenes.
            scene_size: Pixels of a scene's side.
            num_pieces: Pieces of other digits in a scene.
            piece_size: Pixels of a piece's side.
        """
        side = max(digits.shape[1:])
        require(scene_size >= side, f"scene_size {scene_size} is smaller than a digit of {side}")
        require(1 <= piece_size <= min(digits.shape[1:]), f"piece_size {piece_size} is larger than a digit")
        self.labels = labels.astype(np.int64)
        self.classes = tuple(str(number) for number in range(int(labels.max()) + 1))
        self.scene_size, self._num_pieces, self._piece_size = scene_size, num_pieces, piece_size
        self._seed = seed
        self._digits = torch.from_numpy(digits.copy())
        self._labels = torch.from_numpy(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "ClutteredScenes":
        """Returns the same scenes, painted on a device."""
        moved = object.__new__(ClutteredScenes)
        moved.__dict__ |= self.__dict__
        moved._digits, moved._labels = self._digits.to(device), self._labels.to(device)
        return moved

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Paints one scene, as `paint` does in epoch 0."""
        return self.paint(np.array([index])).images[0].permute(1, 2, 0).cpu().numpy()

    def paint(self, indices: Int[np.ndarray, " batch"], epoch: int = 0) -> RawBatch:
        """Paints scenes on the device of the digits."""
        scenes, device = torch.from_numpy(indices), self._digits.device
        if device.type == "cuda":
            scenes = scenes.pin_memory()
        scenes = scenes.to(device, non_blocking=True)
        count, side = self._num_pieces, self._piece_size
        height, width = self._digits.shape[1:]
        words = hashed(random_key("clutter", self._seed, epoch), scenes, 2 + 5 * count)  # (B, 2 + 5 pieces)
        canvas = torch.zeros(len(scenes), self.scene_size**2, dtype=torch.int32, device=device)
        tops, lefts = (
            words[:, 0] % (self.scene_size - height + 1),
            words[:, 1] % (self.scene_size - width + 1),
        )
        self._add(canvas, self._digits[scenes], tops, lefts)
        other, row, column, top, left = (
            words[:, 2:].unflatten(1, (count, 5)).unbind(dim=2)
        )  # (B, pieces) each
        other = (scenes[:, None] + 1 + other % max(len(self) - 1, 1)) % len(self)  # never the digit itself
        rows = (row % (height - side + 1))[..., None, None] + torch.arange(side, device=device)[:, None]
        columns = (column % (width - side + 1))[..., None, None] + torch.arange(side, device=device)
        pieces = self._digits[other[..., None, None], rows, columns]  # (B, pieces, side, side)
        places = self.scene_size - side + 1
        for number in range(count):
            self._add(canvas, pieces[:, number], top[:, number] % places, left[:, number] % places)
        grey = canvas.clamp_max(255).to(torch.uint8).view(-1, 1, self.scene_size, self.scene_size)
        sizes = torch.full((len(scenes), 2), self.scene_size)
        return RawBatch(grey.expand(-1, 3, -1, -1), sizes, self._labels[scenes], torch.from_numpy(indices))

    def _add(self, canvas: Tensor, images: Tensor, tops: Tensor, lefts: Tensor) -> None:
        """Adds an image to each scene, its corner at some place."""
        height, width = images.shape[1:]
        rows = tops[:, None] + torch.arange(height, device=tops.device)  # (B, h)
        columns = lefts[:, None] + torch.arange(width, device=lefts.device)  # (B, w)
        places = rows[:, :, None] * self.scene_size + columns[:, None, :]
        canvas.scatter_add_(1, places.flatten(1), images.flatten(1).int())


def hashed(key: int, indices: Int[Tensor, " batch"], count: int) -> Int[Tensor, "batch count"]:
    """Returns random numbers from 0 to 2^63 - 1 as a hash of a key, an index and a position (SplitMix64)."""
    positions = torch.arange(1, count + 1, device=indices.device)
    mixed = (
        _signed(key)
        + indices[:, None] * _signed(0x9E3779B97F4A7C15)
        + positions * _signed(0xD1B54A32D192ED03)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 1)


def _signed(word: int) -> int:
    """Returns 64 bits as the signed number that torch keeps them in."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shifts 64 bits to the right and fills up with zeros."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def open_clutter(path: Path, seed: int = 0) -> Splits:
    """Opens digits in an `.npz` file as cluttered scenes: of its training digits, and of its test digits.

    Raises:
        DataError: The file is not such a file.
    """
    parts = _read_parts(path)
    for split in ("train", "test"):
        images, labels = parts[f"{split}_images"], parts[f"{split}_labels"]
        sound = images.ndim == 3 and images.dtype == np.uint8 and labels.shape == images.shape[:1]
        sound = sound and labels.dtype.kind in "iu" and len(labels) > 0
        if not sound or labels.min() < 0 or labels.max() >= _MOST_CLASSES:
            raise DataError(
                f"{path}: {split}_images must be bytes (digits, height, width) with a label each, "
                f"a whole number from 0 on, got {images.dtype} {images.shape} and "
                f"{labels.dtype} {labels.shape}"
            )
    train, test = (
        ClutteredScenes(parts[f"{split}_images"], parts[f"{split}_labels"], seed=seed + number)
        for number, split in enumerate(("train", "test"))
    )
    if test.classes != train.classes:
        raise DataError(f"{path}: its test digits are of other classes than its training digits")
    record = SplitRecord(train.classes, len(train), len(test), digest=f"clutter {path.name} seed {seed}")
    return Splits(train, test, record)


def _read_parts(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a file of digits, and checks its sizes before memory is taken for them."""
    try:
        require(path.is_file(), "it is not a file")
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        require(unpacked <= _MOST_BYTES, f"it would unpack to {unpacked} bytes")
        with np.load(path, allow_pickle=False) as stored:
            missing = [part for part in _PARTS if part not in stored.files]
            if missing:
                raise DataError(f"{path} lacks {', '.join(missing)}: it needs {', '.join(_PARTS)}")
            return {part: stored[part] for part in _PARTS}
    except DataError:
        raise
    except Exception as error:  # a damaged archive makes numpy and zipfile raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} cannot be read as digits: {reason}") from error
