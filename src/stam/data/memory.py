"""What the check of all images found, remembered from one start to the next in the user's cache folder.

It is known by the path, size and modification time of every image: where one changes, all are checked again.
Nothing depends on it. Where it cannot be read or written, the images are simply checked again.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stam.errors import StamError
from stam.files import cache_folder, make_folder, read_json, save_content, take_turns

FORMAT = "stam-image-check"
FORMAT_VERSION = "1.1"  # an earlier check let damaged PNGs pass


def fingerprint(root: Path, names: Iterable[str]) -> str:
    """Returns a hash of the paths, sizes and modification times of files.

    Args:
        root: The folder they lie in.
        names: Their paths within it; one that is missing counts too.
    """
    place = os.path.realpath(root)
    digest = hashlib.sha256(os.fsencode(place))
    for name in names:
        try:
            found = os.stat(os.path.join(place, name))  # noqa: PTH116, PTH118 - a million, several times faster
            facts = f"{found.st_size} {found.st_mtime_ns}"
        except (OSError, ValueError):
            facts = "missing"
        digest.update(os.fsencode(f"\0{name}\0{facts}"))
    return digest.hexdigest()[:32]


def recall(key: str, num_images: int) -> list[int] | None:
    """Returns which images could not be read; nothing where the check is not remembered."""
    try:
        record = read_json(record_file(key))
        unreadable = record["unreadable"]
        found = record["format"], record["format_version"], record["num_images"]
        known = found == (FORMAT, FORMAT_VERSION, num_images)
        sound = all(type(index) is int and 0 <= index < num_images for index in unreadable)
    except (StamError, RuntimeError, KeyError, TypeError):
        return None
    return list(unreadable) if known and sound else None


def remember(key: str, num_images: int, unreadable: Collection[int]) -> None:
    """Keeps which images could not be read."""
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_images": num_images,
        "unreadable": list(unreadable),
    }
    with suppress(StamError, RuntimeError):
        make_folder(record_file(key).parent)
        save_content(record_file(key), json.dumps(record))


@contextmanager
def one_at_a_time(key: str) -> Iterator[None]:
    """Lets one process at a time check the same images: the others then find what it remembered."""
    try:
        lock = record_file(key).with_suffix(".lock")
    except RuntimeError:  # nothing is remembered
        yield
        return
    with take_turns(lock):
        yield


def record_file(key: str) -> Path:
    """Returns where the check of some images is remembered."""
    return cache_folder() / "image-checks" / f"{key}.json"
