import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stam.data import FMOW_CLASSES, decode_image, fmow, open_scenes, prepare_fmow
from stam.errors import DataError, FileError


def write_image(path: Path, boxes: Any, size: tuple[int, int] = (60, 40)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]]
    Image.fromarray(np.stack([rows * 4, columns * 4, rows * 0], -1).astype(np.uint8)).save(path, quality=95)
    if boxes is not None:
        text = boxes if isinstance(boxes, str) else json.dumps({"gsd": 0.5, "bounding_boxes": boxes})
        path.with_suffix(".json").write_text(text)
    return path


def box(category: str | None, *corner_and_size: float) -> dict[str, Any]:
    found: dict[str, Any] = {"ID": 1, "box": list(corner_and_size)}
    return found if category is None else found | {"category": category}


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "fmow"
    for split, num in (("train", 3), ("val", 1)):
        for name in ("zoo", "airport"):
            for i in range(num):
                path = root / split / name / f"{name}_{i}" / f"{name}_{i}_0_rgb.jpg"
                write_image(path, [box(name, 10, 5, 20, 30)])
    write_image(root / "seq" / "17" / "17_0_rgb.jpg", [box("zoo", 0, 0, 9, 9)])
    (root / "train" / "zoo" / "zoo_0" / "zoo_0_0_msrgb.jpg").write_bytes(b"other bands")
    return root


def test_there_are_62_classes() -> None:
    assert len(FMOW_CLASSES) == len(set(FMOW_CLASSES)) == 62
    assert list(FMOW_CLASSES) == sorted(FMOW_CLASSES)


def test_crops_become_a_folder_to_train_on(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = prepare_fmow(source, out, progress=False)
    assert (report.num_images, report.num_written, report.num_kept) == (8, 8, 0)
    assert report.num_crops == {"train/airport": 3, "train/zoo": 3, "val/airport": 1, "val/zoo": 1}
    assert report.skipped == {"in a folder 'seq'": ["seq/17/17_0_rgb.jpg"]}
    splits = open_scenes(out)
    assert splits.train.classes == ("airport", "zoo")
    assert (len(splits.train), len(splits.val)) == (6, 2)
    assert (out / "train" / "zoo" / "zoo_1_0_rgb_0.jpg").is_file()
    crop = splits.train.load(0)
    assert crop.shape == (30, 20, 3)
    assert np.abs(crop[15, 10].astype(int) - [80, 80, 0]).max() < 12


def test_boxes_are_clamped_and_odd_ones_reported(tmp_path: Path) -> None:
    source, out = tmp_path / "fmow", tmp_path / "out"
    boxes = [
        box("zoo", -5, -5, 15, 25),
        box("zoo", 50, 30, 99, 99),
        box("zoo", 10, 10, 0, 5),
        box("zoo", 70, 10, 5, 5),
        box("zoo", -9, 3, 4, 4),
        box("false_detection", 1, 1, 5, 5),
        box("castle", 1, 1, 5, 5),
        box(None, 1, 1, 5, 5),
        box("zoo", 1, 2, 3),
        box("zoo", float("nan"), 2, 3, 4),
        "no box",
        box("park", 0.4, 0.4, 10.2, 10.2),
    ]
    write_image(source / "train" / "a_rgb.jpg", boxes)
    report = prepare_fmow(source, out, progress=False)
    assert report.num_written == 3
    sizes = {path.name: size_of(path) for path in out.rglob("*.jpg")}
    assert sizes == {"a_rgb_0.jpg": (10, 20), "a_rgb_1.jpg": (10, 10), "a_rgb_11.jpg": (11, 11)}
    assert {reason: len(names) for reason, names in report.skipped.items()} == {
        "empty box": 3,
        "category false_detection, which is not one of the 62 classes": 1,
        "unknown category": 1,
        "box without a category": 1,
        "malformed box": 3,
    }
    assert "train/a_rgb.jpg box 2" in report.skipped["empty box"]


def test_images_that_cannot_be_used_are_reported(source: Path, tmp_path: Path) -> None:
    folder = source / "train"
    write_image(folder / "b" / "cut_rgb.jpg", [box("zoo", 0, 0, 5, 5)])
    (folder / "b" / "cut_rgb.jpg").write_bytes((folder / "b" / "cut_rgb.jpg").read_bytes()[:300])
    write_image(folder / "b" / "alone_rgb.jpg", None)
    write_image(folder / "b" / "bad1_rgb.jpg", "{not json")
    write_image(folder / "b" / "bad2_rgb.jpg", "[]")
    write_image(folder / "b" / "bad3_rgb.jpg", '{"bounding_boxes": {}}')
    write_image(folder / "b" / "none_rgb.jpg", [])
    write_image(folder / "c" / "none_rgb.jpg", [])
    (folder / "b" / "gone_rgb.json").write_text("{}")
    report = prepare_fmow(source, tmp_path / "out", progress=False, num_workers=1)
    assert report.num_written == 8
    assert report.skipped == {
        "in a folder 'seq'": ["seq/17/17_0_rgb.jpg"],
        "unreadable image": ["train/b/cut_rgb.jpg"],
        "no json beside the image": ["train/b/alone_rgb.jpg"],
        "malformed json": ["train/b/bad1_rgb.jpg", "train/b/bad2_rgb.jpg", "train/b/bad3_rgb.jpg"],
        "no boxes in the json": ["train/b/none_rgb.jpg"],
        "another image of the split has the same name": ["train/c/none_rgb.jpg"],
        "no image beside the json": ["train/b/gone_rgb.json"],
    }
    written = json.loads((tmp_path / "out" / "prepare_report.json").read_text())
    assert written["complete"]
    assert written["skipped"] == report.skipped
    assert "14 images: 8 crops written, 0 kept\nskipped 1: another image" in report.summary()


def test_it_goes_on_where_it_was(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    prepare_fmow(source, out, progress=False)
    (out / "val" / "zoo" / "zoo_0_0_rgb_0.jpg").unlink()
    decoded = []
    real = sys.modules["stam.data.fmow"].decode_image
    monkeypatch.setattr("stam.data.fmow.decode_image", lambda path: decoded.append(path.name) or real(path))
    report = prepare_fmow(source, out, progress=False)
    assert (report.num_written, report.num_kept) == (1, 7)
    assert decoded == ["zoo_0_0_rgb.jpg"]
    assert report.num_crops == {"train/airport": 3, "train/zoo": 3, "val/airport": 1, "val/zoo": 1}


def test_it_goes_on_with_the_same_settings_only(source: Path, tmp_path: Path) -> None:
    prepare_fmow(source, tmp_path / "out", max_shorter_side=50, progress=False)
    with pytest.raises(DataError, match="were made with max-shorter-side 50: go on so, or name another"):
        prepare_fmow(source, tmp_path / "out", progress=False)
    assert prepare_fmow(source, tmp_path / "out", max_shorter_side=50, progress=False).num_written == 0
    report = tmp_path / "out" / fmow.REPORT_NAME
    old = json.loads(report.read_text())
    for name in ("max_shorter_side", "quality"):
        del old[name]  # of an earlier version, which did not say
    report.write_text(json.dumps(old))
    prepare_fmow(source, tmp_path / "out", progress=False)
    with pytest.raises(DataError, match="were made with max-shorter-side none"):
        prepare_fmow(source, tmp_path / "out", max_shorter_side=20, progress=False)


def test_one_split_or_none(source: Path, tmp_path: Path) -> None:
    assert set(prepare_fmow(source / "val", tmp_path / "a", progress=False).num_crops) == {
        "val/airport",
        "val/zoo",
    }
    loose = tmp_path / "loose"
    write_image(loose / "x_rgb.jpg", [box("zoo", 0, 0, 5, 5)])
    assert prepare_fmow(loose, tmp_path / "b", progress=False).num_crops == {"zoo": 1}


def test_large_crops_can_be_shrunk(source: Path, tmp_path: Path) -> None:
    prepare_fmow(source, tmp_path / "out", max_shorter_side=10, progress=False)
    assert {size_of(path) for path in (tmp_path / "out").rglob("*.jpg")} == {(10, 15)}


def test_very_large_images_are_read_and_the_limit_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    source = tmp_path / "fmow"
    write_image(source / "train" / "x_rgb.jpg", [box("zoo", 0, 0, 5, 5)])
    assert prepare_fmow(source, tmp_path / "out", progress=False).num_written == 1
    assert Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize(
    ("source_name", "out_name", "message"),
    [
        ("missing", "out", "no such folder: .*missing; give the folder that holds fMoW's train and val"),
        ("empty", "out", r"no \*_rgb.jpg in .*empty: give the folder that holds fMoW's train and val"),
        ("fmow", "fmow/out", "lie one inside the other: write to a folder elsewhere"),
        ("fmow", "fmow", "lie one inside the other"),
        ("fmow/train", "fmow", "lie one inside the other"),
        (
            "fmow",
            "photos",
            "photos holds something else: give an empty folder, or an earlier call's to go on",
        ),
        ("fmow", "file", "file is a file: give a folder to write to"),
    ],
)
def test_folders_that_cannot_be_used(
    source: Path, tmp_path: Path, source_name: str, out_name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "photos" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=message):
        prepare_fmow(tmp_path / source_name, tmp_path / out_name, progress=False)
    assert sorted(child.name for child in source.iterdir()) == ["seq", "train", "val"]


def test_a_full_disk_is_a_clear_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", no_space)
    with pytest.raises(
        FileError, match=r"could not write .*_0.jpg': No space left on device; make room and run"
    ):
        prepare_fmow(source, tmp_path / "out", progress=False)


def test_an_interrupt_leaves_only_whole_crops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "fmow", tmp_path / "out"
    for i in range(300):
        write_image(source / "train" / f"x{i:03d}_rgb.jpg", [box("zoo", 0, 0, 30, 30)])

    def interrupted(path: Path) -> np.ndarray:
        if path.name == "x040_rgb.jpg":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)
        return decode_image(path)

    monkeypatch.setattr("stam.data.fmow.decode_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_fmow(source, out, num_workers=2, progress=False)
    monkeypatch.undo()
    crops = list(out.rglob("*.jpg"))
    assert 0 < len(crops) < 300
    assert all(decode_image(crop).shape == (30, 30, 3) for crop in crops)
    assert not list(out.rglob(".*.writing"))
    assert not json.loads((out / "prepare_report.json").read_text())["complete"]
    assert prepare_fmow(source, out, progress=False).num_written == 300 - len(crops)
