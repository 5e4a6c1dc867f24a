"""Bytes of files, whole or in part: on this machine, or at any URL that fsspec knows."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stam.errors import DataError, FileError, StamError, require_package
from stam.files import read_content

Result = TypeVar("Result")

_PAUSES = (1.0, 5.0)  # seconds before a failed request is made again: a run outlives a lost connection
_MOST_BYTES = 2**30  # of a file that is read whole
_BLOCK = 4 * 2**20  # bytes of a request while a file is read through
# what a file system may say of the version of a file; the address it was found at may differ each time
_VERSION = ("size", "etag", "last-modified", "lastmodified", "mtime", "created", "content-md5", "md5hash")


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
        return _ask(path, lambda files, place: _read_whole(files, place, path))
    try:
        return read_content(path, path)
    except FileError as error:
        raise DataError(str(error)) from error


def read_through(url: str, use: Callable[[Any], Result]) -> Result:
    """Opens a file at a URL for reading from its beginning to its end, in large blocks."""

    def read(files: Any, place: Any) -> Result:
        with files.open(place, "rb", block_size=_BLOCK, cache_type="readahead") as file:
            return use(file)

    return _ask(url, read)


def version(url: str) -> str:
    """Returns what the server says of a file's version: its size, its date or a digest if it knows them."""
    facts = _ask(url, lambda files, place: files.info(place))
    if facts.get("type") == "directory":
        raise DataError(f"cannot read {url}: it is a folder")
    known = {name.lower(): str(value) for name, value in facts.items() if name.lower() in _VERSION}
    return "\0".join(f"{name}={known[name]}" for name in sorted(known))


def find_urls(pattern: str) -> list[str]:
    """Returns the URLs that match a pattern such as `s3://bucket/train-*.tar`, sorted."""
    root = pattern.partition("*")[0].rpartition("/")[0]

    def find(files: Any, place: Any) -> list[str]:
        start = _place(root)
        return sorted(f"{root}/{found.removeprefix(start).lstrip('/')}" for found in files.glob(place))

    return _ask(pattern, find)


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


def _read_whole(files: Any, place: Any, url: str) -> bytes:
    """Reads a file of a sensible size; a larger one is refused before it is read."""
    size = files.info(place).get("size")
    if size is None:  # a server that does not say: no more is taken from it than is allowed
        with files.open(place, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    else:
        content = files.cat_file(place) if size <= _MOST_BYTES else b""
    if (size or len(content)) > _MOST_BYTES:
        raise DataError(f"cannot read {url}: it has more than {_MOST_BYTES >> 20} MB")
    return content


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
    if any(part.partition("://")[0] == "reference" for part in url.split("::")):
        raise DataError(f"cannot read {url}: a reference file may hold templates, which are programs")
    for pause in (*_PAUSES, None):
        try:
            return request(*fsspec.core.url_to_fs(url))
        except StamError:
            raise
        except Exception as error:  # what fsspec raises depends on the URL
            lasting = isinstance(error, (FileNotFoundError, PermissionError, ValueError, ImportError))
            if lasting or pause is None:
                reason = str(error) or type(error).__name__
                raise DataError(f"cannot read {url}: {' '.join(reason.split())}") from error
        time.sleep(pause)
    raise AssertionError("unreachable")
