"""Tar shards with an index beside them: millions of images in any place, and no memory for them.

`prepare_shards` packs any source of images into a folder:

    shards.json        classes, digest, and the shards of each part
    train.npy val.npy  for each image its shard, offset, size and label, in the order of the shards
    train-000000.tar   the images themselves, in the layout of WebDataset: 000000123.jpg, 000000123.cls

The tables are mapped into memory, not read. An image is one read of its bytes alone, from a file or from any
URL that fsspec knows, so processes, workers and resumed runs read exactly what a sampler gives them.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from stam.data.folder import ImageFolder
from stam.data.images import decode_image
from stam.data.randomness import random_order
from stam.data.scenes import Scenes
from stam.data.shards import MAX_IMAGE_BYTES, TarShards, read_member
from stam.data.splits import TRAIN, VAL_NAMES, SplitRecord, Splits
from stam.errors import DataError, require, require_package
from stam.files import make_folder, save_content, write_atomically
from stam.shapes import UInt8

INDEX_FILE = "shards.json"
FORMAT = "stam-shards"
FORMAT_VERSION = "1.0"
_PARTS = (TRAIN, VAL_NAMES[0])
_TABLE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("label", "<u4")])


@dataclass(frozen=True)
class ShardReport:
    """What was packed: images and shards of each part."""

    num_train: int
    num_val: int
    num_shards: int
    num_bytes: int

    def summary(self) -> str:
        """Says it in a line."""
        size = self.num_bytes / 1e6
        return (
            f"{self.num_train} training and {self.num_val} validation images in {self.num_shards} shards, "
            f"{size:.1f} MB"
        )


class IndexedShards:
    """The images of one part of some indexed shards.

    Attributes:
        classes: Class names.
        labels: The class of each image.
    """

    def __init__(self, root: str, shards: Sequence[str], table: np.ndarray, classes: tuple[str, ...]) -> None:
        self._root, self._shards, self._table = root, tuple(shards), table
        self.classes = classes
        self.labels = table["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._table)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Reads and decodes one image."""
        shard, offset, size, _ = self._table[index].tolist()
        name = f"image {index} in {self._root}/{self._shards[shard]}"
        if size > MAX_IMAGE_BYTES:
            raise DataError(f"{name} has {size} bytes, at most {MAX_IMAGE_BYTES} are read: pack it anew")
        content = read_bytes(f"{self._root}/{self._shards[shard]}", offset, size)
        if len(content) < size:
            raise DataError(f"{name}: the shard is shorter than its index says: copy or download it again")
        return decode_image(content, name, decode_size)

    def __getstate__(self) -> dict[str, Any]:
        """Sends a worker where the table lies, not the table."""
        state = dict(self.__dict__)
        if isinstance(self._table, np.memmap):
            state["_table"] = str(self._table.filename)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Maps the table again."""
        if isinstance(state["_table"], str):
            state["_table"] = np.load(state["_table"], mmap_mode="r", allow_pickle=False)
        self.__dict__.update(state)


def is_url(source: str | Path) -> bool:
    """Tells a URL, which fsspec reads, from a path."""
    return "://" in str(source)


def is_indexed(source: str | Path) -> bool:
    """Tells whether a folder or URL holds indexed shards; for a URL nothing else is known."""
    return is_url(source) or (Path(source) / INDEX_FILE).is_file()


def read_bytes(path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Reads a part of a file, or of what a URL names."""
    try:
        if is_url(path):
            fsspec = require_package("fsspec", extra="urls")
            files, place = fsspec.core.url_to_fs(path)
            return files.cat_file(place, start=offset, end=None if size is None else offset + size)
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)
    except (OSError, ValueError, ImportError) as error:  # what fsspec raises depends on the URL
        raise DataError(f"cannot read {path}: {error}") from error


def open_indexed(source: str | Path) -> Splits:
    """Opens indexed shards as training and validation scenes.

    Raises:
        DataError: There are none, or the index is damaged.
    """
    root = str(source).rstrip("/")
    try:
        index = json.loads(read_bytes(f"{root}/{INDEX_FILE}"))
        if index["format"] != FORMAT or index["format_version"].split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise ValueError(f"it is {index['format']} {index['format_version']}")
        classes = tuple(str(name) for name in index["classes"])
        parts = [
            IndexedShards(root, _names(index["shards"][part]), _open_table(root, part), classes)
            for part in _PARTS
        ]
        for part in parts:
            _require_consistent(part)
        record = SplitRecord(classes, len(parts[0]), len(parts[1]), str(index["digest"]))
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the index of {root} is damaged ({error}): run stam prepare shards again") from error
    return Splits(parts[0], parts[1], record)


def _names(shards: list[Any]) -> list[str]:
    """Returns the names of shards; one that leads out of the folder is an error."""
    for name in shards:
        if not isinstance(name, str) or PurePosixPath(name).name != name:
            raise ValueError(f"no shard may be called {name!r}")
    return shards


def _open_table(root: str, part: str) -> np.ndarray:
    place = f"{root}/{part}.npy"
    if is_url(root):
        table = np.load(io.BytesIO(read_bytes(place)), allow_pickle=False)
    else:
        try:
            table = np.load(place, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise DataError(f"cannot read {place}: {error}") from error
    if table.dtype != _TABLE or table.ndim != 1:
        raise ValueError(f"{part}.npy holds something else")
    return table


def _require_consistent(part: IndexedShards) -> None:
    table = part._table
    if len(table) and int(table["label"].max()) >= len(part.classes):
        raise ValueError("a label has no class")
    if len(table) and int(table["shard"].max()) >= len(part._shards):
        raise ValueError("an image has no shard")


def prepare_shards(scenes: Splits, out: Path, shard_bytes: int = 256_000_000, seed: int = 0) -> ShardReport:
    """Packs the images of a source into indexed shards, in an order drawn once; files are copied as they are.

    Args:
        scenes: The source, such as `open_scenes` returns.
        out: The folder to make; it must be empty or absent.
        shard_bytes: What a shard has, up to one image more.
        seed: Seed of the order.
    """
    require(shard_bytes > 0, f"a shard needs more than {shard_bytes} bytes")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out '{out}' is not empty: name another folder")
    make_folder(out)
    packed = [
        _Part(name, given, out, shard_bytes, seed)
        for name, given in zip(_PARTS, (scenes.train, scenes.val), strict=True)
    ]
    for part in packed:
        part.pack()
    digest = hashlib.sha256(b"".join(part.digest.digest() for part in packed))
    index = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "classes": list(scenes.train.classes),
        "digest": digest.hexdigest()[:16],
        "shards": {part.name: part.shards for part in packed},
    }
    save_content(out / INDEX_FILE, json.dumps(index, indent=1) + "\n")  # with it the folder is complete
    return ShardReport(
        num_train=len(scenes.train),
        num_val=len(scenes.val),
        num_shards=sum(len(part.shards) for part in packed),
        num_bytes=sum((out / shard).stat().st_size for part in packed for shard in part.shards),
    )


class _Part:
    """One part of a source on its way into shards."""

    def __init__(self, name: str, scenes: Scenes, out: Path, shard_bytes: int, seed: int) -> None:
        self.name, self.out, self.shard_bytes = name, out, shard_bytes
        self.read, self.labels, self.classes = _reader(scenes), scenes.labels, scenes.classes
        self.order = random_order(len(scenes), "shards", seed)
        self.table = np.zeros(len(scenes), dtype=_TABLE)
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
