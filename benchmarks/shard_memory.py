"""Memory that a training needs for its list of images: indexed shards of ten thousand to 1.3 million images.

    python benchmarks/shard_memory.py

The datasets are made up: a thousand small images are packed, and the index names them again and again, as if
every image were another one. Each dataset is opened and read from in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from stam.data import BatchLoader, open_scenes, prepare_shards
from stam.data.indexed import INDEX_FILE

NUM_CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_300_000])
    parser.add_argument("--read", help="a dataset to open and read from; for the script itself")
    given = parser.parse_args()
    if given.read:
        read(Path(given.read))
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        draw_images(home / "images")
        prepare_shards(open_scenes(home / "images"), home / "packed")
        for size in given.sizes:
            repeat(home / "packed", home / str(size), size)
            subprocess.run([sys.executable, __file__, "--read", str(home / str(size))], check=True)


def draw_images(folder: Path) -> None:
    numbers = np.random.default_rng(0)
    for part, count in (("train", 100), ("val", 2)):
        for label in range(NUM_CLASSES):
            (folder / part / f"class{label}").mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / f"class{label}" / f"{index}.jpg")


def repeat(packed: Path, out: Path, size: int) -> None:
    """Makes an index of many images out of one of few."""
    out.mkdir()
    for file in packed.iterdir():
        if file.name != "train.npy":
            (out / file.name).symlink_to(file)
    np.save(out / "train.npy", np.resize(np.load(packed / "train.npy"), size))
    assert (out / INDEX_FILE).exists()


def read(path: Path) -> None:
    before = resident_mib()
    started = time.perf_counter()
    scenes = open_scenes(path).train
    opened = time.perf_counter() - started
    after_opening = resident_mib()
    order = np.random.default_rng(0).integers(0, len(scenes), (100, 64))
    for _ in BatchLoader(scenes, list(order)):
        pass
    row = {"images": len(scenes), "seconds to open": round(opened, 3)}
    row |= {
        "MiB to open": round(after_opening - before, 1),
        "MiB after 6400": round(resident_mib() - before, 1),
    }
    print(json.dumps(row), flush=True)


def resident_mib() -> float:
    """Returns this process's own memory; pages of mapped files belong to the system, which can drop them."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
