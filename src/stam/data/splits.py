"""Which images train and which validate: as the data says, or a seeded split that a run can record."""

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

TRAIN = "train"
VAL_NAMES = ("val", "valid", "validation", "test")  # the first that is there is used


class Entry(NamedTuple):
    """One image of a source, not yet loaded.

    Attributes:
        name: What it is called within the source; unique there.
        class_name: Its class.
        split: `train` or one of `VAL_NAMES`; `None` where the data does not say.
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
        num_val: Validation scenes.
        digest: A hash of all names in order; it differs where files were added, removed or renamed.
        seed: The seed of a split made here; `None` where the data came with one.
        train: Names of the training images of a split made here.
        val: Names of its validation images.
    """

    classes: tuple[str, ...]
    num_train: int
    num_val: int
    digest: str
    seed: int | None = None
    train: tuple[str, ...] = ()
    val: tuple[str, ...] = ()


@dataclass(frozen=True)
class Splits:
    """Training and validation scenes of a source."""

    train: Scenes
    val: Scenes
    record: SplitRecord


@dataclass(frozen=True)
class SplitPlan:
    """How a source is to be divided.

    Attributes:
        val_fraction: The share to validate on, where the data does not say.
        seed: Seed of that split.
        record: An earlier division of the source, followed whatever was added since.
        val_only: Nothing is trained: all of a source without a split validates, and any classes will do.
    """

    val_fraction: float = 0.1
    seed: int = 0
    record: SplitRecord | None = None
    val_only: bool = False


class Division(NamedTuple):
    """Indices of the entries in each part, and the record of it."""

    train: Int[np.ndarray, "train"]
    val: Int[np.ndarray, "val"]
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
    """Divides the images of a source into training and validation.

    Args:
        entries: All images.
        classes: Their class names in label order.
        where: What to call the source in an error.
        plan: How to divide.

    Raises:
        DataError: The classes or the parts are not usable, or the source no longer holds what was recorded.
    """
    record = plan.record
    if record is not None and record.classes != classes:
        changed = set(record.classes) ^ set(classes)
        raise DataError(f"the classes of {where} changed since the split was recorded: {some_names(changed)}")
    if record is not None and record.seed is not None:
        return Division(_find(record.train, entries, where), _find(record.val, entries, where), record)
    train, val = _parts_in_data(entries)
    if plan.val_only:
        val = val if len(val) else train
        return Division(train[:0], val, _describe(entries, classes, train[:0], val, None))
    if len(classes) == 1:
        raise DataError(f"{where} holds one class only ('{classes[0]}'): a classifier needs two or more")
    if len(val):
        _require_same_classes(entries, train, val, where)
        return Division(train, val, _describe(entries, classes, train, val, None))
    if record is not None:
        raise DataError(f"{where} had a validation part when its split was recorded: bring it back")
    train, val = _split_by_seed(entries, classes, where, plan)
    return Division(train, val, _describe(entries, classes, train, val, plan.seed))


def some_names(names: Iterable[str], limit: int = 3) -> str:
    """Quotes the first few names for an error."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(f"'{name}'" for name in ordered[:limit]) + rest


def _parts_in_data(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts that the data names; without a validation part, all of it and nothing."""
    splits = np.array([entry.split or "" for entry in entries])
    for name in VAL_NAMES:
        if (splits == name).any():
            return np.flatnonzero(splits == TRAIN), np.flatnonzero(splits == name)
    return np.arange(len(entries)), np.arange(0)


def _split_by_seed(
    entries: Sequence[Entry], classes: tuple[str, ...], where: str, plan: SplitPlan
) -> tuple[np.ndarray, np.ndarray]:
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of[entry.class_name] for entry in entries], dtype=np.int64)
    for name, count in zip(classes, np.bincount(labels, minlength=len(classes)), strict=True):
        if count < 2:
            raise DataError(f"class '{name}' in {where} has one image, too few to split: add another")
    return stratified_split(labels, plan.val_fraction, plan.seed)


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
    entries: Sequence[Entry], classes: tuple[str, ...], train: np.ndarray, val: np.ndarray, seed: int | None
) -> SplitRecord:
    train_names = tuple(entries[index].name for index in train)
    val_names = tuple(entries[index].name for index in val)
    names = os.fsencode("\n".join((*train_names, "", *val_names)))  # a file name may be any bytes
    digest = hashlib.sha256(names).hexdigest()[:16]
    kept = (train_names, val_names) if seed is not None else ((), ())
    return SplitRecord(classes, len(train), len(val), digest, seed, *kept)
