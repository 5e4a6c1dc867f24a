"""Opens the data a command trains on, and checks it before the first batch."""

import sys

from stam.data import SplitRecord, Splits, Subset, check_images, open_scenes
from stam.errors import DataError
from stam.settings import DataConfig


def open_data(data: DataConfig, record: SplitRecord | None = None) -> Splits:
    """Opens and checks the data; with a record, that of the run which is resumed.

    Raises:
        DataError: There is no such data, it is laid out otherwise, an image cannot be read, or the images are
            not those the run began with.
    """
    splits = open_scenes(data.path, val_fraction=data.val_fraction, seed=data.split_seed, record=record)
    if record is not None and splits.record != record:
        raise DataError(f"the images in {data.path} are not those the run began with: bring them back")
    if not data.check:
        return splits
    parts = []
    for name, scenes in (("training", splits.train), ("validation", splits.val)):
        report = check_images(
            scenes, skip_unreadable=data.skip_unreadable, description=f"checking {name} images"
        )
        for problem in report.unreadable:
            print(f"stam: skipped: {problem}", file=sys.stderr)
        if report.unreadable:
            print(f"stam: skipped {len(report.unreadable)} unreadable {name} images", file=sys.stderr)
        parts.append(Subset(scenes, report.readable) if report.unreadable else scenes)
    return Splits(parts[0], parts[1], splits.record)
