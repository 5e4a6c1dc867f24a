"""Images in folders: `root/train/CLASS/*` and `root/val/CLASS/*`, or `root/CLASS/*` without a split."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stam.config import is_writable
from stam.data.images import IMAGE_SUFFIXES, decode_image, is_image
from stam.data.memory import fingerprint
from stam.data.splits import SPLIT_NAMES, TEST, TRAIN, VAL_NAMES, Entry, SplitPlan, Splits, divide
from stam.errors import DataError
from stam.shapes import UInt8


class ImageFolder:
    """The images of one part of a folder.

    Attributes:
        root: The folder that all names start from.
        names: The path of each image under it.
        classes: Class names.
        labels: The class of each image.
    """

    def __init__(self, root: Path, entries: Sequence[Entry], classes: tuple[str, ...]) -> None:
        label_of = {name: label for label, name in enumerate(classes)}
        self.root = root
        self.names = tuple(entry.name for entry in entries)
        self.classes = classes
        self.labels = np.array([label_of[entry.class_name] for entry in entries], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int, decode_size: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """Decodes one image."""
        return decode_image(self.root / self.names[index], decode_size=decode_size)

    def name(self, index: int) -> str:
        """Returns the path of an image under the folder."""
        return self.names[index]

    def fingerprint(self) -> str:
        """Returns a hash of every image's path, size and modification time."""
        return fingerprint(self.root, self.names)


def open_folder(root: Path, plan: SplitPlan | None = None) -> Splits:
    """Opens a folder of class folders, with its own split or a seeded one.

    Args:
        root: Holds `train` and `val` (or `valid`, `validation`) or `test` or both, or the class folders
            themselves.
        plan: How to split where the folder has no split of its own.

    Raises:
        DataError: The folder is not laid out as it must be; the message says what to change.
    """
    try:
        entries = list_folder(root)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror or error}") from error
    classes = tuple(sorted({entry.class_name for entry in entries}))
    parts = divide(entries, classes, str(root), plan or SplitPlan())
    train, val, test = (
        ImageFolder(root, [entries[index] for index in part], classes)
        for part in (parts.train, parts.val, parts.test)
    )
    return Splits(train, val, parts.record, test if len(test) else None)


def list_folder(root: Path) -> list[Entry]:
    """Lists all images, sorted by class and path; a class folder without any is an error."""
    if not root.exists():
        raise DataError(f"no such folder: {root}")
    if not root.is_dir():
        raise DataError(f"{root} is a file: give the folder that holds the class folders")
    class_folders = _class_folders(root)
    if not class_folders:
        loose = sum(is_image(path.name) for path in root.iterdir())
        found = f"{loose} images lie in it directly" if loose else "it has no folders"
        raise DataError(f"no classes in {root}: {found}; expected one folder of images for each class")
    entries = []
    for split, folder in class_folders:
        if not is_writable(folder.name):
            raise DataError(f"the name of class folder {os.fsencode(folder)!r} is not UTF-8: rename it")
        files = image_files(folder)
        if not files:
            allowed = " ".join(IMAGE_SUFFIXES)
            raise DataError(f"no images in class folder {folder}: add some ({allowed}) or remove it")
        prefix = folder.relative_to(root).as_posix()
        entries += [Entry(f"{prefix}/{name}", folder.name, split) for name in files]
    return entries


def image_files(folder: Path) -> list[str]:
    """Returns the images anywhere under a folder, as sorted relative paths; hidden files are left out."""
    found, walked = [], set()
    for place, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        here, facts = Path(place), os.stat(place)  # noqa: PTH116
        if (facts.st_dev, facts.st_ino) in walked:  # links lead here in more than one way
            folders.clear()
            continue
        walked.add((facts.st_dev, facts.st_ino))
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not _leads_back(here / name)
        )
        prefix = here.relative_to(folder)
        found += [(prefix / name).as_posix() for name in files if is_image(name) and not name.startswith(".")]
    return sorted(found)


def _raise(error: OSError) -> None:
    """Stops a walk at a folder that may not be read; `os.walk` would leave it out without a word."""
    raise error


def _leads_back(folder: Path) -> bool:
    """Tells a link to a folder above itself, which would be walked for ever."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_folders(root: Path) -> list[tuple[str | None, Path]]:
    """Returns every class folder with its split.

    A folder named as a split that holds no folders is a class: trains are among the things one classifies.
    """
    folders = _subfolders(root)
    splits = {path.name: classes for path in folders if (classes := _subfolders(path))}
    for name in splits:
        meant = {"training": TRAIN, "testing": TEST}.get(name.lower(), name.lower())
        if meant in SPLIT_NAMES and meant != name:
            raise DataError(f"{root / name} holds folders and is called like a part: rename it to '{meant}'")
    validate = [name for name in VAL_NAMES if name in splits]
    if len(validate) > 1:
        raise DataError(f"{root} has '{validate[0]}' and '{validate[1]}': keep one validation part")
    for path in folders:
        is_part = TRAIN in splits and path.name in SPLIT_NAMES and path.name not in splits
        if is_part and any(is_image(child.name) for child in path.iterdir()):
            raise DataError(f"{path} has no class folders: sort its images as those of '{TRAIN}', or move it")
    named = [*validate, TEST]
    if TRAIN not in splits and not any(name in splits for name in named):
        return [(None, folder) for folder in folders]
    return [(split, folder) for split in (TRAIN, *named) if split in splits for folder in splits[split]]
