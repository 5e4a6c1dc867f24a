"""Plain tars at a URL, as other programs made them: `https://host/train-{000000..000099}.tar`.

Each tar is read through once to note where its images lie, and that is remembered (`stam.data.listing`). From
then on images are read by ranges, as those of indexed shards are.
"""

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from stam.data.braces import expand_braces, has_braces
from stam.data.indexed import TABLE, IndexedShards
from stam.data.listing import Member, list_tar, remembered
from stam.data.packing import run_length
from stam.data.parallel import map_with_progress
from stam.data.remote import find_urls, is_url, read_through, version
from stam.data.shards import arrange, is_tar, require_plain
from stam.data.splits import SPLIT_NAMES, TEST, TRAIN, VAL_NAMES, SplitPlan, Splits, divide
from stam.errors import DataError
from stam.shapes import Int

_THREADS = 16  # they wait for the server most of the time
_MOST_ALIKE = 2.0  # neighbours of one class, against what a random order would have


def is_remote_tar(source: str) -> bool:
    """Tells whether a URL names tars, and not a folder."""
    return is_url(source) and is_tar(_path(source))


def open_remote_tars(source: str, plan: SplitPlan | None = None) -> Splits:
    """Opens plain tars at a URL as training, validation and test scenes.

    Args:
        source: A URL that fsspec knows, with braces (`{000..099}`, `{train,val}`) or, where the file system
            can list its files, with `*`.
        plan: How to split where the tars have no split of their own.

    Raises:
        DataError: A tar is missing or damaged, or its members are not laid out as they must be.
    """
    urls = _find(source)
    root = source.partition("{")[0].partition("*")[0].rpartition("/")[0]
    names = [url.removeprefix(root).lstrip("/") for url in urls]
    shards = [_path(name) for name in names]
    if len(set(shards)) < len(shards):
        raise DataError(f"'{source}' names a tar twice")
    for shard in shards:
        require_plain(shard)
    found = list(
        map_with_progress(
            lambda number: _list(urls[number], shards[number]),
            range(len(urls)),
            "listing tars",
            _THREADS,
            unit="tar",
            chunk=1,
        )
    )
    members = [member for _, listed in found for member in listed]
    images, entries, classes = arrange(members, PurePosixPath(), source)
    parts = divide(entries, classes, source, plan or SplitPlan())
    label_of = {name: label for label, name in enumerate(classes)}
    number_of = {id(shard): number for number, shard in enumerate(shards)}
    table = np.zeros(len(images), dtype=TABLE)
    for row, (image, entry) in enumerate(zip(images, entries, strict=True)):
        table[row] = number_of[id(image.shard)], image.offset, image.size, label_of[entry.class_name]
    versions = hashlib.sha256("\0".join(key for key, _ in found).encode()).hexdigest()
    in_runs = run_length(len(parts.train)) if is_mixed(table["label"].astype(np.int64)) else 1
    train, val, test = (
        IndexedShards(root, names, table[part], classes, in_runs, version=versions)
        for part in (parts.train, parts.val, parts.test)
    )
    return Splits(train, val, parts.record, test if len(test) else None)


def is_mixed(labels: Int[np.ndarray, "images"]) -> bool:
    """Tells whether images lie in a random order, so that those side by side may be shown together.

    Where they are sorted by class, a batch of such runs would hold few classes.
    """
    if len(labels) < 2:
        return False
    shares = np.bincount(labels) / len(labels)
    expected = float((shares**2).sum())
    return float((labels[1:] == labels[:-1]).mean()) <= min(_MOST_ALIKE * expected, (1 + expected) / 2)


def _path(url: str) -> PurePosixPath:
    """Returns a URL without what follows a question mark: a signature, say."""
    return PurePosixPath(url.partition("?")[0])


def _find(source: str) -> list[str]:
    if has_braces(source):
        return expand_braces(source)
    if "*" not in source:
        return [source]
    found = find_urls(source)
    if not found:
        raise DataError(f"no tars at {source}; where a server does not list its files, write {{000..099}}")
    start, _, name = source.rpartition("/")
    if TRAIN not in name:
        return found
    beside = {part: find_urls(f"{start}/{name.replace(TRAIN, part)}") for part in SPLIT_NAMES[1:]}
    return found + next((beside[part] for part in VAL_NAMES if beside[part]), []) + beside[TEST]


def _list(url: str, shard: PurePosixPath) -> tuple[str, Sequence[Member]]:
    """Lists one tar; returns what it is known by too."""
    key = hashlib.sha256(f"{url}\0{version(url)}".encode()).hexdigest()[:32]
    return key, remembered(key, shard, lambda: read_through(url, lambda file: list_tar(file, shard)))
