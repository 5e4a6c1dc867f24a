"""The embedded default: find and read a handwritten digit among fragments of other digits.

The digits are scikit-learn's (8x8 pixels, 1,797 of them). A scene shows one, enlarged, at a place drawn
uniformly; around it lie small crops of other digits and noise. A fragment looks like part of a digit, so an
agent cannot tell at once what it has found: where to look next matters, the classic test of hard attention.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Philox
from PIL import Image

from stam.data.randomness import random_key, random_words
from stam.data.splits import SplitRecord, Splits, stratified_split
from stam.errors import require, require_choice
from stam.shapes import Int, UInt8

# Which digits are held out never depends on a seed, so no two runs can mix training and test digits.
_HELD_OUT_SEED = 0
_HELD_OUT_FRACTION = 0.2
_CROPS_PER_DIGIT = 8
_RIM = 1  # pixels at a digit's edge that a fragment may touch
_LENGTHS = {"train": 60_000, "test": 2_000}


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


class ClutteredDigits:
    """Scenes of one digit among fragments; scene `index` depends on (seed, split, index) and the sizes only.

    Attributes:
        classes: The digits' names, "0" to "9".
        labels: The digit in each scene.
        source_digits: Which of scikit-learn's digits each scene shows.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        seed: int = 0,
        num_scenes: int | None = None,
        scene_size: int = 56,
        digit_size: int = 16,
        size_jitter: int = 2,
        contrast_jitter: float = 0.25,
        num_fragments: int = 6,
        fragment_size: int = 6,
        noise: int = 32,
    ) -> None:
        """Draws which digit each scene shows; the pixels are made in `load`.

        Args:
            split: `train` or `test`; they share no digit.
            seed: Seed of the scenes.
            num_scenes: How many; 60,000 to train and 2,000 to test if not given.
            scene_size: Pixels of a scene's side.
            digit_size: Pixels of the digit's side.
            size_jitter: The digit's side varies by up to this many pixels either way.
            contrast_jitter: The largest share of its brightness that a digit or fragment loses.
            num_fragments: Crops of other digits in a scene.
            fragment_size: Pixels of a crop's side.
            noise: Grey levels of the noise, which lies on all pixels.
        """
        require_choice("split", split, tuple(_LENGTHS))
        num_scenes = _LENGTHS[split] if num_scenes is None else num_scenes
        largest = digit_size + size_jitter
        require(num_scenes >= 1, f"num_scenes must be at least 1, got {num_scenes}")
        require(0 <= size_jitter < digit_size, f"size_jitter must be below digit_size, got {size_jitter}")
        require(0 <= contrast_jitter < 1, f"contrast_jitter must be in [0, 1), got {contrast_jitter}")
        require(num_fragments >= 0, f"num_fragments must be 0 or more, got {num_fragments}")
        require(0 <= noise <= 128, f"noise must be in 0..128 grey levels, got {noise}")
        require(
            1 <= fragment_size <= digit_size - size_jitter,
            f"fragment_size must be at least 1 and within the digit, got {fragment_size}",
        )
        require(
            scene_size >= largest + 2 * fragment_size,
            f"scene_size {scene_size} leaves no room beside a digit of {largest}: "
            f"use at least {largest + 2 * fragment_size}",
        )
        self.scene_size = scene_size
        self._contrast_jitter = contrast_jitter
        self._noise = noise
        self._num_fragments = num_fragments
        _, digit_labels, numbers = _digits_of(split)
        sides = range(digit_size - size_jitter, digit_size + size_jitter + 1)
        # Strokes stay below 256 - noise, so that adding the noise cannot wrap around.
        self._digits = [(_enlarged(split, side) * ((256 - noise) / 256)).astype(np.uint8) for side in sides]
        self._fragments = _crops(self._digits[size_jitter], fragment_size, split)
        self._key = random_key("digit scenes " + split, seed)
        draws = random_words(num_scenes, "digit of scene " + split, seed)
        self._chosen = (draws % len(numbers)).astype(np.int64)
        self.classes = tuple(str(digit) for digit in range(10))
        self.labels = digit_labels[self._chosen]
        self.source_digits = numbers[self._chosen]

    def __len__(self) -> int:
        return len(self._chosen)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Paints one scene; it has its size whatever `decode_size` is."""
        return self.load_batch(np.array([index]))[0]

    def load_batch(self, indices: Int[np.ndarray, "batch"]) -> UInt8[np.ndarray, "batch height width 3"]:
        """Paints several scenes."""
        grey = np.empty((len(indices), self.scene_size, self.scene_size), dtype=np.uint8)
        for scene, index in zip(grey, indices, strict=True):
            self._paint(scene, int(index))
        return np.repeat(grey[..., None], 3, axis=-1)

    def digit_box(self, index: int) -> Box:
        """Returns where the digit of a scene lies, for analysis: no agent is told."""
        return self._place_digit(self._random_words(index))[1]

    def _random_words(self, index: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Returns all randomness of a scene: 4 words for the digit, 4 for each fragment, a byte a pixel."""
        num_words = 4 * (1 + self._num_fragments) + -(-(self.scene_size**2) // 8)
        return Philox(key=np.array([self._key, index], dtype=np.uint64)).random_raw(num_words)

    def _place_digit(self, words: np.ndarray) -> tuple[int, Box]:
        """Returns which of the enlarged sizes is shown, and where."""
        size, top, left = words[:3].tolist()
        size %= len(self._digits)
        side = self._digits[size].shape[-1]
        num_places = self.scene_size - side + 1
        return size, Box(top % num_places, left % num_places, side, side)

    def _paint(self, scene: np.ndarray, index: int) -> None:
        words = self._random_words(index)
        digit = int(self._chosen[index])
        size, box = self._place_digit(words)
        scene[:] = 0
        self._lay(scene, self._digits[size][digit], box.top, box.left, int(words[3]))
        num_others, num_crops, side = len(self._fragments) - 1, *self._fragments.shape[1:3]
        places = _places_beside(box, self.scene_size, side)
        pixels_from = 4 * (1 + self._num_fragments)
        for other, crop, place, contrast in words[4:pixels_from].reshape(-1, 4).tolist():
            fragment = self._fragments[(digit + 1 + other % num_others) % (num_others + 1), crop % num_crops]
            top, left = divmod(int(places[place % len(places)]), self.scene_size - side + 1)
            self._lay(scene, fragment, top, left, contrast)
        pixels = words[pixels_from:].astype("<u8").view(np.uint8)[: scene.size].reshape(scene.shape)
        scene += ((pixels.astype(np.uint16) * self._noise) >> 8).astype(np.uint8)

    def _lay(self, scene: np.ndarray, image: np.ndarray, top: int, left: int, contrast: int) -> None:
        """Lays strokes over a scene; the brighter pixel wins, so nothing hides the digit."""
        faded = image * np.float32(1 - self._contrast_jitter * (contrast / 2**64))
        under = scene[top : top + image.shape[0], left : left + image.shape[1]]
        np.maximum(under, faded.astype(np.uint8), out=under)


def open_digits(seed: int = 0) -> Splits:
    """Returns the training scenes, and the test scenes to validate on."""
    train, test = ClutteredDigits("train", seed=seed), ClutteredDigits("test", seed=seed)
    record = SplitRecord(train.classes, len(train), len(test), digest=f"digits seed {seed}")
    return Splits(train, test, record)


@functools.cache
def _digits_of(split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a split's digits, (digits, 8, 8) floats in 0..1, their labels, and their numbers in the set."""
    from sklearn.datasets import load_digits  # here, since importing it takes a second

    bunch = load_digits()
    labels = bunch.target.astype(np.int64)
    train, test = stratified_split(labels, _HELD_OUT_FRACTION, _HELD_OUT_SEED)
    numbers = train if split == "train" else test
    return (bunch.images[numbers] / 16).astype(np.float32), labels[numbers], numbers


@functools.cache
def _enlarged(split: str, side: int) -> np.ndarray:
    """Returns a split's digits resized (bicubic) to grey levels 0..255."""
    digits, _, _ = _digits_of(split)
    resized = [Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC) for digit in digits]
    return np.clip(np.stack([np.asarray(image) for image in resized]) * 255, 0, 255)


def _crops(digits: np.ndarray, side: int, split: str) -> np.ndarray:
    """Returns crops (digits, crops, side, side) of each digit, from the half of its places with most ink."""
    windows = np.lib.stride_tricks.sliding_window_view(digits, (side, side), axis=(1, 2))
    windows = windows.reshape(len(digits), -1, side, side)
    ink = windows.mean(axis=(2, 3))
    order = random_words(ink.size, "digit crops " + split).reshape(ink.shape)
    order[ink < np.median(ink, axis=1, keepdims=True)] = np.iinfo(np.uint64).max
    chosen = np.argsort(order, axis=1, kind="stable")[:, :_CROPS_PER_DIGIT]
    return np.take_along_axis(windows, chosen[..., None, None], axis=1)


def _places_beside(box: Box, scene_size: int, side: int) -> np.ndarray:
    """Returns the top left corners, as flat indices, where a fragment touches the digit's rim at most."""
    num_places = scene_size - side + 1
    free = np.ones((num_places, num_places), dtype=bool)
    rows, columns = (
        slice(max(0, start + _RIM - side + 1), start + length - _RIM)
        for start, length in ((box.top, box.height), (box.left, box.width))
    )
    free[rows, columns] = False
    return np.flatnonzero(free)
