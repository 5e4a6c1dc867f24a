"""Small image folders for tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def make_image_folder(
    root: Path, classes: int = 3, train: int = 6, val: int = 3, size: int = 40, split: bool = True
) -> Path:
    """Writes class folders of noisy images whose colour gives the class away."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)) if split else (("", train),):
        for label in range(classes):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 90, (size + 2 * label, size + index, 3), dtype=np.uint8)
                pixels[..., label % 3] += 150
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return root
