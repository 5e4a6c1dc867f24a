"""Images in tar files, read in place.

Two layouts are known. Folders in a tar: `.../train/CLASS/x.jpg`, or `CLASS/x.jpg` where the tar's own name or
folder says `train` or `val`. Samples: `000123.jpg` beside `000123.cls`, which holds a class number or name.

Each tar is read through once to note where its members lie (`stam.data.listing`). An image is then one seek
and one read of a newly opened file, so that nothing is shared between threads or worker processes.
`stam.data.remote_tars` opens tars behind a URL.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath

import numpy as np

from stam.config import is_writable
from stam.data.braces import expand_braces, has_braces
from stam.data.images import decode_image, is_image
from stam.data.listing import CLASS_SUFFIX, MAX_IMAGE_BYTES, Member, list_tar
from stam.data.memory import fingerprint
from stam.data.splits import SPLIT_NAMES, TEST, TRAIN, VAL_NAMES, Entry, SplitPlan, Splits, divide
from stam.errors import DataError
from stam.shapes import UInt8

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

__all__ = ["MAX_IMAGE_BYTES", "Member", "TarShards", "find_shards", "is_tar", "open_shards", "read_member"]


class TarShards:
    """The images of one part of some tar files.

    Attributes:
        members: Where each image lies.
        classes: Class names.
        labels: The class of each image.
    """

    def __init__(self, members: Sequence[Member], entries: Sequence[Entry], classes: tuple[str, ...]) -> None:
        label_of = {name: label for label, name in enumerate(classes)}
        self.members = tuple(members)
        self.classes = classes
        self.labels = np.array([label_of[entry.class_name] for entry in entries], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Reads and decodes one image."""
        member = self.members[index]
        return decode_image(read_member(member), f"{member.name} in {member.shard}", decode_size)

    def name(self, index: int) -> str:
        """Returns the name of an image within its tar."""
        return self.members[index].name

    def fingerprint(self) -> str:
        """Returns a hash of every tar's path, size and modification time, and of where each image lies."""
        shards = dict.fromkeys(member.shard for member in self.members)
        digest = hashlib.sha256()
        for shard in map(Path, shards):
            digest.update(fingerprint(shard.parent, [shard.name]).encode())
        for member in self.members:
            place = f"\0{member.shard.name}\0{member.name}\0{member.offset} {member.size}"
            digest.update(os.fsencode(place))
        return digest.hexdigest()[:32]


def is_tar(path: PurePath) -> bool:
    """Tells by its name whether a file is a tar, compressed or not."""
    return path.name.lower().endswith((".tar", *_COMPRESSED))


def find_shards(path: Path) -> list[Path]:
    """Returns the tars that a path means: one tar, a pattern, or a folder of tars.

    A pattern is `train-*.tar`, or `train-{000..099}.tar`, which names each tar: all of them must be there.
    With training tars that are named otherwise come the validation and test tars beside them that are named
    alike (`x-train.tar`, `x-val.tar`). A folder holds its tars directly, and nothing else then, or in
    `train`, `val` and `test`.
    """
    if has_braces(str(path)) and not path.exists() and is_tar(path):
        return _named(str(path))
    if path.is_dir():
        folders = [
            child for child in sorted(path.iterdir()) if child.is_dir() and not child.name.startswith(".")
        ]
        places = [folder for folder in folders if folder.name in SPLIT_NAMES] if folders else [path]
        return [tar for place in places for tar in _tars_in(place)]
    found = _matches(path)
    if found and TRAIN in path.name:
        beside = {name: _matches(path.with_name(path.name.replace(TRAIN, name))) for name in SPLIT_NAMES[1:]}
        return found + next((beside[name] for name in VAL_NAMES if beside[name]), []) + beside[TEST]
    return found


def _tars_in(folder: Path) -> list[Path]:
    """Returns the tars of a folder, which holds nothing but tars then."""
    children = sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    tars = [child for child in children if is_tar(child)]
    folders = [child for child in children if child.is_dir()]
    if tars and folders:
        raise DataError(f"{tars[0]} lies beside class folders such as '{folders[0].name}': move it elsewhere")
    return tars


def open_shards(path: Path, plan: SplitPlan | None = None) -> Splits:
    """Opens tar files as training and validation scenes.

    Args:
        path: A tar, a pattern, or a folder of tars; see `find_shards`.
        plan: How to split where the data has no split of its own.

    Raises:
        DataError: A tar is damaged or compressed, or its members are not laid out as they must be.
    """
    shards = find_shards(path)
    if not shards:
        raise DataError(f"no tar files at {path}")
    root = path if path.is_dir() else Path(str(path).partition("{")[0] + "x").parent
    if not all(shard.is_relative_to(root) for shard in shards):  # the braces name whole paths
        root = Path(os.path.commonpath([shard.parent for shard in shards]))
    members = [member for shard in shards for member in index_tar(shard)]
    images, entries, classes = arrange(members, root, str(path))
    parts = divide(entries, classes, str(path), plan or SplitPlan())
    train, val, test = (
        TarShards([images[index] for index in part], [entries[index] for index in part], classes)
        for part in (parts.train, parts.val, parts.test)
    )
    return Splits(train, val, parts.record, test if len(test) else None)


def arrange(
    members: Sequence[Member], root: PurePath, where: str
) -> tuple[list[Member], list[Entry], tuple[str, ...]]:
    """Finds the class and split of each image.

    Args:
        members: Images and class files of all tars.
        root: What names in the record start from.
        where: What to call the source in an error.

    Returns:
        The images, what each is, and the class names in label order.
    """
    is_sampled = any(member.name.endswith(CLASS_SUFFIX) for member in members)
    found = _list_samples(members, root) if is_sampled else _list_folders(members, root)
    if not found:
        raise DataError(
            f"no classes in {where}: expected members such as train/CLASS/x.jpg or x.jpg with x.cls"
        )
    images, entries = [image for image, _ in found], [entry for _, entry in found]
    for class_name in {entry.class_name for entry in entries}:
        if not is_writable(class_name):
            raise DataError(f"the class name {os.fsencode(class_name)!r} in {where} is not UTF-8: rename it")
    return images, entries, _ordered({entry.class_name for entry in entries}, by_number=is_sampled)


def index_tar(shard: Path) -> list[Member]:
    """Reads where the files of a tar lie; one that was cut short or damaged is an error."""
    require_plain(shard)
    if not shard.is_file():  # others may never end
        raise DataError(f"{shard} is not a file: remove it")
    try:
        with shard.open("rb") as file:
            return list_tar(file, shard)
    except OSError as error:
        raise DataError(f"cannot read {shard}: {error.strerror or error}") from error


def require_plain(shard: PurePath) -> None:
    """Raises where a tar is compressed."""
    if shard.name.lower().endswith(_COMPRESSED):
        raise DataError(f"{shard} is compressed and cannot be read in place: unpack it to a plain .tar first")


def _named(pattern: str) -> list[Path]:
    """Returns the tars that a pattern with braces names; one that is missing is an error."""
    shards = [Path(name) for name in expand_braces(pattern)]
    missing = [shard for shard in shards if not shard.exists()]
    if missing:
        raise DataError(
            f"{len(missing)} of the {len(shards)} tars of '{pattern}' are missing, the first is {missing[0]}"
        )
    if len(set(shards)) < len(shards):
        raise DataError(f"'{pattern}' names a tar twice")
    return shards


def _matches(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(match for match in path.parent.glob(path.name) if match.is_file()) if path.name else []


def read_member(member: Member) -> bytes:
    """Reads a file out of a tar; `index_tar` has refused what would not fit into memory."""
    try:
        with Path(member.shard).open("rb") as file:
            file.seek(member.offset)
            content = file.read(member.size)
    except OSError as error:
        raise DataError(f"cannot read {member.shard}: {error.strerror}") from error
    if len(content) < member.size:
        raise DataError(f"{member.shard} became shorter since it was opened: copy or download it again")
    return content


def _split_of_shard(shard: PurePath, root: PurePath) -> str | None:
    """Finds a split among the folders and words of a tar's name, from the data's root on."""
    place = shard.relative_to(root)
    words = {*place.parts[:-1], *re.split(r"[^a-z]+", place.stem.lower())}
    return next((name for name in SPLIT_NAMES if name in words), None)


class _Shards:
    """What is known of each tar by its name alone, found out once and not for every image."""

    def __init__(self, members: Sequence[Member], root: PurePath) -> None:
        shards = {id(member.shard): member.shard for member in members}  # hashing a path takes long
        self._splits = {number: _split_of_shard(shard, root) for number, shard in shards.items()}
        self._prefixes = {number: shard.relative_to(root).as_posix() for number, shard in shards.items()}

    def split(self, member: Member) -> str | None:
        """Returns the split that the name of a member's tar says."""
        return self._splits[id(member.shard)]

    def entry(self, member: Member, class_name: str, split: str | None) -> Entry:
        """Returns what an image is."""
        return Entry(f"{self._prefixes[id(member.shard)]}/{member.name}", class_name, split)


def _list_folders(members: Sequence[Member], root: PurePath) -> list[tuple[Member, Entry]]:
    """Takes class and split from the folders of each image."""
    images = [member for member in members if is_image(member.name) and "/" in member.name]
    folders_by_split: dict[str | None, list[list[str]]] = {}
    shards = _Shards(images, root)
    for member in images:
        folders_by_split.setdefault(shards.split(member), []).append(member.name.split("/")[:-1])
    depth = {split: _shared_depth(folders) for split, folders in folders_by_split.items()}
    longest = {split: max(map(len, folders)) for split, folders in folders_by_split.items()}
    found = []
    for member in images:
        folders = member.name.split("/")[:-1]
        split = shards.split(member)
        if len(folders) <= depth[split] < longest[split]:
            raise DataError(f"{member.name} in {member.shard} lies in no class folder: remove it, or move it")
        # The folders that all images share are no class, unless nothing is left (there is one class only).
        class_name = folders[min(depth[split], len(folders) - 1)]
        for folder, below in itertools.pairwise(folders):
            if folder in SPLIT_NAMES:
                split, class_name = folder, below
                break
        found.append((member, shards.entry(member, class_name, split)))
    return found


def _shared_depth(paths: Sequence[list[str]]) -> int:
    first, last = min(paths), max(paths)
    pairs = enumerate(zip(first, last, strict=False))
    return next((depth for depth, (one, other) in pairs if one != other), min(len(first), len(last)))


def _list_samples(members: Sequence[Member], root: PurePath) -> list[tuple[Member, Entry]]:
    """Takes the class from the `.cls` file beside each image.

    It is called as the image is, but for the suffix; or up to the first dot, as samples are in WebDataset.
    """
    shards = _Shards(members, root)
    class_files: dict[tuple[int, str], Member] = {}
    for end in (_sample_key, _stem):  # the same name goes before the same sample
        for member in members:
            if member.name.endswith(CLASS_SUFFIX):
                class_files[id(member.shard), end(member)] = member
    found = []
    image_of: dict[tuple[int, str], Member] = {}
    for member in members:
        if not is_image(member.name):
            continue
        shard = id(member.shard)
        class_file = class_files.get((shard, _stem(member))) or class_files.get((shard, _sample_key(member)))
        if class_file is None:
            raise DataError(f"{member.name} in {member.shard} has no {CLASS_SUFFIX} file beside it: add one")
        other = image_of.setdefault((shard, class_file.name), member)
        if other is not member:
            raise DataError(
                f"{other.name} and {member.name} in {member.shard} share the class file {class_file.name}: "
                "pack one image with each"
            )
        class_name = class_file.text
        if not class_name:
            raise DataError(f"{class_file.name} in {member.shard} is empty: expected a class number or name")
        found.append((member, shards.entry(member, class_name, shards.split(member))))
    return found


def _stem(member: Member) -> str:
    """Returns the name without its last suffix."""
    folder, _, file = member.name.rpartition("/")
    return f"{folder}/{file.rpartition('.')[0]}"


def _sample_key(member: Member) -> str:
    """Returns the name up to the first dot after its folder, which the files of a sample share."""
    folder, _, file = member.name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def _ordered(names: set[str], by_number: bool) -> tuple[str, ...]:
    """Sorts class names; numbers from `.cls` files by value, so that a label is the number it was."""
    if by_number and all(name.isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))  # 3 and 03 are two names
    return tuple(sorted(names))
