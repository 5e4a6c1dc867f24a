"""Which images and class files a tar holds and where their bytes lie, from its headers.

A tar on this machine is listed each time it is opened. One behind a URL is read through once. What was
found is remembered in the user's cache folder under its URL, its size and what the server says of its
version.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from stam.data.images import is_image
from stam.data.memory import one_at_a_time
from stam.errors import DataError, StamError
from stam.files import cache_folder, make_folder, read_json, save_content

CLASS_SUFFIX = ".cls"
MAX_IMAGE_BYTES = 256_000_000
FORMAT = "stam-tar-listing"
FORMAT_VERSION = "1.0"
_MAX_CLASS_BYTES = 4096
_MOST_PADDING = 1_000_000  # bytes after the end mark that are looked at; tar fills up 10,240


class Member(NamedTuple):
    """An image or a class file in a tar: its name there, where its bytes lie, and what a class file says."""

    shard: PurePath
    name: str
    offset: int
    size: int
    text: str = ""


def list_tar(file: Any, shard: PurePath) -> list[Member]:
    """Lists the images and class files of a tar; hidden ones are left out.

    Args:
        file: The open tar, which can be read and sought: a file, or what fsspec opens.
        shard: What to call it.

    Raises:
        DataError: It was cut short or damaged, or holds what cannot be read in place.
    """
    members: list[Member] = []
    names: set[str] = set()
    places: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                name = info.name.removeprefix("./")
                place = info.offset_data, info.size
                if info.isreg():
                    places[info.name] = place
                is_class = name.endswith(CLASS_SUFFIX)
                if "/." in f"/{name}" or info.isdir() or not (is_class or is_image(name)):
                    continue
                if name in names:
                    raise DataError(f"{name} is in {shard} twice: pack it anew")
                names.add(name)
                if info.islnk() and info.linkname in places:  # the same file under a second name
                    place = places[info.linkname]
                elif not info.isreg() or info.issparse():
                    raise DataError(f"{name} in {shard} is a link or sparse: pack it with tar -h, without -S")
                members.append(_member(file, shard, name, *place, is_class))
            end = tar.offset
        # A damaged header looks to tarfile like the end, and so does a cut between two members.
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end mark after {len(members)} files")
        if file.read(_MOST_PADDING).strip(b"\0"):
            raise tarfile.ReadError("more follows after its end mark, as where tars were joined")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{shard} is not a whole tar file ({error}): copy or download it again") from error
    return members


def _member(file: Any, shard: PurePath, name: str, offset: int, size: int, is_class: bool) -> Member:
    most = _MAX_CLASS_BYTES if is_class else MAX_IMAGE_BYTES
    if size > most:
        raise DataError(
            f"{name} in {shard} has {size} bytes, at most {most} are read: make it smaller, or remove it"
        )
    if not is_class:
        return Member(shard, name, offset, size)
    file.seek(offset)
    try:
        return Member(shard, name, offset, size, file.read(size).decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{name} in {shard} is not UTF-8: write the class number or name as text") from error


def remembered(key: str, shard: PurePath, list_now: Callable[[], list[Member]]) -> list[Member]:
    """Returns the listing that is remembered under a key, or lists now and remembers it.

    Of several processes that ask for the same, one lists and the others wait for it.
    """
    with one_at_a_time(f"tar-{key}"):
        members = _recall(key, shard)
        if members is None:
            members = list_now()
            _remember(key, members)
    return members


def _recall(key: str, shard: PurePath) -> list[Member] | None:
    """Reads a listing; one that is missing or damaged is made again."""
    try:
        record = read_json(listing_file(key))
        if record["format"] != FORMAT or record["format_version"] != FORMAT_VERSION:
            return None
        rows = record["members"]
        if record["digest"] != _digest(rows):  # another label or place would be taken for what is there
            return None
        members = [Member(shard, *row) for row in rows]
    # RuntimeError: the user has no home; RecursionError is one too
    except (StamError, RuntimeError, KeyError, TypeError, ValueError):
        return None
    return members if all(_is_sound(member) for member in members) else None


def _is_sound(member: Member) -> bool:
    """Tells whether an entry is what `list_tar` may have found."""
    numbers: tuple[Any, ...] = member.offset, member.size
    texts: tuple[Any, ...] = member.name, member.text
    return (
        all(type(text) is str for text in texts)
        and all(type(number) is int and 0 <= number < 2**62 for number in numbers)
        and member.size <= MAX_IMAGE_BYTES
    )


def _remember(key: str, members: list[Member]) -> None:
    rows = [member[1:] for member in members]
    record = {"format": FORMAT, "format_version": FORMAT_VERSION, "digest": _digest(rows), "members": rows}
    with suppress(StamError, RuntimeError):
        make_folder(listing_file(key).parent)
        save_content(listing_file(key), json.dumps(record, ensure_ascii=True))


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def listing_file(key: str) -> Path:
    """Returns where a listing is remembered."""
    return cache_folder() / "tar-listings" / f"{key}.json"
