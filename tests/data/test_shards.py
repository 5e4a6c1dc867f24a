import io
import os
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stam.data import (
    BatchLoader,
    Scenes,
    TarShards,
    batches,
    check_images,
    open_for_evaluation,
    open_scenes,
    open_shards,
)
from stam.errors import DataError


def png(shade: int, size: int = 6) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def class_members(prefix: str = "", num: int = 4) -> dict[str, bytes]:
    return {f"{prefix}{name}/{i}.png": png(40 * i) for name in ("ant", "bee") for i in range(num)}


def test_one_tar_with_both_parts(tmp_path: Path) -> None:
    members = class_members("set/train/") | class_members("set/val/", 2)
    splits = open_scenes(write_tar(tmp_path / "set.tar", members))
    assert isinstance(splits.train, Scenes)
    assert splits.train.classes == ("ant", "bee")
    assert splits.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (len(splits.train), len(splits.val)) == (8, 4)
    assert splits.train.load(2)[0, 0].tolist() == [80, 80, 80]
    assert splits.record.seed is None


@pytest.mark.parametrize("path", ["x-train.tar", "x-*.tar", "."])
def test_a_tar_for_each_part(tmp_path: Path, path: str) -> None:
    write_tar(tmp_path / "x-train.tar", class_members("photos/"))
    write_tar(tmp_path / "x-val.tar", class_members("other/photos/", 1))
    splits = open_scenes(tmp_path / path)
    assert (len(splits.train), len(splits.val)) == (8, 2)
    assert splits.train.classes == ("ant", "bee")


def test_numbered_shards_in_split_folders(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / "train" / f"{number}.tar", class_members())
    write_tar(tmp_path / "val" / "0.tar", class_members())
    splits = open_scenes(tmp_path)
    assert (len(splits.train), len(splits.val)) == (24, 8)


def test_a_stray_tar_beside_class_folders_is_no_shard(tmp_path: Path) -> None:
    write_tar(tmp_path / "backup.tar", class_members())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.png").write_bytes(png(number))
    assert open_scenes(tmp_path).train.classes == ("a", "b")


def test_a_tar_without_a_split_gets_a_recorded_one(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "test" / "all.tar", class_members("./", 20))
    splits = open_scenes(path)
    assert np.bincount(splits.val.labels).tolist() == [2, 2]
    assert splits.record.seed == 0
    assert splits.record.val[0].startswith("all.tar/ant/")
    again = open_scenes(path, record=splits.record)
    assert again.val.members == splits.val.members  # type: ignore[attr-defined]


def sample_members(labels: list[str]) -> dict[str, bytes]:
    members = {}
    for number, label in enumerate(labels):
        members[f"{number:06d}.png"] = png(number)
        members[f"{number:06d}.cls"] = f"{label}\n".encode()
        members[f"{number:06d}.json"] = b"{}"
    return members


def test_samples_with_class_numbers_keep_them(tmp_path: Path) -> None:
    labels = [str(label) for label in range(11)]
    write_tar(tmp_path / "train-000.tar", sample_members(labels))
    write_tar(tmp_path / "train-001.tar", sample_members(labels[::-1]))
    write_tar(tmp_path / "val-000.tar", sample_members(labels))
    splits = open_shards(tmp_path / "train-*.tar")
    assert splits.train.labels.tolist() == [*range(11), *range(11)[::-1]]
    assert splits.val.labels.tolist() == [*range(11)]
    assert splits.train.load(12)[0, 0, 0] == 1


def test_samples_with_class_names(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", sample_members(["dog", "cat", "dog", "cat"]))
    assert open_scenes(path).train.classes == ("cat", "dog")


def test_samples_may_have_dots_in_their_names(tmp_path: Path) -> None:
    members = {}
    for number in range(6):
        members[f"s0.{number:02d}.png"] = png(number)
        members[f"s0.{number:02d}.cls"] = f"\ufeff{number % 3}".encode()  # some editors begin a file so
    splits = open_scenes(write_tar(tmp_path / "x.tar", members), val_fraction=0.5)
    assert splits.train.classes == ("0", "1", "2")
    for part in (splits.train, splits.val):
        assert [part.load(index)[0, 0, 0] % 3 for index in range(3)] == part.labels.tolist()
    other = {"a.jpg.png": png(1), "a.cls": b"0", "b.rgb.png": png(2), "b.cls": b"1"}
    assert (
        len(
            open_scenes(
                write_tar(
                    tmp_path / "y.tar",
                    other | {"c.png": png(3), "c.cls": b"0", "d.png": png(4), "d.cls": b"1"},
                )
            ).train
        )
        == 2
    )


def test_tars_that_were_joined_are_refused(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "x.tar", class_members())
    one.write_bytes(2 * one.read_bytes())
    with pytest.raises(DataError, match="more follows after its end mark"):
        open_scenes(one)


def test_a_tar_beside_class_folders_of_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    write_tar(tmp_path / "train" / "train.tar", class_members())
    with pytest.raises(DataError, match="train.tar lies beside class folders such as 'a': move it"):
        open_scenes(tmp_path)


def test_braces_may_name_whole_paths(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "x.tar", class_members())
    assert len(open_scenes(f"{{{tmp_path}/one,{tmp_path}/two}}/x.tar").train.labels) == 14


def test_hidden_members_are_left_out(tmp_path: Path) -> None:
    members = class_members() | {"ant/._0.png": b"x", ".meta/0.png": b"x", "ant/.x/0.png": b"x"}
    splits = open_scenes(write_tar(tmp_path / "x.tar", members))
    assert len(splits.train) + len(splits.val) == 8


def test_a_validation_tar_alone_can_be_evaluated(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x-val.tar", class_members())
    assert len(open_for_evaluation(path, ("ant", "bee"))) == 8
    with pytest.raises(DataError, match="has a part 'val' and no 'train'"):
        open_scenes(path)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_shards_travel_to_other_processes(tmp_path: Path) -> None:
    train = open_scenes(write_tar(tmp_path / "x.tar", class_members("train/") | class_members("val/"))).train
    copy = pickle.loads(pickle.dumps(train))
    assert np.array_equal(copy.load(3), train.load(3))
    groups = batches(np.arange(8), 2)
    here, there = (list(BatchLoader(train, groups, num_workers=workers)) for workers in (0, 2))
    assert all((one.images == other.images).all() for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("keep", [100, 700, 512 * 5, 512 * 6])
def test_a_tar_that_was_cut_short(tmp_path: Path, keep: int) -> None:
    path = write_tar(tmp_path / "x.tar", class_members())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"x.tar is not a whole tar file \(.+\): copy or download it again$"):
        open_scenes(path)


def test_a_tar_with_a_damaged_header(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", class_members())
    content = bytearray(path.read_bytes())
    content[1024:1100] = b"?" * 76
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"not a whole tar file \(no end mark after 1 files\)"):
        open_scenes(path)


def test_what_is_no_tar_at_all(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"hello" * 300)
    with pytest.raises(DataError, match="x.tar is not a whole tar file"):
        open_scenes(tmp_path / "x.tar")


def test_a_compressed_tar(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"is compressed and cannot be read in place: unpack it to a plain .tar"
    ):
        open_scenes(tmp_path / "x.tar.gz")


def test_a_tar_that_shrinks_later(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", class_members("train/") | class_members("val/"))
    train = open_scenes(path).train
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(DataError, match="x.tar became shorter since it was opened"):
        train.load(5)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*x.tar: No such file"):
        train.load(5)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"readme.txt": b"x"}, "no classes in .*x.tar: expected members such as train/CLASS/x.jpg or"),
        ({"a/1.png": png(1), "a/2.png": png(2)}, r"holds one class only \('a'\)"),
        ({"1.cls": b"3", "1.png": png(1), "2.png": png(2)}, "2.png in .* has no .cls file beside it"),
        ({"1.cls": b" ", "1.png": png(1)}, "1.cls in .* is empty: expected a class number or name"),
        (
            {"0.jpg": png(1), "0.seg.png": png(2), "0.cls": b"1"},
            "0.jpg and 0.seg.png in .* share the class file 0.cls: pack one image with each",
        ),
        (
            class_members("data/") | {"data/preview.png": png(1)},
            "data/preview.png in .* lies in no class folder",
        ),
        ({b"\xe9".decode("utf-8", "surrogateescape") + "/1.png": png(1)}, "class name .* is not UTF-8"),
        (class_members("train/") | class_members("val/") | {"more/cow/1.png": png(1)}, "has images outside"),
    ],
)
def test_members_that_cannot_be_used(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_scenes(write_tar(tmp_path / "x.tar", members))


def test_an_unreadable_member_is_named(tmp_path: Path) -> None:
    members = class_members("train/") | class_members("val/")
    members["train/bee/0.png"] = png(1)[:30]
    train = open_scenes(write_tar(tmp_path / "x.tar", members)).train
    with pytest.raises(DataError, match=r"cannot read train/bee/0.png in .*x.tar: "):
        train.load(4)


def test_a_pattern_without_match(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such data: .*train-\*.tar"):
        open_scenes(tmp_path / "train-*.tar")


def test_images_in_tars_are_checked_once(tmp_path: Path, monkeypatch) -> None:
    decoded: list[int] = []
    load = TarShards.load
    monkeypatch.setattr(TarShards, "load", lambda self, i: decoded.append(i) or load(self, i))
    members = class_members("train/") | class_members("val/", 2)
    members["train/ant/1.png"] = b"nonsense"
    tar = write_tar(tmp_path / "set.tar", members)

    def check() -> list[int]:
        """Checks the tar as a new process would, and returns which images were decoded."""
        decoded.clear()
        report = check_images(open_scenes(tar).train, skip_unreadable=True, progress=False)
        assert report.readable.tolist() == [0, *range(2, 8)]
        return sorted(decoded)

    assert check() == list(range(8))
    assert check() == [1]  # what could not be read is tried again
    os.utime(tar, ns=(1, 1))
    assert check() == list(range(8))
    members["val/ant/0.png"] = png(9, size=7)
    write_tar(tar, members)
    assert check() == list(range(8))


def test_braces_name_every_tar(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 1)):
        for number in range(count):
            write_tar(tmp_path / part / f"x-{number:02d}.tar", sample_members(["ant", "bee"]))
    splits = open_scenes(str(tmp_path / "{train/x-{00..02},val/x-00}.tar"))
    assert (len(splits.train), len(splits.val)) == (6, 2)
    assert splits.record == open_scenes(tmp_path).record
    with pytest.raises(DataError, match="1 of the 4 tars .* are missing, the first is .*x-03.tar"):
        open_scenes(tmp_path / "train/x-{00..03}.tar")
    with pytest.raises(DataError, match="names a tar twice"):
        open_scenes(tmp_path / "train/x-{00,00}.tar")


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **more: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in more.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


def test_a_file_that_is_packed_under_two_names_is_read_under_both(tmp_path: Path) -> None:
    """Tar keeps a hard link as a name without content: such images were left out."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("ant", "bee"):
            add(tar, f"./{name}/0.png", png(50))
            add(tar, f"./{name}/1.png", type=tarfile.LNKTYPE, linkname=f"./{name}/0.png")
    splits = open_scenes(tmp_path / "x.tar", val_fraction=0.5)
    assert len(splits.train) == len(splits.val) == 2
    assert all(part.load(i)[0, 0, 0] == 50 for part in (splits.train, splits.val) for i in range(2))


def test_images_that_cannot_be_read_in_place_are_named_and_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "ant/0.png", png(1))
        add(tar, "ant/1.png", type=tarfile.SYMTYPE, linkname="0.png")
    with pytest.raises(DataError, match="ant/1.png in .* is a link or sparse: pack it with tar -h"):
        open_scenes(path)
    with tarfile.open(path, "w") as tar:
        add(tar, "ant/0.png", png(1))
        add(tar, "ant/0.png", png(2))
    with pytest.raises(DataError, match="ant/0.png is in .* twice"):
        open_scenes(path)
    with tarfile.open(path, "w") as tar:
        add(tar, "0.png", png(1))
        add(tar, "0.cls", b"\xe9t\xe9")
    with pytest.raises(DataError, match="0.cls in .* is not UTF-8"):
        open_scenes(path)


def test_classes_that_are_the_same_number_have_one_order(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", sample_members(["3", "03", "003", "0003", "3", "03", "003", "0003"]))
    assert open_scenes(path).train.classes == ("0003", "003", "03", "3")
