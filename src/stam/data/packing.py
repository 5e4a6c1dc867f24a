"""Packing images of any source into indexed shards; see `stam.data.indexed`."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stam.data.checking import check_images
from stam.data.folder import ImageFolder
from stam.data.indexed import FORMAT, FORMAT_VERSION, INDEX_FILE, PARTS, TABLE
from stam.data.randomness import random_order
from stam.data.remote import read_bytes
from stam.data.scenes import Scenes
from stam.data.shards import MAX_IMAGE_BYTES, TarShards, read_member
from stam.data.splits import Splits
from stam.errors import DataError, require
from stam.files import make_folder, save_content, write_atomically
from stam.shapes import Int

_LONGEST_RUN = 32  # images; of photographs of 110 kB a read of 3.5 MB, against 30 ms until it begins
_LEAST_RUNS = 1000  # of a part: fewer images are shown in shorter runs, so that every epoch is a good mix


@dataclass(frozen=True)
class ShardReport:
    """What was packed: images of each part, shards, and which images were left out as unreadable."""

    num_train: int
    num_val: int
    num_shards: int
    num_bytes: int
    num_test: int = 0
    unreadable: tuple[str, ...] = ()

    def summary(self) -> str:
        """Says it in a line."""
        test = f", {self.num_test} test" if self.num_test else ""
        skipped = f"; skipped {len(self.unreadable)} unreadable images" if self.unreadable else ""
        return (
            f"{self.num_train} training, {self.num_val} validation{test} images in {self.num_shards} shards, "
            f"{self.num_bytes / 1e6:.1f} MB{skipped}"
        )


def prepare_shards(
    scenes: Splits,
    out: Path,
    shard_bytes: int = 256_000_000,
    seed: int = 0,
    skip_unreadable: bool = False,
) -> ShardReport:
    """Packs the images of a source into indexed shards, in an order drawn once; files are copied as they are.

    Every image is decoded once before: no training has to do it again.

    Args:
        scenes: The source, such as `open_scenes` returns.
        out: The folder to make; it must be empty or absent.
        shard_bytes: What a shard has, up to one image more.
        seed: Seed of the order.
        skip_unreadable: Leave out images that cannot be read instead of raising.
    """
    require(shard_bytes > 0, f"a shard needs more than {shard_bytes} bytes")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out '{out}' is not empty: name another folder")
    packed: list[_Part] = []
    unreadable: list[str] = []
    for name, given in zip(PARTS, (scenes.train, scenes.val, scenes.test), strict=True):
        if given is not None:
            read, title = _reader(given), f"checking {name} images"
            report = check_images(given, skip_unreadable=skip_unreadable, description=title)
            unreadable += report.unreadable
            packed.append(_Part(name, given, read, report.readable, out, shard_bytes, seed))
    make_folder(out)
    for part in packed:
        part.pack()
    digest = hashlib.sha256(b"".join(part.digest.digest() for part in packed))
    index = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "classes": list(scenes.train.classes),
        "digest": digest.hexdigest()[:16],
        "checked": True,
        "run_length": run_length(len(packed[0].order)),
        "shards": {part.name: part.shards for part in packed},
    }
    save_content(out / INDEX_FILE, json.dumps(index, indent=1) + "\n")  # with it the folder is complete
    num_images = {part.name: len(part.order) for part in packed}
    return ShardReport(
        num_train=num_images[PARTS[0]],
        num_val=num_images[PARTS[1]],
        num_shards=sum(len(part.shards) for part in packed),
        num_bytes=sum((out / shard).stat().st_size for part in packed for shard in part.shards),
        num_test=num_images.get(PARTS[2], 0),
        unreadable=tuple(unreadable),
    )


def run_length(num_images: int) -> int:
    """Returns how many images that lie side by side an epoch shows one after another."""
    return min(_LONGEST_RUN, max(1, num_images // _LEAST_RUNS))


class _Part:
    """One part of a source on its way into shards."""

    def __init__(
        self,
        name: str,
        scenes: Scenes,
        read: Callable[[int], tuple[str, bytes]],
        readable: Int[np.ndarray, "readable"],
        out: Path,
        shard_bytes: int,
        seed: int,
    ) -> None:
        self.name, self.out, self.shard_bytes = name, out, shard_bytes
        self.read, self.labels, self.classes = read, scenes.labels, scenes.classes
        self.order = readable[random_order(len(readable), "shards", seed)]
        self.table = np.zeros(len(readable), dtype=TABLE)
        self.shards: list[str] = []
        self.digest = hashlib.sha256()
        self.num_packed = 0

    def pack(self) -> None:
        """Writes the shards, then the table of what lies where."""
        while self.num_packed < len(self.order):
            name = f"{self.name}-{len(self.shards):06d}.tar"
            write_atomically(self.out / name, self._write_shard)
            self.shards.append(name)
        write_atomically(self.out / f"{self.name}.npy", lambda path: _save_table(path, self.table))

    def _write_shard(self, path: Path) -> None:
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            while self.num_packed < len(self.order) and tar.offset < self.shard_bytes:
                index, number = int(self.order[self.num_packed]), self.num_packed
                suffix, content = self.read(index)
                label = int(self.labels[index])
                offset = _add(tar, f"{number:09d}{suffix}", content)
                _add(tar, f"{number:09d}.cls", self.classes[label].encode())
                self.table[number] = len(self.shards), offset, len(content), label
                self.digest.update(hashlib.sha256(content).digest() + label.to_bytes(4, "little"))
                self.num_packed += 1


def _save_table(path: Path, table: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, table, allow_pickle=False)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Adds a file to a tar and returns where its bytes lie."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
    return tar.offset - -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _reader(scenes: Scenes) -> Callable[[int], tuple[str, bytes]]:
    """Returns what reads a file of a source as it is: its suffix and its bytes."""
    if isinstance(scenes, ImageFolder):
        root, names = scenes.root, scenes.names
        return lambda index: (Path(names[index]).suffix.lower(), _read_file(root / names[index]))
    if isinstance(scenes, TarShards):
        members = scenes.members
        return lambda index: (Path(members[index].name).suffix.lower(), read_member(members[index]))
    raise DataError("only folders of class folders and tar files can be packed into shards")


def _read_file(path: Path) -> bytes:
    size = path.stat().st_size if path.is_file() else 0
    if size > MAX_IMAGE_BYTES:
        raise DataError(f"{path} has {size} bytes, at most {MAX_IMAGE_BYTES} are read: make it smaller")
    return read_bytes(str(path))
