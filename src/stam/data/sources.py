"""One way in: a folder, a CSV file, tar files or the word `digits` becomes scenes to learn from."""

import difflib
from pathlib import Path

from stam.data.clutter import open_clutter
from stam.data.digits import open_digits
from stam.data.folder import open_folder
from stam.data.indexed import is_indexed, open_indexed
from stam.data.manifest import is_manifest, open_manifest
from stam.data.remote import is_url
from stam.data.remote_tars import is_remote_tar, open_remote_tars
from stam.data.scenes import Relabelled, Scenes
from stam.data.shards import find_shards, is_tar, open_shards
from stam.data.splits import SplitPlan, SplitRecord, Splits
from stam.errors import DataError
from stam.files import from_user

DIGITS = "digits"


def open_scenes(
    source: str | Path,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    seed: int = 0,
    record: SplitRecord | None = None,
) -> Splits:
    """Opens whatever the source names, to train, validate and test on.

    Args:
        source: `digits` (the embedded default), a folder of class folders, a CSV file that lists images and
            labels (see `stam.data.manifest`), a tar, a pattern (`train-*.tar`, `train-{000..099}.tar`), a
            folder of tars, what `stam prepare shards` made, or digits in an `.npz` file, of which cluttered
            scenes are made. Tars, patterns and what `stam prepare shards` made may be URLs that fsspec knows
            (`s3://bucket/images`). A folder that is itself called digits is `./digits`.
        val_fraction: The share to validate on, where the data has no split of its own.
        test_fraction: The share to test on, where the data has no test part of its own.
        seed: Seed of that split; for digits, of the scenes.
        record: The split of an earlier run, to be followed even if files were added since.

    Raises:
        DataError: There is nothing there, or it is not laid out as it must be.
    """
    return _open(source, SplitPlan(val_fraction, seed, record, test_fraction=test_fraction))


def open_for_evaluation(
    source: str | Path,
    classes: tuple[str, ...],
    *,
    seed: int = 0,
    record: SplitRecord | None = None,
    was_trained_on: bool = False,
) -> Scenes:
    """Opens the scenes to evaluate an agent on.

    They are the test part, if there is none the validation part, or all of a source that has no split.

    Args:
        source: As for `open_scenes`.
        classes: The agent's class names, which the labels are to index; the data may lack some of them.
        seed: For digits, the seed of the scenes.
        record: The split of the agent's own run, where the source is the data it was trained on.
        was_trained_on: The source is that data, and the record is lost.

    Raises:
        DataError: There is nothing there, it is laid out otherwise, or the agent does not know a class.
    """
    plan = SplitPlan(seed=seed, record=record, val_only=True, was_trained_on=was_trained_on)
    splits = _open(source, plan)
    tests = splits.test is not None and (record is None or record.num_test > 0)
    scenes = splits.test if tests else splits.val
    assert scenes is not None
    return scenes if scenes.classes == classes else Relabelled(scenes, classes)


def is_data(source: str) -> bool:
    """Tells whether a word names something to open: a path that exists, tar files, or a URL."""
    if is_url(source):  # not a path: one with a signature may be longer than a path can be
        return True
    path = from_user(source)
    return path.exists() or bool(find_shards(path))


def is_what_was_split(source: str | Path, record: SplitRecord) -> bool:
    """Tells whether a source holds the images of a recorded split, by their names."""
    try:
        return _open(source, SplitPlan(record=record)).record.digest == record.digest
    except DataError:
        return False


def _open(source: str | Path, plan: SplitPlan) -> Splits:
    if str(source) == DIGITS:
        return _as_it_is(
            open_digits(plan.seed), plan, f"{DIGITS} have no test part: leave out --test-fraction"
        )
    if is_remote_tar(str(source)):
        return open_remote_tars(str(source), plan)
    packed = f"{source} was packed without a test part: pass --test-fraction to stam prepare shards"
    if is_url(source):
        return _as_it_is(open_indexed(source), plan, packed)
    path = from_user(source)
    if is_indexed(path):
        return _as_it_is(open_indexed(path), plan, packed)
    if find_shards(path) and (path.is_dir() or is_tar(path)):
        return open_shards(path, plan)
    if path.is_dir():
        return open_folder(path, plan)
    if path.is_file() and path.suffix == ".npz":
        return _as_it_is(
            open_clutter(path, plan.seed), plan, f"{path} makes no test part: leave out --test-fraction"
        )
    if path.is_file() and is_manifest(path):
        return open_manifest(path, plan)
    if path.is_file():
        allowed = f"a folder of class folders, a .csv that lists images, a .tar, or the word '{DIGITS}'"
        raise DataError(f"{path} is a file: give {allowed}")
    raise DataError(f"no such data: {source}; {nearest_data(path)}")


def _as_it_is(splits: Splits, plan: SplitPlan, complaint: str) -> Splits:
    """Returns the parts of a source that cannot be divided otherwise; raises where a test part was wanted."""
    if plan.test_fraction > 0 and splits.test is None:
        raise DataError(complaint)
    return splits


def nearest_data(path: Path) -> str:
    """Says which path that exists the user may have meant."""
    if difflib.get_close_matches(str(path), [DIGITS], cutoff=0.7):
        return f"did you mean '{DIGITS}'?"
    missing, parent = path, path.parent
    while not parent.is_dir() and parent != parent.parent:
        missing, parent = parent, parent.parent
    names = [child.name for child in parent.iterdir()] if parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{parent / close[0]}'?"
    return f"the nearest folder that exists is '{parent}'; give a folder, tar files, or the word '{DIGITS}'"
