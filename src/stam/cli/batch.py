"""What `stam predict` classifies and what it writes as it goes: images with their classes, and a CSV file."""

import csv
import dataclasses
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from stam.data.folder import image_files
from stam.data.manifest import is_manifest, read_manifest
from stam.errors import DataError, FileError, Interrupted, require
from stam.files import read_content

COLUMNS = ("image", "label", "confidence", "num_glimpses", "seen", "stopped_early", "truth", "error")


class Given(NamedTuple):
    """An image to classify.

    Attributes:
        path: Where it lies.
        folders: Names that may be its class, the likeliest first: of the folders it lies in, up to the one
            that was named, or what a list says.
    """

    path: Path
    folders: tuple[str, ...] = ()

    def truth(self, labels: Sequence[str]) -> str | None:
        """Returns its class, where it is known to be one of the agent's."""
        return next((name for name in self.folders if name in labels), None)


def find_images(named: Sequence[Path]) -> list[Given]:
    """Returns the images named, those anywhere under the folders named, and those that CSV files list."""
    found: list[Given] = []
    for path in named:
        if path.is_dir():
            inside = [path / name for name in image_files(path)]
            require(bool(inside), f"no images in the folder '{path}'")
            found += [Given(image, _folders(image, path)) for image in inside]
        elif path.is_file() and is_manifest(path):
            rows = read_manifest(path)
            found += [Given(path.parent / row.path, (row.label,) if row.label else ()) for row in rows]
        elif path.is_file():
            found.append(Given(path))
        else:
            raise DataError(f"no image or folder at '{path}': check the path")
    return found


def _folders(image: Path, named: Path) -> tuple[str, ...]:
    """Returns the names of the folders from an image up to the one that was named."""
    return (*reversed(image.relative_to(named).parent.parts), named.resolve().name)


class Score:
    """How many answers were right, where that is known."""

    def __init__(self) -> None:
        self.num_images = self.num_known = self.num_right = 0

    def add(self, label: str | None, truth: str | None) -> None:
        """Counts an image; one that could not be read, and has no label, is neither right nor wrong."""
        self.num_images += 1
        if label is not None and truth is not None:
            self.num_known += 1
            self.num_right += label == truth

    def __str__(self) -> str:
        share = f"{self.num_right / self.num_known:.1%}"
        of = "" if self.num_known == self.num_images else f" of {self.num_images:,}"
        return f"accuracy {share} on {self.num_known:,}{of} images whose class is known"


@dataclass(frozen=True)
class Rows:
    """A CSV file that grows by a row for each image; whatever stops it, the rows written so far are there.

    Attributes:
        file: The open file.
        done: Images it had rows of before, each with what was answered and what is true.
    """

    file: TextIO
    done: dict[str, tuple[str | None, str | None]]

    def add(self, answer: Any, truth: str | None) -> None:
        """Writes the row of an answer; the first goes below the names of the columns."""
        if not self.file.tell():
            csv.writer(self.file).writerow(COLUMNS)
        values = {**dataclasses.asdict(answer), "truth": truth}
        csv.DictWriter(self.file, COLUMNS, extrasaction="ignore").writerow(values)
        self.file.flush()


@contextmanager
def open_rows(path: Path, resume: bool) -> Iterator[Rows]:
    """Opens a CSV file to write answers to.

    Args:
        path: Where it is to be.
        resume: Whether to go on with one that is there; otherwise that is an error.
    """
    done: dict[str, tuple[str | None, str | None]] = {}
    if path.exists() and not resume and not (path.is_file() and path.stat().st_size == 0):
        raise FileError(f"'{path}' exists: pass --resume to go on with it, or name another file")
    if path.exists() and not path.is_file():
        raise FileError(f"'{path}' is not a file: name another")
    try:
        if path.exists():
            done = _finished(path)
        with path.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield Rows(file, done)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the rows so far are in {path}, and --resume goes on") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"cannot write '{path}': {error}") from error


def _finished(path: Path) -> dict[str, tuple[str | None, str | None]]:
    """Returns what a file has rows of, and cuts off a last row that is not whole."""
    content = read_content(path, most_bytes=2**30)
    whole = content[: content.rfind(b"\n") + 1]
    reader = csv.DictReader(io.StringIO(whole.decode(errors="surrogateescape"), newline=""))
    if tuple(reader.fieldnames or COLUMNS) != COLUMNS:
        raise FileError(f"'{path}' was not written by stam predict: name another file")
    done = {row["image"]: (row["label"] or None, row["truth"] or None) for row in reader}
    os.truncate(path, len(whole))
    return done
