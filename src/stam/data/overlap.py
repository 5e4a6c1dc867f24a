"""Whether two sources share images: the same file, or another with the same bytes, whatever it is called."""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from stam.data.folder import ImageFolder
from stam.data.indexed import IndexedShards
from stam.data.scenes import Relabelled, Scenes, Subset
from stam.data.shards import TarShards, read_member
from stam.errors import DataError
from stam.shapes import Int

_MOST_READS = 4000


@dataclass(frozen=True)
class _Files:
    """The files of some scenes.

    Attributes:
        sizes: Bytes of each; -1 where it is missing.
        identities: What the file system knows each by; none where images are parts of a file.
        read: Returns the content of one.
    """

    sizes: Int[np.ndarray, "scenes"]
    identities: list[tuple[int, int]]
    read: Callable[[int], bytes]


def num_shared(scenes: Scenes, others: Scenes, most_reads: int = _MOST_READS) -> int:
    """Returns how many scenes are among the others, of those that can be told with so many reads.

    Files of other sizes are not read. Where more files than `most_reads` have a size in common with one of
    the other side, those with rare sizes are compared, and the true number may be higher. Scenes that are
    made, such as digits, or that lie behind a URL, share nothing.
    """
    ours, theirs = _files_of(scenes), _files_of(others)
    if ours is None or theirs is None:
        return 0
    known = set(theirs.identities)
    shared = {index for index, identity in enumerate(ours.identities) if identity in known}
    ours_by_size, theirs_by_size = _by_size(ours.sizes), _by_size(theirs.sizes)
    left = most_reads
    alike = ours_by_size.keys() & theirs_by_size.keys()
    for size in sorted(alike, key=lambda size: len(ours_by_size[size]) + len(theirs_by_size[size])):
        mine = [index for index in ours_by_size[size] if index not in shared]
        left -= len(mine) + len(theirs_by_size[size]) if mine else 0
        if left < 0:
            break
        contents = _digests(theirs, theirs_by_size[size]).values() if mine else ()
        known_contents = set(contents)
        shared |= {index for index, digest in _digests(ours, mine).items() if digest in known_contents}
    return len(shared)


def _by_size(sizes: np.ndarray) -> dict[int, list[int]]:
    """Returns the files of each size, but for empty and missing ones."""
    found: dict[int, list[int]] = {}
    for index, size in enumerate(sizes.tolist()):
        if size > 0:
            found.setdefault(size, []).append(index)
    return found


def _digests(files: _Files, indices: Iterable[int]) -> dict[int, bytes]:
    """Returns a digest of some files; those that cannot be read are left out."""
    found = {}
    for index in indices:
        try:
            found[index] = hashlib.blake2b(files.read(index), digest_size=16).digest()
        except (OSError, DataError):
            continue
    return found


def _files_of(scenes: Scenes) -> _Files | None:
    """Returns the files behind scenes; nothing where there are none at hand."""
    if isinstance(scenes, Relabelled):
        return _files_of(scenes.source)
    if isinstance(scenes, Subset):
        whole, chosen = _files_of(scenes.source), scenes.indices
        if whole is None:
            return None
        identities = [whole.identities[index] for index in chosen] if whole.identities else []
        return _Files(whole.sizes[chosen], identities, lambda index: whole.read(int(chosen[index])))
    if isinstance(scenes, ImageFolder):
        places = [os.path.join(scenes.root, name) for name in scenes.names]  # noqa: PTH118 - several times faster
        facts = [_facts(place) for place in places]
        identities = [fact[:2] for fact in facts]
        return _Files(
            np.array([fact[2] for fact in facts], dtype=np.int64),
            identities,
            lambda index: (scenes.root / scenes.names[index]).read_bytes(),
        )
    if isinstance(scenes, TarShards):
        sizes = np.array([member.size for member in scenes.members], dtype=np.int64)
        return _Files(sizes, [], lambda index: read_member(scenes.members[index]))
    if isinstance(scenes, IndexedShards) and scenes.is_local:
        return _Files(scenes.file_sizes, [], scenes.content)
    return None


def _facts(place: str) -> tuple[int, int, int]:
    """Returns device, number and size of a file; a missing one is equal to no other."""
    try:
        found = os.stat(place)  # noqa: PTH116 - a million of them, several times faster
    except (OSError, ValueError):
        return -1, id(place), -1
    return found.st_dev, found.st_ino, found.st_size
