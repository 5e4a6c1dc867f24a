"""Tar shards with an index beside them: millions of images in any place, and no memory for them.

`stam.data.packing` makes them:

    shards.json        classes, digest, and the shards of each part
    train.npy val.npy  for each image its shard, offset, size and label, in the order of the shards
    train-000000.tar   the images themselves, in the layout of WebDataset: 000000123.jpg, 000000123.cls

The tables are mapped into memory, not read. Images lie in a random order that was drawn once, so an epoch may
show runs of images that lie side by side (`run_length`): a run is one read of a shard, from a file or any URL
that fsspec knows. Which images a batch holds is a function of seed and epoch alone, so processes, workers and
resumed runs read exactly what a sampler gives them.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from stam.data.images import decode_image
from stam.data.memory import fingerprint
from stam.data.remote import ByteRange, file_sizes, is_url, read_bytes, read_ranges
from stam.data.shards import MAX_IMAGE_BYTES
from stam.data.splits import TEST, TRAIN, VAL_NAMES, SplitRecord, Splits
from stam.errors import DataError, FileError
from stam.files import parse_json
from stam.shapes import Int, UInt8

INDEX_FILE = "shards.json"
FORMAT = "stam-shards"
FORMAT_VERSION = "1.1"
PARTS = (TRAIN, VAL_NAMES[0], TEST)
TABLE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("label", "<u4")])
_MOST_BETWEEN = 16_384  # bytes between two images that are read with them; tar headers and a label take 2,000
_MOST_AT_ONCE = 64_000_000  # bytes of a read


class IndexedShards:
    """The images of one part of some indexed shards.

    Attributes:
        classes: Class names.
        labels: The class of each image.
        run_length: How many images that lie side by side an epoch shows one after another.
    """

    def __init__(
        self,
        root: str,
        shards: Sequence[str],
        table: np.ndarray,
        classes: tuple[str, ...],
        run_length: int = 1,
        checked: bool = False,
        version: str = "",
    ) -> None:
        """Takes what the index says.

        Args:
            root: The folder or URL of the shards.
            shards: Their names.
            table: Where each image lies.
            classes: Class names.
            run_length: See the attribute.
            checked: Whether every image was decoded before it was packed.
            version: What the server says of the shards' versions, where that is known.
        """
        self._root, self._shards, self._table, self._checked = root, tuple(shards), table, checked
        self._version = version
        self._ahead: dict[int, bytes] = {}
        self.classes, self.run_length = classes, run_length
        self.labels = table["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._table)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Reads and decodes one image."""
        return decode_image(self.content(index), self._name(index), decode_size)

    def content(self, index: int) -> bytes:
        """Reads one image as it is stored."""
        part, name = self._range(index), self._name(index)
        size = part.end - part.start
        if size > MAX_IMAGE_BYTES:
            raise DataError(f"{name} has {size} bytes, at most {MAX_IMAGE_BYTES} are read: pack it anew")
        content = self._ahead.get(index)
        if content is None:
            (content,) = read_ranges([part])
        if len(content) < size:
            raise DataError(f"{name}: the shard is shorter than its index says: copy or download it again")
        if len(content) > size:
            raise DataError(f"cannot read {part.path}: the server sends whole files, not the parts asked for")
        return content

    @property
    def is_local(self) -> bool:
        """Whether they lie in a folder."""
        return not is_url(self._root)

    @property
    def file_sizes(self) -> Int[np.ndarray, "scenes"]:
        """Bytes of each image."""
        return self._table["size"].astype(np.int64)

    def read_ahead(self, indices: Int[np.ndarray, "_"]) -> None:
        """Reads images in as few requests as it takes; `load` then finds them in memory.

        What was read ahead before is forgotten. Where something is missing, `load` says so.
        """
        runs: list[tuple[list[int], ByteRange]] = []
        for index in np.unique(indices).tolist():
            part = self._range(index)
            if runs and _is_next(runs[-1][1], part):
                members, whole = runs[-1]
                runs[-1] = [*members, index], whole._replace(end=part.end)
            elif part.end - part.start <= MAX_IMAGE_BYTES:
                runs.append(([index], part))
        self._ahead = {}
        contents = read_ranges([whole for _, whole in runs])
        for (members, whole), content in zip(runs, contents, strict=True):
            if len(content) != whole.end - whole.start:
                continue
            for index in members:
                _, start, end = self._range(index)
                self._ahead[index] = content[start - whole.start : end - whole.start]

    def was_checked(self) -> bool:
        """Tells whether every image was decoded before it was packed.

        Raises:
            DataError: It was, but since then a shard was lost or became shorter.
        """
        if not self._checked:
            return False
        ends = np.zeros(len(self._shards), dtype=np.uint64)
        np.maximum.at(ends, self._table["shard"], self._table["offset"] + self._table["size"])
        paths = [f"{self._root}/{name}" for name in self._shards]
        for path, end, size in zip(paths, ends.tolist(), file_sizes(paths), strict=True):
            if size is not None and size < end:
                raise DataError(f"{path} is shorter than its index says: copy or download it again")
        return True

    def fingerprint(self) -> str:
        """Returns a hash of the table and of every shard's path, size and modification time.

        Of a URL the path is known, and what its server says of its version if it was asked.
        """
        remote = is_url(self._root)
        shards = f"{self._root}{self._version}" if remote else fingerprint(Path(self._root), self._shards)
        digest = hashlib.sha256(f"{shards}\0{self._shards}\0".encode("utf-8", "surrogateescape"))
        digest.update(self._table.tobytes())
        return digest.hexdigest()[:32]

    def _name(self, index: int) -> str:
        return f"image {index} in {self._range(index).path}"

    def _range(self, index: int) -> ByteRange:
        shard, offset, size, _ = self._table[index].tolist()
        return ByteRange(f"{self._root}/{self._shards[shard]}", offset, offset + size)

    def __getstate__(self) -> dict[str, Any]:
        """Sends a worker where the table lies, not the table."""
        state = self.__dict__ | {"_ahead": {}}
        if isinstance(self._table, np.memmap):
            state["_table"] = str(self._table.filename)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Maps the table again."""
        if isinstance(state["_table"], str):
            state["_table"] = np.load(state["_table"], mmap_mode="r", allow_pickle=False)
        self.__dict__.update(state)


def is_indexed(source: str | Path) -> bool:
    """Tells whether a folder or URL holds indexed shards; for a URL nothing else is known."""
    return is_url(source) or (Path(source) / INDEX_FILE).is_file()


def open_indexed(source: str | Path) -> Splits:
    """Opens indexed shards as training, validation and test scenes.

    Raises:
        DataError: There are none, or the index is damaged.
    """
    root = str(source).rstrip("/")
    content = _read_index(root)
    try:
        index = parse_json(content, f"'{root}/{INDEX_FILE}'")
        if index["format"] != FORMAT or index["format_version"].split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise ValueError(f"it is {index['format']} {index['format_version']}")
        train, val = (_open_part(root, part, index) for part in PARTS[:2])
        test = _open_part(root, TEST, index) if TEST in index["shards"] else None  # new in 1.1
        num_test = 0 if test is None else len(test)
        record = SplitRecord(train.classes, len(train), len(val), str(index["digest"]), num_test=num_test)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, FileError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"the index of {root} is damaged ({why}): run stam prepare shards again") from error
    return Splits(train, val, record, test)


def _read_index(root: str) -> bytes:
    try:
        return read_bytes(f"{root}/{INDEX_FILE}")
    except DataError as error:
        if not is_url(root):
            raise
        other = f"tars without an index are named each, as in {root}/train-{{000..099}}.tar"
        raise DataError(f"{error}; {other}") from error


def _open_part(root: str, part: str, index: dict[str, Any]) -> IndexedShards:
    shards, classes = _names(index["shards"][part]), tuple(str(name) for name in index["classes"])
    run_length = index.get("run_length", 1)
    if type(run_length) is not int or not 1 <= run_length <= 10_000:
        raise ValueError(f"run_length is {run_length!r:.20}")
    table = _open_table(root, part)
    if len(table) and int(table["label"].max()) >= len(classes):
        raise ValueError("a label has no class")
    if len(table) and int(table["shard"].max()) >= len(shards):
        raise ValueError("an image has no shard")
    if len(table) and int(table["offset"].max()) >= 2**62:
        raise ValueError("an image lies beyond any file")
    return IndexedShards(root, shards, table, classes, run_length, index.get("checked") is True)


def _names(shards: Any) -> list[str]:
    """Returns the names of shards, as a file lists them; one that leads out of the folder is an error."""
    if not isinstance(shards, list):
        raise ValueError(f"the shards must be a list, not {shards!r:.80}")
    for name in shards:
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\0" in name:
            raise ValueError(f"no shard may be called {name!r:.80}")
    return shards


def _open_table(root: str, part: str) -> np.ndarray:
    place = f"{root}/{part}.npy"
    if not is_url(root) and not Path(place).is_file():
        raise DataError(f"cannot read {place}: it is not a file")
    try:
        table = _parse_table(read_bytes(place)) if is_url(root) else np.load(place, mmap_mode="r")
    except OSError as error:
        raise DataError(f"cannot read {place}: {error}") from error
    except DataError:
        raise
    except Exception as error:  # a damaged file makes numpy raise nearly anything
        raise ValueError(f"{part}.npy cannot be read") from error
    if not isinstance(table, np.ndarray) or table.dtype != TABLE or table.ndim != 1:
        raise ValueError(f"{part}.npy holds something else")
    return table


def _parse_table(content: bytes) -> np.ndarray:
    """Returns the table in a file; no memory is taken for more than there is."""
    file = io.BytesIO(content)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return np.frombuffer(content, dtype, count=int(np.prod(shape)), offset=file.tell()).reshape(shape)


def _is_next(read: ByteRange, part: ByteRange) -> bool:
    """Tells whether an image lies so close behind what is read that both are one read."""
    gap = part.start - read.end
    return read.path == part.path and 0 <= gap <= _MOST_BETWEEN and part.end - read.start <= _MOST_AT_ONCE
