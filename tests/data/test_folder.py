import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import run_together

from stam.data import (
    ImageFolder,
    Scenes,
    SplitRecord,
    Subset,
    check_images,
    load_record,
    open_folder,
    open_for_evaluation,
    open_scenes,
    save_record,
)
from stam.data.folder import image_files
from stam.errors import DataError


def make_tree(root: Path, counts: Mapping[str, int], suffix: str = ".png") -> Path:
    for place, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            colour = (place * 20 % 256, number * 10 % 256, 7)
            Image.new("RGB", (6 + number, 5), colour).save(root / folder / f"{number:03d}{suffix}")
    return root


SPLIT_TREE = {"train/ant": 3, "train/bee": 2, "val/ant": 1, "val/bee": 2}


def test_a_folder_with_its_own_split(tmp_path: Path) -> None:
    splits = open_scenes(make_tree(tmp_path, SPLIT_TREE))
    assert isinstance(splits.train, Scenes)
    assert splits.train.classes == splits.val.classes == ("ant", "bee")
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert splits.train.labels.dtype == np.int64
    assert splits.val.labels.tolist() == [0, 1, 1]
    assert splits.train.load(2).shape == (5, 8, 3)
    assert splits.train.load(2)[0, 0].tolist() == [0, 20, 7]
    assert splits.record.seed is None
    assert splits.record.train == ()


@pytest.mark.parametrize("val_name", ["valid", "validation"])
def test_other_names_for_the_validation_part(tmp_path: Path, val_name: str) -> None:
    splits = open_scenes(
        make_tree(tmp_path, {"train/a": 2, "train/b": 2, f"{val_name}/a": 1, f"{val_name}/b": 1})
    )
    assert (len(splits.train), len(splits.val)) == (4, 2)


def names(scenes: Scenes | None) -> set[str]:
    assert isinstance(scenes, ImageFolder)
    return set(scenes.names)


def test_a_test_part_chooses_nothing(tmp_path: Path) -> None:
    with_both = {"train/a": 8, "train/b": 8, "val/a": 2, "val/b": 2, "test/a": 5, "test/b": 5}
    splits = open_scenes(make_tree(tmp_path / "both", with_both))
    assert splits.test is not None and (len(splits.train), len(splits.val), len(splits.test)) == (16, 4, 10)
    assert splits.record.num_test == 10 and splits.record.seed is None
    without_val = {name: count for name, count in with_both.items() if "val" not in name}
    root = make_tree(tmp_path / "test", without_val)
    splits = open_scenes(root, val_fraction=0.25)
    assert splits.test is not None and (len(splits.train), len(splits.val), len(splits.test)) == (12, 4, 10)
    assert not names(splits.test) & (names(splits.val) | names(splits.train))
    again = open_scenes(root, record=splits.record)
    assert again.record == splits.record and names(again.test) == names(splits.test)
    evaluated = open_for_evaluation(root, splits.train.classes, record=splits.record)
    assert names(evaluated) == names(splits.test)
    next((root / "test" / "a").iterdir()).rename(root / "test" / "a" / "other.png")
    for evaluates in (False, True):
        with pytest.raises(DataError, match="no longer holds the recorded test images"):
            if evaluates:
                open_for_evaluation(root, splits.train.classes, record=splits.record)
            open_scenes(root, record=splits.record)
    with pytest.raises(DataError, match="'test' has classes that 'train' lacks: 'cow'"):
        open_scenes(make_tree(tmp_path / "other", {**SPLIT_TREE, "test/ant": 2, "test/cow": 2}))


def test_a_test_part_can_be_split_off(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"a": 20, "b": 20})
    splits = open_scenes(root, val_fraction=0.25, test_fraction=0.2)
    assert splits.test is not None and (len(splits.train), len(splits.val), len(splits.test)) == (24, 8, 8)
    assert len(names(splits.train) | names(splits.val) | names(splits.test)) == 40
    again = open_scenes(root, record=splits.record)
    assert names(again.test) == names(splits.test) and again.record == splits.record
    evaluated = open_for_evaluation(root, splits.train.classes, record=splits.record)
    assert names(evaluated) == names(splits.test)


def test_a_run_that_validated_on_a_test_part_still_does(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"train/a": 8, "train/b": 8, "test/a": 5, "test/b": 5})
    earlier = SplitRecord(("a", "b"), 16, 10, "not looked at", None)
    splits = open_scenes(root, record=earlier)
    assert (len(splits.train), len(splits.val), splits.test) == (16, 10, None)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    splits = open_scenes(make_tree(tmp_path, {"bus": 4, "train": 4}))
    assert splits.train.classes == ("bus", "train")


def test_training_images_alone_are_split(tmp_path: Path) -> None:
    splits = open_scenes(make_tree(tmp_path, {"train/a": 20, "train/b": 20}), val_fraction=0.25)
    assert np.bincount(splits.val.labels).tolist() == [5, 5]


def test_nested_hidden_linked_and_foreign_files(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", {"a/deep/er": 2, "a": 1, "b": 3, "a/.hidden": 2, ".git/x": 1})
    (root / "a" / ".x.png").write_bytes(b"")
    (root / "a" / "notes.txt").write_text("not an image")
    make_tree(tmp_path / "elsewhere", {"more": 2})
    (root / "c").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (root / "a" / "loop").symlink_to(root, target_is_directory=True)
    splits = open_scenes(root)
    assert splits.train.classes == ("a", "b", "c")
    names = splits.record.train + splits.record.val
    assert len(names) == 3 + 3 + 2
    assert "a/deep/er/000.png" in names


def test_links_that_lead_round_are_walked_once(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a")
    assert len(image_files(tmp_path / "a")) == 6


def test_what_cannot_be_divided_has_no_test_part_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="digits have no test part: leave out --test-fraction"):
        open_scenes("digits", test_fraction=0.2)


def test_the_made_split_is_seeded_and_stratified(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"a": 40, "b": 20, "c": 2})
    splits, again, other = open_scenes(root), open_scenes(root), open_scenes(root, seed=1)
    assert np.bincount(splits.val.labels).tolist() == [4, 2, 1]
    assert not set(splits.record.train) & set(splits.record.val)
    assert len(splits.record.train) + len(splits.record.val) == 62
    assert splits.record == again.record
    assert set(other.record.val) != set(splits.record.val)


def test_a_recorded_split_survives_new_files(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", {"a": 12, "b": 12})
    first = open_scenes(root)
    save_record(first.record, tmp_path / "split.json")
    make_tree(root / "a", {"earlier": 5})
    assert open_scenes(root).record != first.record
    record = load_record(tmp_path / "split.json")
    assert record == first.record
    again = open_scenes(root, record=record)
    assert (again.train.names, again.val.names) == (first.train.names, first.val.names)  # type: ignore[attr-defined]
    assert again.record == record
    evaluated = open_for_evaluation(root, ("a", "b"), record=record)
    assert evaluated.names == first.val.names  # type: ignore[attr-defined]


def test_a_record_notices_what_is_gone(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"a": 12, "b": 12})
    record = open_scenes(root).record
    (root / record.train[0]).unlink()
    with pytest.raises(DataError, match=r"no longer holds 1 recorded images: 'a/\d+.png'; bring them back"):
        open_scenes(root, record=record)
    make_tree(root, {"new": 3})
    with pytest.raises(DataError, match="classes of .* changed since the split was recorded: 'new'"):
        open_scenes(root, record=record)


def test_a_record_notices_a_lost_validation_part(tmp_path: Path) -> None:
    root = make_tree(tmp_path, SPLIT_TREE)
    record = open_scenes(root).record
    shutil.rmtree(root / "val")
    with pytest.raises(DataError, match="had a validation part when its split was recorded: bring it back"):
        open_scenes(root, record=record)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"classes": 3, "colour": "red"}'])
def test_a_damaged_record_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(DataError, match="cannot read the split record .*split.json"):
        load_record(tmp_path / "split.json")


def test_a_record_of_the_datas_own_split_is_short(tmp_path: Path) -> None:
    record = open_scenes(make_tree(tmp_path, SPLIT_TREE)).record
    assert record == SplitRecord(("ant", "bee"), 5, 3, record.digest)


def test_evaluation_takes_the_validation_part_or_everything(tmp_path: Path) -> None:
    classes = ("ant", "bee", "cow")
    make_tree(tmp_path, SPLIT_TREE)
    assert len(open_for_evaluation(tmp_path, classes)) == 3
    scenes = open_for_evaluation(tmp_path / "train", classes)
    assert len(scenes) == 5
    assert scenes.classes == classes
    one_class = make_tree(tmp_path / "one", {"cow": 2})
    assert open_for_evaluation(one_class, classes).labels.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "no classes in .*: it has no folders; expected one folder of images for each class"),
        ({".": 3}, "no classes in .*: 3 images lie in it directly; expected one folder of images"),
        ({"a": 3}, r"holds one class only \('a'\): a classifier needs two or more"),
        ({"train/a": 3, "val/a": 3}, r"holds one class only \('a'\)"),
        ({"a": 3, "b": 0}, r"no images in class folder .*b: add some \(.bmp .* .webp\) or remove it"),
        ({**SPLIT_TREE, "val/cow": 0}, "no images in class folder .*val/cow: add some"),
        ({**SPLIT_TREE, "val/cow": 1}, "'val' has classes that 'train' lacks: 'cow'; add or remove them"),
        ({**SPLIT_TREE, "train/cow": 1}, "'train' has classes that 'val' lacks: 'cow'; add or remove them"),
        ({"Train/a": 2, "Train/b": 2, "Val/a": 2}, "Train holds folders .*: rename it to 'train'"),
        ({"training/a": 2, "training/b": 2}, "training holds folders .*: rename it to 'train'"),
        ({**SPLIT_TREE, "valid/ant": 1}, "has 'val' and 'valid': keep one validation part"),
        (
            {"train/a": 2, "train/b": 2, "val": 3},
            "val has no class folders: sort its images as those of 'train'",
        ),
        ({"val/a": 2, "val/b": 2}, "has a part 'val' and no 'train': add the training images"),
        ({"a": 3, "b": 1}, "class 'b' in .* has one image, too few to split: add another"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, counts: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_scenes(make_tree(tmp_path, counts))
    assert "\n" not in str(caught.value)


def test_no_such_folder_names_the_nearest(tmp_path: Path) -> None:
    make_tree(tmp_path / "flowers", SPLIT_TREE)
    with pytest.raises(DataError, match="no such data: .*flower; did you mean '.*flowers'"):
        open_scenes(tmp_path / "flower")
    with pytest.raises(DataError, match="no such data: .*; did you mean '.*flowers'"):
        open_scenes(tmp_path / "flowrs" / "deeper" / "still")
    with pytest.raises(
        DataError, match="the nearest folder that exists is '.*'; give a folder, tar files, or"
    ):
        open_scenes(tmp_path / "zzz")
    with pytest.raises(DataError, match="no such data: digit; did you mean 'digits'"):
        open_scenes("digit")


def test_a_file_where_a_folder_is_meant(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(
        DataError,
        match=r"photo.jpg is a file: give a folder of class folders, a .csv that lists images, a .tar,",
    ):
        open_scenes(tmp_path / "photo.jpg")


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, scandir = make_tree(tmp_path, SPLIT_TREE), os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("bee"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*train/bee: Permission denied"):
        open_folder(root)


def test_the_split_fraction_is_checked(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="val_fraction must be between 0 and 1, got 1"):
        open_scenes(make_tree(tmp_path, {"a": 3, "b": 3}), val_fraction=1.0)


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def test_checking_finds_unreadable_images(tmp_path: Path) -> None:
    root = make_tree(tmp_path, SPLIT_TREE)
    train = open_scenes(root).train
    assert check_images(train, progress=False).readable.tolist() == [0, 1, 2, 3, 4]
    spoil(root / "train/ant/001.png")
    with pytest.raises(
        DataError, match=r"^cannot read .*ant/001.png: .*: repair or remove, or pass --skip-unreadable"
    ):
        check_images(train, progress=False)
    spoil(root / "train/bee/000.png")
    with pytest.raises(DataError, match=r"ant/001.png: .* \(and 1 more of 5 images\): repair or remove, or"):
        check_images(train, progress=False)
    report = check_images(train, skip_unreadable=True, progress=False, num_workers=3)
    assert report.readable.tolist() == [0, 2, 4]
    assert len(report.unreadable) == 2
    assert "bee/000.png" in report.unreadable[1]
    assert Subset(train, report.readable).labels.tolist() == [0, 0, 1]


def test_a_class_without_a_readable_image_is_an_error(tmp_path: Path) -> None:
    root = make_tree(tmp_path, SPLIT_TREE)
    val = open_scenes(root).val
    spoil(root / "val/ant/000.png")
    with pytest.raises(DataError, match="no image of class 'ant' can be read, the first: cannot read"):
        check_images(val, skip_unreadable=True, progress=False)


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the images that are decoded."""
    names: list[str] = []
    load = ImageFolder.load
    monkeypatch.setattr(ImageFolder, "load", lambda self, i: names.append(self.names[i]) or load(self, i))
    return names


def check(root: Path) -> list[int]:
    """Checks a folder as a new process would."""
    return check_images(open_scenes(root).train, skip_unreadable=True, progress=False).readable.tolist()


def test_images_are_checked_once(tmp_path: Path, decoded: list[str]) -> None:
    root = make_tree(tmp_path / "images", SPLIT_TREE)
    spoil(root / "train/bee/000.png")
    assert check(root) == [0, 1, 2, 4] and len(decoded) == 5
    decoded.clear()
    assert check(root) == [0, 1, 2, 4] and decoded == ["train/bee/000.png"]  # it may have been out of reach
    (tmp_path / "link").symlink_to(root)
    decoded.clear()
    assert check(tmp_path / "link") == [0, 1, 2, 4] and len(decoded) == 1


def test_images_are_checked_again_where_one_changed(tmp_path: Path, decoded: list[str]) -> None:
    root = make_tree(tmp_path, SPLIT_TREE)
    check(root)
    one = root / "train/ant/001.png"
    later = one.stat().st_mtime_ns + 1_000_000_000
    changes = {
        "its time": lambda: os.utime(one, ns=(later, later)),
        "its size": lambda: one.write_bytes(one.read_bytes() + b"\0"),
        "its name": lambda: one.rename(one.with_name("009.png")),
        "one more": lambda: shutil.copy(root / "train/ant/000.png", root / "train/ant/004.png"),
    }
    for change in changes.values():
        decoded.clear()
        change()
        assert len(check(root)) == len(decoded) >= 5
    decoded.clear()
    assert len(check(root)) == 6 and not decoded


def test_what_is_remembered_can_be_damaged_or_impossible_to_write(
    tmp_path: Path, decoded: list[str], monkeypatch
) -> None:
    root = make_tree(tmp_path / "images", SPLIT_TREE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(root)
    (record,) = (tmp_path / "cache/stam/image-checks").glob("*.json")
    sound = record.read_text()
    for damaged in (
        "",
        "[" * 100_000,
        "{}",
        sound[:-9],
        sound.replace(": 5", ": 4"),
        sound.replace("[]", "[7]"),
        "\xff",
    ):
        record.write_text(damaged, "latin-1")
        decoded.clear()
        assert check(root) == [0, 1, 2, 3, 4] and len(decoded) == 5, damaged[:50]
        assert record.read_text() == sound
    (tmp_path / "file").write_text("")
    for nowhere in (tmp_path / "file", Path("/proc/nowhere")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
        decoded.clear()
        assert check(root) == [0, 1, 2, 3, 4] and len(decoded) == 5


def test_of_several_processes_one_checks(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "images", SPLIT_TREE)
    log = tmp_path / "decoded.txt"
    code = (
        "import sys, time; from stam.data import ImageFolder, check_images, open_scenes\n"
        "load = ImageFolder.load\n"
        "def slow(self, i):\n"
        f"    time.sleep(0.05); open({str(log)!r}, 'a').write('x'); return load(self, i)\n"
        "ImageFolder.load = slow\n"
        f"print(len(check_images(open_scenes({str(root)!r}).train, progress=False).readable))"
    )
    ended = run_together(code, [], [{}] * 3, tmp_path)
    assert [process.out.strip() for process in ended] == ["5"] * 3
    assert log.read_text() == "x" * 5


def test_file_names_of_any_bytes(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "images", SPLIT_TREE)
    odd = os.fsdecode(b"caf\xe9 \xff.png")
    (root / "train/ant/000.png").rename(root / "train/ant" / odd)
    train = open_scenes(root).train
    assert f"train/ant/{odd}" in train.names and len(check_images(train, progress=False).readable) == 5
    flat = make_tree(tmp_path / "flat", {"a": 3, "b": 3})
    (flat / "a/000.png").rename(flat / "a" / odd)
    record = open_scenes(flat).record
    save_record(record, tmp_path / "split.json")
    again = load_record(tmp_path / "split.json")
    assert again == record and f"a/{odd}" in again.train + again.val
    assert open_scenes(flat, record=again).record == record


def test_a_class_whose_name_is_not_text_is_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"a": 3, "b": 3})
    (root / "b").rename(root / os.fsdecode(b"caf\xe9"))
    with pytest.raises(DataError, match=r"class folder b'.*caf\\xe9' is not UTF-8: rename it"):
        open_scenes(root)
