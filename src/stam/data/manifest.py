"""Images listed in a CSV file: one row each, with the columns `path`, `label` and, if there is one, `split`.

    path,label,split
    a/1.jpg,cat,train
    b/2.jpg,dog,val

Paths start from the folder of the file. Columns may be separated by commas, semicolons or tabs; others than
these three are ignored.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stam.data.folder import ImageFolder
from stam.data.splits import SPLIT_NAMES, Entry, SplitPlan, Splits, divide
from stam.errors import DataError, did_you_mean

SUFFIXES = (".csv", ".tsv")
_PATH, _LABEL, _SPLIT = "path", "label", "split"
_MOST_BYTES = 2**30
_COLUMNS = f"'{_PATH}', '{_LABEL}' and, if there is one, '{_SPLIT}'"


class Row(NamedTuple):
    """An image of a list.

    Attributes:
        line: Its line in the file.
        path: Where it lies, as it is written.
        label: Its class; empty where none is given.
        split: One of `SPLIT_NAMES`; empty where none is given.
    """

    line: int
    path: str
    label: str
    split: str


def is_manifest(path: Path) -> bool:
    """Tells whether a path is a list of images, by its name."""
    return path.suffix.lower() in SUFFIXES


def read_manifest(path: Path) -> list[Row]:
    """Reads a list of images; labels and splits may be missing.

    Raises:
        DataError: It cannot be read, has no column `path`, or no image.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path} has more than {_MOST_BYTES >> 20} MB: is it a list of images?")
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a mark
            rows = list(_rows(file, path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not rows:
        raise DataError(f"no images in {path}: add a line for each")
    return rows


def _rows(file: Iterator[str], path: Path) -> Iterator[Row]:
    header = next(file, "")
    separator = max(",;\t", key=header.count)
    columns = [name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])]
    if _PATH not in columns:
        raise DataError(f"line 1 of {path} must name the columns {_COLUMNS}; it is '{header.strip():.60}'")
    reader = csv.DictReader(file, columns, delimiter=separator)
    for values in reader:
        place, label, split = ((values.get(name) or "").strip() for name in (_PATH, _LABEL, _SPLIT))
        line = reader.line_num + 1
        if not place:
            raise DataError(f"line {line} of {path} has no path: fill it in or remove the line")
        if not (label.isprintable() and place.isprintable()):
            raise DataError(f"line {line} of {path} has characters that cannot be shown: remove them")
        if split and split not in SPLIT_NAMES:
            hint = did_you_mean(split, SPLIT_NAMES)
            raise DataError(f"line {line} of {path}: split '{split}' is unknown: {hint}")
        yield Row(line, place, label, split)


def open_manifest(path: Path, plan: SplitPlan | None = None) -> Splits:
    """Opens a list of images with labels, with its own split or a seeded one.

    Raises:
        DataError: It is not as it must be; the message says what to change.
    """
    entries, lines = [], dict[str, int]()
    for row in read_manifest(path):
        if not row.label:
            raise DataError(f"line {row.line} of {path} has no label: it needs the columns {_COLUMNS}")
        place = os.path.normpath(row.path)
        if place in lines:
            first = lines[place]
            raise DataError(f"lines {first} and {row.line} of {path} name the same image: remove one")
        lines[place] = row.line
        entries.append(Entry(row.path, row.label, row.split or None))
    root = path.parent
    if not (root / entries[0].name).is_file():
        where = f"no image at {root / entries[0].name}"
        raise DataError(f"{where}, the first in {path}: paths start from the folder of that file")
    entries.sort(key=lambda entry: (entry.class_name, entry.name))
    classes = tuple(sorted({entry.class_name for entry in entries}))
    parts = divide(entries, classes, str(path), plan or SplitPlan())
    train, val, test = (
        ImageFolder(root, [entries[index] for index in part], classes)
        for part in (parts.train, parts.val, parts.test)
    )
    return Splits(train, val, parts.record, test if len(test) else None)
