"""Functional Map of the World: from the dataset's own layout to a folder of class folders.

The dataset holds satellite images `*_rgb.jpg`, each with a `*_rgb.json` whose `bounding_boxes` name what is
where. The paper classifies the boxes, in 62 classes; the 63rd category, `false_detection`, is left out.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stam.data.images import decode_image
from stam.data.parallel import map_with_progress
from stam.errors import DataError, FileError
from stam.files import from_user, make_folder, read_content, save_content, write_atomically

_CLASS_NAMES = """
    airport airport_hangar airport_terminal amusement_park aquaculture archaeological_site barn
    border_checkpoint burial_site car_dealership construction_site crop_field dam debris_or_rubble
    educational_institution electric_substation factory_or_powerplant fire_station flooded_road fountain
    gas_station golf_course ground_transportation_station helipad hospital impoverished_settlement
    interchange lake_or_pond lighthouse military_facility multi-unit_residential nuclear_powerplant
    office_building oil_or_gas_facility park parking_lot_or_garage place_of_worship police_station port
    prison race_track railway_bridge recreational_facility road_bridge runway shipyard shopping_mall
    single-unit_residential smokestack solar_farm space_facility stadium storage_tank surface_mine
    swimming_pool toll_booth tower tunnel_opening waste_disposal water_treatment_facility wind_farm zoo
"""
FMOW_CLASSES = tuple(_CLASS_NAMES.split())
REPORT_NAME = "prepare_report.json"

_SPLITS = ("train", "val", "test")
_IGNORED_SPLIT = "seq"
_NOT_A_CLASS = "false_detection"
_IMAGE_END, _BOXES_END = "_rgb.jpg", "_rgb.json"
_MAX_PIXELS = 400_000_000  # some of the satellite images are larger than Pillow allows from strangers


@dataclass
class FmowReport:
    """What `prepare_fmow` did; also written to `prepare_report.json`.

    Attributes:
        dataset: Marks the folder as ours.
        complete: Whether the work was finished.
        num_images: Images found.
        num_written: Crops written by this call.
        num_kept: Crops that an earlier call had written.
        num_crops: Crops in each class folder.
        skipped: Names of the images and boxes that were left out, by reason.
    """

    dataset: str = "fmow"
    complete: bool = False
    max_shorter_side: int | None = None
    quality: int = 95
    num_images: int = 0
    num_written: int = 0
    num_kept: int = 0
    num_crops: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        """Notes that something was left out."""
        self.skipped.setdefault(reason, []).append(name)

    def summary(self) -> str:
        """Returns a few lines for the user."""
        lines = [f"{self.num_images} images: {self.num_written} crops written, {self.num_kept} kept"]
        lines += [f"skipped {len(names)}: {reason}" for reason, names in sorted(self.skipped.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Job:
    """What all images have in common."""

    source: Path
    out: Path
    max_shorter_side: int | None
    quality: int


@dataclass
class _Outcome:
    """What came of one image."""

    num_written: int = 0
    num_kept: int = 0
    class_folders: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # reason, name


class _SkipError(Exception):
    """Why an image or a box is left out."""


def prepare_fmow(
    source: str | Path,
    out: str | Path,
    *,
    num_workers: int | None = None,
    max_shorter_side: int | None = None,
    quality: int = 95,
    progress: bool = True,
) -> FmowReport:
    """Crops every annotated box to `out/SPLIT/CLASS/NAME_BOX.jpg`.

    A crop appears only when it is whole, so the work can be interrupted at any time; called again it goes on.

    Args:
        source: The dataset, or one of its splits. A split is a folder called `train`, `val` or `test`; `seq`
            is left out. Without such folders the classes lie in `out` directly.
        out: Where to write; empty, or an earlier call's.
        num_workers: Threads; one a core if not given.
        max_shorter_side: Shrinks larger crops, to save disk and decoding; as they are if not given.
        quality: JPEG quality of the crops.
        progress: Whether to show a progress bar.

    Raises:
        DataError: The source holds no such data, or `out` cannot be used.
        FileError: A crop or the report could not be written.
    """
    job = _Job(from_user(source), from_user(out), max_shorter_side, quality)
    _check_folders(job)
    report = FmowReport(max_shorter_side=max_shorter_side, quality=quality)
    images = _find_images(job.source, report)
    if not images:
        raise DataError(f"no *{_IMAGE_END} in {source}: give the folder that holds fMoW's train and val")
    report.num_images = len(images)
    _write_report(report, job.out)  # marks the folder as ours, should the work be interrupted
    num_crops: Counter[str] = Counter()
    with _large_images_allowed():
        outcomes = map_with_progress(
            lambda image: _crop_image(image, job), images, "cropping", num_workers, progress
        )
        for outcome in outcomes:
            report.num_written += outcome.num_written
            report.num_kept += outcome.num_kept
            num_crops.update(outcome.class_folders)
            for reason, name in outcome.skipped:
                report.skip(reason, name)
    report.num_crops = dict(sorted(num_crops.items()))
    report.complete = True
    _write_report(report, job.out)
    return report


def _check_folders(job: _Job) -> None:
    source, out = job.source, job.out
    if not source.is_dir():
        raise DataError(f"no such folder: {source}; give the folder that holds fMoW's train and val")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: give a folder to write to")
    if out.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(out.resolve()):
        raise DataError(f"{out} and {source} lie one inside the other: write to a folder elsewhere")
    if out.is_dir() and any(out.iterdir()):
        try:
            earlier = json.loads((out / REPORT_NAME).read_text())
            is_ours = earlier["dataset"] == FmowReport.dataset
            others = [
                name
                for name in ("max_shorter_side", "quality")
                if earlier.get(name, getattr(job, name)) != getattr(job, name)
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise DataError(
                f"{out} holds something else: give an empty folder, or an earlier call's to go on"
            )
        if others:  # what is there would stay as it is
            before = f"{others[0].replace('_', '-')} {str(earlier[others[0]]).lower()}"
            raise DataError(f"the crops in {out} were made with {before}: go on so, or name another folder")


def _find_images(source: Path, report: FmowReport) -> list[Path]:
    """Returns the images to crop, sorted, and reports what is left out already."""
    images: dict[tuple[str | None, str], Path] = {}
    for place, folders, files in os.walk(source):
        folders.sort()
        names = set(files)
        for name in sorted(files):
            path = Path(place, name)
            shown = path.relative_to(source).as_posix()
            if name.endswith(_BOXES_END) and name.removesuffix(_BOXES_END) + _IMAGE_END not in names:
                report.skip("no image beside the json", shown)
            if not name.endswith(_IMAGE_END):
                continue
            split = _split_of(path, source)
            if split == _IGNORED_SPLIT:
                report.skip(f"in a folder '{_IGNORED_SPLIT}'", shown)
            elif (split, name) in images:
                report.skip("another image of the split has the same name", shown)
            else:
                images[split, name] = path
    return list(images.values())


def _split_of(image: Path, source: Path) -> str | None:
    folders = image.relative_to(source).parts[:-1]
    inside = next((name for name in folders if name in (*_SPLITS, _IGNORED_SPLIT)), None)
    name = source.resolve().name
    return inside or (name if name in _SPLITS else None)


def _crop_image(image: Path, job: _Job) -> _Outcome:
    """Writes the crops of one image that are not there yet."""
    outcome = _Outcome()
    shown = image.relative_to(job.source).as_posix()
    folder = job.out / (_split_of(image, job.source) or "")
    missing = []
    try:
        for number, box in enumerate(_read_boxes(image.with_suffix(".json"))):
            try:
                category, edges = _read_box(box)
            except _SkipError as skip:
                outcome.skipped.append((str(skip), f"{shown} box {number}"))
                continue
            target = folder / category / f"{image.stem}_{number}.jpg"
            if target.exists():
                outcome.num_kept += 1
                outcome.class_folders.append(target.parent.relative_to(job.out).as_posix())
            else:
                missing.append((target, edges, f"{shown} box {number}"))
        pixels = _read_pixels(image) if missing else np.empty((0, 0, 3), dtype=np.uint8)
    except _SkipError as skip:
        outcome.skipped.append((str(skip), shown))
        return outcome
    for target, edges, box_shown in missing:
        crop = _cut(pixels, edges)
        if crop.size == 0:
            outcome.skipped.append(("empty box", box_shown))
            continue
        _write_crop(crop, target, job)
        outcome.num_written += 1
        outcome.class_folders.append(target.parent.relative_to(job.out).as_posix())
    return outcome


def _read_boxes(path: Path) -> list[Any]:
    if not path.exists():
        raise _SkipError("no json beside the image")
    try:
        boxes = json.loads(read_content(path))["bounding_boxes"]
    except (FileError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _SkipError("malformed json") from error
    if not isinstance(boxes, list):
        raise _SkipError("malformed json")
    if not boxes:
        raise _SkipError("no boxes in the json")
    return boxes


def _read_box(box: Any) -> tuple[str, tuple[int, int, int, int]]:
    """Returns a box's class and its (left, top, right, bottom)."""
    try:
        category = box.get("category")
        x, y, width, height = (float(number) for number in box["box"])
        edges = round(x), round(y), round(x + width), round(y + height)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _SkipError("malformed box") from error
    if category is None:
        raise _SkipError("box without a category")
    if category == _NOT_A_CLASS:
        raise _SkipError(f"category {_NOT_A_CLASS}, which is not one of the {len(FMOW_CLASSES)} classes")
    if category not in FMOW_CLASSES:
        raise _SkipError("unknown category")
    return category, edges


def _read_pixels(image: Path) -> np.ndarray:
    try:
        return decode_image(image)
    except DataError as error:
        raise _SkipError("unreadable image") from error


def _cut(pixels: np.ndarray, edges: tuple[int, int, int, int]) -> np.ndarray:
    """Returns the part of a box that lies in the image."""
    left, top, right, bottom = (max(0, edge) for edge in edges)
    return pixels[top:bottom, left:right]


def _write_crop(crop: np.ndarray, target: Path, job: _Job) -> None:
    image = Image.fromarray(crop)
    if job.max_shorter_side is not None and min(image.size) > job.max_shorter_side:
        scale = job.max_shorter_side / min(image.size)
        size = round(image.width * scale), round(image.height * scale)
        image = image.resize(size, Image.Resampling.BICUBIC)
    make_folder(target.parent)
    write_atomically(target, lambda place: image.save(place, "JPEG", quality=job.quality))


def _write_report(report: FmowReport, out: Path) -> None:
    make_folder(out)
    save_content(out / REPORT_NAME, json.dumps(asdict(report), indent=1))


@contextlib.contextmanager
def _large_images_allowed() -> Iterator[None]:
    """Raises Pillow's limit on the size of an image for a while; it is the same for the whole process."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = _MAX_PIXELS
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before
