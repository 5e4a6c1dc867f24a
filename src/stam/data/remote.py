"""Bytes of files, whole or in part: on this machine, or at any URL that fsspec knows."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stam.errors import DataError, FileError, require_package
from stam.files import read_content

Result = TypeVar("Result")

_PAUSES = (1.0, 5.0)  # seconds before a failed request is made again: a run outlives a lost connection


class ByteRange(NamedTuple):
    """A part of a file: from `start` up to `end`, which is not part of it."""

    path: str
    start: int
    end: int


def is_url(source: str | Path) -> bool:
    """Tells a URL, which fsspec reads, from a path."""
    return "://" in str(source)


def read_bytes(path: str) -> bytes:
    """Reads a file, or what a URL names."""
    if is_url(path):
        return _ask(path, lambda files, place: files.cat_file(place))
    try:
        return read_content(path, path)
    except FileError as error:
        raise DataError(str(error)) from error


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Reads parts of files of one place, one request each; what lies behind a file's end is missing.

    Requests to a URL are made at the same time, where its file system can.
    """
    if ranges and is_url(ranges[0].path):
        return _ask(ranges[0].path, lambda files, _: _request(files, ranges))
    return [_read_range(part) for part in ranges]


def file_sizes(paths: Sequence[str]) -> list[int | None]:
    """Returns the size of each file of one place; `None` where its file system does not tell."""
    if paths and is_url(paths[0]):
        return _ask(paths[0], lambda files, _: files.sizes([_place(path) for path in paths]))
    try:
        return [Path(path).stat().st_size for path in paths]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


def _request(files: Any, ranges: Sequence[ByteRange]) -> list[bytes]:
    places, starts, ends = zip(*((_place(part.path), part.start, part.end) for part in ranges), strict=True)
    return files.cat_ranges(list(places), list(starts), list(ends), on_error="raise")


def _place(url: str) -> str:
    """Returns what the file system of a URL calls it."""
    return _fsspec().core.url_to_fs(url)[1]


def _fsspec() -> Any:
    return require_package("fsspec", extra="urls")


def _read_range(part: ByteRange) -> bytes:
    if not Path(part.path).is_file():  # others may never end
        raise DataError(f"cannot read {part.path}: it is not a file")
    try:
        with Path(part.path).open("rb") as file:
            file.seek(part.start)
            return file.read(part.end - part.start)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {part.path}: {error}") from error


def _ask(url: str, request: Callable[[Any, Any], Result]) -> Result:
    """Makes a request to the file system of a URL, again where it fails for a reason that may pass."""
    fsspec = _fsspec()
    for pause in (*_PAUSES, None):
        try:
            return request(*fsspec.core.url_to_fs(url))
        except Exception as error:  # what fsspec raises depends on the URL
            lasting = isinstance(error, (FileNotFoundError, PermissionError, ValueError, ImportError))
            if lasting or pause is None:
                reason = str(error) or type(error).__name__
                raise DataError(f"cannot read {url}: {' '.join(reason.split())}") from error
        time.sleep(pause)
    raise AssertionError("unreachable")
