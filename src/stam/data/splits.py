"""Which images train, validate and test: as the data says, or a seeded split that a run can record."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stam.config import from_plain, to_plain
from stam.data.randomness import random_order
from stam.data.scenes import Scenes
from stam.errors import ConfigError, DataError, FileError, require
from stam.files import read_json, save_content
from stam.shapes import Int

TRAIN, TEST = "train", "test"
VAL_NAMES = ("val", "valid", "validation")  # the first that is there is used
SPLIT_NAMES = (TRAIN, *VAL_NAMES, TEST)


class Entry(NamedTuple):
    """One image of a source, not yet loaded.

    Attributes:
        name: What it is called within the source; unique there.
        class_name: Its class.
        split: One of `SPLIT_NAMES`; `None` where the data does not say.
    """

    name: str
    class_name: str
    split: str | None


@dataclass(frozen=True)
class SplitRecord:
    """What a run writes down, so that a resume or an evaluation sees the same images as the training.

    Attributes:
        classes: Class names, in label order.
        num_train: Training scenes.
        num_val: Validation scenes, which choose the best checkpoint.
        digest: A hash of all names in order; it differs where files were added, removed or renamed.
        seed: The seed of a split made here; `None` where the data came with one.
        train: Names of the training images of a split made here.
        val: Names of its validation images.
        num_test: Test scenes, which choose nothing; 0 where there are none.
        test: Names of the test images of a split made here.
    """

    classes: tuple[str, ...]
    num_train: int
    num_val: int
    digest: str
    seed: int | None = None
    train: tuple[str, ...] = ()
    val: tuple[str, ...] = ()
    num_test: int = 0
    test: tuple[str, ...] = ()


@dataclass(frozen=True)
class Splits:
    """The scenes of a source.

    Attributes:
        train: What is learned from.
        val: What chooses the best checkpoint.
        record: Which scenes these are.
        test: What results are reported on; `None` where the source has no such part.
    """

    train: Scenes
    val: Scenes
    record: SplitRecord
    test: Scenes | None = None


@dataclass(frozen=True)
class SplitPlan:
    """How a source is to be divided.

    Attributes:
        val_fraction: The share to validate on, where the data does not say.
        test_fraction: The share to test on, where the data does not say.
        seed: Seed of that split.
        record: An earlier division of the source, followed whatever was added since.
        val_only: Nothing is trained: all of a source without a split validates, and any classes will do.
        was_trained_on: With `val_only`: a run was trained on the source and its record is lost, so only a
            part that the source itself holds out can be evaluated on.
    """

    val_fraction: float = 0.1
    seed: int = 0
    record: SplitRecord | None = None
    val_only: bool = False
    test_fraction: float = 0.0
    was_trained_on: bool = False


class Division(NamedTuple):
    """Indices of the entries in each part, and the record of it."""

    train: Int[np.ndarray, "train"]
    val: Int[np.ndarray, "val"]
    test: Int[np.ndarray, "test"]
    record: SplitRecord


def save_record(record: SplitRecord, path: Path) -> None:
    """Writes a record as JSON, atomically."""
    save_content(path, json.dumps(to_plain(record), indent=1))


def load_record(path: Path) -> SplitRecord:
    """Reads a record back."""
    try:
        return from_plain(SplitRecord, read_json(path, most_bytes=2**30))  # the names of all images
    except (FileError, ConfigError) as error:
        raise DataError(f"cannot read the split record {path}: {error}") from error


def stratified_split(
    labels: Int[np.ndarray, "scenes"], val_fraction: float, seed: int
) -> tuple[Int[np.ndarray, "train"], Int[np.ndarray, "val"]]:
    """Splits each class alike; every class keeps at least one scene in each part.

    Raises:
        DataError: A class has a single scene.
    """
    require(0 < val_fraction < 1, f"val_fraction must be between 0 and 1, got {val_fraction}")
    is_val = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise DataError(f"class {label} has one image, too few to split: add another")
        num_val = min(max(round(val_fraction * len(members)), 1), len(members) - 1)
        is_val[members[random_order(len(members), "split", seed, int(label))[:num_val]]] = True
    return np.flatnonzero(~is_val), np.flatnonzero(is_val)


def divide(entries: Sequence[Entry], classes: tuple[str, ...], where: str, plan: SplitPlan) -> Division:
    """Divides the images of a source into training, validation and test.

    A part named `test` chooses nothing. Where the data has no validation part, one is split off the training
    images.

    Args:
        entries: All images.
        classes: Their class names in label order.
        where: What to call the source in an error.
        plan: How to divide.

    Raises:
        DataError: There is too little to divide, or the source no longer holds what was recorded.
    """
    record = plan.record
    if record is not None and record.classes != classes:
        changed = set(record.classes) ^ set(classes)
        raise DataError(f"the classes of {where} changed since the split was recorded: {some_names(changed)}")
    if record is not None and record.seed is not None:
        train, val, test = (_find(names, entries, where) for names in (record.train, record.val, record.test))
        if record.num_test and not record.test:  # the data's own
            test = _parts_in_data(entries)[2]
            if _describe(entries, classes, train, val, test, record.seed).digest != record.digest:
                raise DataError(f"{where} no longer holds the recorded test images: bring them back")
        return Division(train, val, test, record)
    train, val, test = _parts_in_data(entries)
    if record is not None and record.num_test == 0 and not len(val):
        val, test = test, val  # of a version that validated on a part named test
    if plan.val_only:
        if plan.was_trained_on and not len(val) and not len(test):
            raise DataError(
                f"the run's 'split.json' is missing, and {where} has no validation or test part, so nothing "
                "tells training images from others: bring it back"
            )
        val = next((part for part in (val, test, train) if len(part)), train)
        return Division(train[:0], val, test, _describe(entries, classes, train[:0], val, test, None))
    if len(classes) == 1:
        raise DataError(f"{where} holds one class only ('{classes[0]}'): a classifier needs two or more")
    for part in (val, test):
        if len(part):
            _require_same_classes(entries, train, part, where)
    makes_test = plan.test_fraction > 0 and not len(test)
    if len(val) and not makes_test:
        return Division(train, val, test, _describe(entries, classes, train, val, test, None))
    if record is not None:
        raise DataError(f"{where} had a validation part when its split was recorded: bring it back")
    if makes_test:
        train, test = _split_by_seed(entries, train, classes, where, plan.test_fraction, plan.seed)
    if not len(val):
        train, val = _split_by_seed(entries, train, classes, where, plan.val_fraction, plan.seed)
    record = _describe(entries, classes, train, val, test, plan.seed)
    return Division(train, val, test, record if makes_test else dataclasses.replace(record, test=()))


def some_names(names: Iterable[str], limit: int = 3) -> str:
    """Quotes the first few names for an error."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(f"'{name}'" for name in ordered[:limit]) + rest


def _parts_in_data(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the training, validation and test part that the data names; without any, all trains."""
    splits = np.array([entry.split or "" for entry in entries])
    named = [name for name in VAL_NAMES if (splits == name).any()]
    if len(named) > 1:
        raise DataError(
            f"some images are of the part '{named[0]}', others of '{named[1]}': call both '{VAL_NAMES[0]}'"
        )
    val_name = named[0] if named else None
    val, test = np.flatnonzero(splits == val_name), np.flatnonzero(splits == TEST)
    if not len(val) and not len(test):
        return np.arange(len(entries)), val, test
    return np.flatnonzero(splits == TRAIN), val, test


def _split_by_seed(
    entries: Sequence[Entry],
    chosen: np.ndarray,
    classes: tuple[str, ...],
    where: str,
    fraction: float,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Splits a share off some of the entries."""
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of[entries[index].class_name] for index in chosen], dtype=np.int64)
    for name, count in zip(classes, np.bincount(labels, minlength=len(classes)), strict=True):
        if count < 2:
            raise DataError(f"class '{name}' in {where} has one image, too few to split: add another")
    kept, split_off = stratified_split(labels, fraction, seed)
    return chosen[kept], chosen[split_off]


def _require_same_classes(entries: Sequence[Entry], train: np.ndarray, val: np.ndarray, where: str) -> None:
    in_train = {entries[index].class_name for index in train}
    in_val = {entries[index].class_name for index in val}
    val_name = entries[val[0]].split
    outside = [entry.name for entry in entries if entry.split is None]
    if outside:
        raise DataError(
            f"{where} has images outside '{TRAIN}' and '{val_name}': {some_names(outside)}; move them"
        )
    if not in_train:
        raise DataError(f"{where} has a part '{val_name}' and no '{TRAIN}': add the training images")
    if in_val - in_train:
        names = some_names(in_val - in_train)
        raise DataError(
            f"{where}: '{val_name}' has classes that '{TRAIN}' lacks: {names}; add or remove them"
        )
    if in_train - in_val:
        names = some_names(in_train - in_val)
        raise DataError(
            f"{where}: '{TRAIN}' has classes that '{val_name}' lacks: {names}; add or remove them"
        )


def _find(names: Sequence[str], entries: Sequence[Entry], where: str) -> np.ndarray:
    position = {entry.name: index for index, entry in enumerate(entries)}
    missing = [name for name in names if name not in position]
    if missing:
        raise DataError(
            f"{where} no longer holds {len(missing)} recorded images: {some_names(missing)}; bring them back"
        )
    return np.array([position[name] for name in names], dtype=np.int64)


def _describe(
    entries: Sequence[Entry],
    classes: tuple[str, ...],
    train: np.ndarray,
    val: np.ndarray,
    test: np.ndarray,
    seed: int | None,
) -> SplitRecord:
    names = [tuple(entries[index].name for index in part) for part in (train, val, test)]
    lines = [*names[0], "", *names[1], *(["", *names[2]] if names[2] else [])]
    digest = hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:16]  # names may be any bytes
    kept = names if seed is not None else [(), (), ()]
    return SplitRecord(
        classes, len(train), len(val), digest, seed, kept[0], kept[1], num_test=len(test), test=kept[2]
    )
