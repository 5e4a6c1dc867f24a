"""Shards with an index: packed from any source, read from any place, each image once a pass."""

import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from images import make_image_folder

from stam.cli import main
from stam.data import (
    BatchLoader,
    Relabelled,
    Subset,
    batches,
    check_images,
    epoch_indices,
    open_for_evaluation,
    open_scenes,
    prepare_shards,
    remote,
)
from stam.data.indexed import IndexedShards
from stam.data.packing import run_length
from stam.data.shards import index_tar
from stam.errors import DataError


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("shards")
    make_image_folder(home / "images", train=8)
    prepare_shards(open_scenes(home / "images"), home / "packed", shard_bytes=20_000)
    return home


def pictures(scenes) -> list[tuple[str, bytes]]:
    found = [(scenes.classes[scenes.labels[i]], scenes.load(i).tobytes()) for i in range(len(scenes))]
    return sorted(found)


def test_packed_images_are_those_of_the_folder(home):
    folder, packed = open_scenes(home / "images"), open_scenes(home / "packed")
    assert packed.train.classes == folder.train.classes
    for before, after in ((folder.train, packed.train), (folder.val, packed.val)):
        assert len(before) == len(after) and pictures(before) == pictures(after)
    assert len(list((home / "packed").glob("train-*.tar"))) > 1
    assert (packed.record.num_train, packed.record.num_val) == (len(folder.train), len(folder.val))
    assert packed.record.seed is None and open_scenes(home / "packed").record == packed.record


def test_shards_are_plain_webdataset_tars(home, tmp_path):
    """Other programs read them, and so do we without the index, in the order of the shards."""
    packed = open_scenes(home / "packed")
    for tar in (home / "packed").glob("*.tar"):
        (tmp_path / tar.name).write_bytes(tar.read_bytes())
        with tarfile.open(tar) as opened:
            names = opened.getnames()
        assert [name.split(".")[1] for name in names[1::2]] == ["cls"] * (len(names) // 2)
    plain = open_scenes(tmp_path)
    assert pictures(plain.train) == pictures(packed.train) and plain.train.classes == packed.train.classes


def test_the_order_is_mixed_and_the_same_every_time(home, tmp_path):
    prepare_shards(open_scenes(home / "images"), tmp_path / "again", shard_bytes=20_000)
    for file in (home / "packed").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    labels = open_scenes(home / "packed").train.labels
    assert (np.diff(labels) < 0).any()
    prepare_shards(open_scenes(home / "images"), tmp_path / "other", shard_bytes=20_000, seed=1)
    assert open_scenes(tmp_path / "other").record.digest != open_scenes(home / "packed").record.digest


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("in_runs", [1, 5])
def test_processes_and_workers_see_each_image_once_and_resume_in_the_middle(
    home, world_size, num_workers, in_runs
):
    scenes = open_scenes(home / "packed").train
    order = epoch_indices(len(scenes), 0, 1.0, seed=3, batch_size=4, run_length=in_runs)
    parts = [batches(order, 4, rank, world_size) for rank in range(world_size)]
    loaded = [list(BatchLoader(scenes, part, num_workers=num_workers)) for part in parts]
    seen = np.concatenate([batch.indices.numpy() for part in loaded for batch in part])
    assert sorted(seen) == list(range(len(scenes)))
    for part, whole in zip(parts, loaded, strict=True):
        rest = list(BatchLoader(scenes, part[2:], num_workers=num_workers))
        for there, here in zip(whole[2:], rest, strict=True):
            assert (there.images == here.images).all() and (there.labels == here.labels).all()


def test_longer_runs_for_more_images():
    assert [run_length(count) for count in (1, 1999, 5_000, 32_000, 1_281_167)] == [1, 1, 5, 32, 32]


class Bucket:
    """Indexed shards at a URL, and every request that is made for them."""

    def __init__(self, files, monkeypatch) -> None:
        self.requests, self.failures = [], []
        real = type(files).cat_file

        def cat_file(self_, path, start=None, end=None, **more):
            self.requests.append((path, start, end))
            if self.failures:
                raise self.failures.pop()
            return real(self_, path, start, end, **more)

        monkeypatch.setattr(type(files), "cat_file", cat_file)


@pytest.fixture
def bucket(home, monkeypatch) -> Bucket:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install '.[urls]'")
    files = fsspec.filesystem("memory")
    for file in (home / "packed").iterdir():
        files.pipe(f"/bucket/{file.name}", file.read_bytes())
    return Bucket(files, monkeypatch)


def test_a_run_is_one_request_of_its_bytes(home, bucket):
    scenes, local = open_scenes("memory://bucket").train, open_scenes(home / "packed").train
    table = np.load(home / "packed/train.npy")
    per_shard = np.bincount(table["shard"])
    assert per_shard.min() > 1 and len(per_shard) > 2
    bucket.requests.clear()
    (batch,) = BatchLoader(scenes, [np.arange(len(scenes))[::-1]])
    assert len(bucket.requests) == len(per_shard)  # side by side: a request for each shard
    num_bytes = sum(end - start for _, start, end in bucket.requests)
    assert num_bytes < table["size"].sum() + 2_560 * len(table)  # images, and the labels between them
    for pixels, (height, width), index in zip(batch.images, batch.sizes, batch.indices, strict=True):
        assert (pixels[:, :height, :width].permute(1, 2, 0).numpy() == local.load(int(index))).all()
    bucket.requests.clear()
    list(BatchLoader(scenes, [np.array([0, len(scenes) - 1])]))
    assert len(bucket.requests) == 2  # nothing between them is read
    assert len(pickle.dumps(scenes)) < 5_000  # a worker is not sent what was read ahead


def test_subsets_are_read_in_runs_too(bucket):
    scenes = open_scenes("memory://bucket").train
    kept = np.flatnonzero(np.arange(len(scenes)) != 1)
    for part in (Subset(scenes, kept), Relabelled(scenes, ("other", *scenes.classes))):
        bucket.requests.clear()
        list(BatchLoader(part, [np.arange(3)]))
        assert len(bucket.requests) <= 2 and part.run_length == scenes.run_length


def test_a_training_shows_runs(home, monkeypatch):
    monkeypatch.setattr("stam.data.packing._LEAST_RUNS", 3)
    out = home / "longer"
    prepare_shards(open_scenes(home / "images"), out, shard_bytes=20_000)
    splits = open_scenes(out)
    assert splits.train.run_length == 8
    requests = []
    monkeypatch.setattr(
        "stam.data.indexed.read_ranges", lambda parts: requests.append(parts) or remote.read_ranges(parts)
    )
    arguments = "--no-fit --epochs 1 --batch-size 8 --num-glimpses 2 --image-size 32 --glimpse-size 16"
    smaller = "--patch-size 8 --width 16 --depth 1 --num-heads 1 --actor-width 8 --teacher-training.epochs 1"
    more = "--teacher-training.batch-size 8 --epoch-share 1 --num-workers 0 --no-check"
    run = ["train", "tiny", str(out), "--init", "none", "--out", str(home / "run")]
    main([*run, *f"{arguments} {smaller} {more}".split()])
    batches_read = [parts for parts in requests if sum(part.end - part.start for part in parts) > 20_000]
    assert batches_read and all(len(parts) <= 4 for parts in batches_read)


def test_a_request_that_fails_is_made_again(bucket, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    scenes = open_scenes("memory://bucket").train
    bucket.failures[:] = [ConnectionError("lost")] * 2
    scenes.load(0)
    assert len(pauses) == 2
    bucket.failures[:] = [RuntimeError("lost\nfor ever")] * 9
    with pytest.raises(DataError, match="cannot read memory://bucket/train-000000.tar: lost for ever"):
        scenes.load(0)
    pauses.clear()
    bucket.failures[:] = [FileNotFoundError("gone")]
    with pytest.raises(DataError, match="gone"):
        scenes.load(0)
    assert not pauses


def test_a_server_that_sends_whole_files_is_no_good(home, bucket, monkeypatch):
    scenes = open_scenes("memory://bucket").train
    monkeypatch.setattr("stam.data.indexed.read_ranges", lambda parts: [bytes(99_999) for _ in parts])
    with pytest.raises(DataError, match="the server sends whole files"):
        list(BatchLoader(scenes, [np.arange(4)]))


def test_urls_are_read_by_ranges(home, bucket):
    there, local = open_scenes("memory://bucket"), open_scenes(home / "packed")
    assert there.record == local.record
    bucket.requests.clear()
    assert (there.train.load(3) == local.train.load(3)).all()
    ((_, start, end),) = bucket.requests
    assert end - start < 5_000
    assert open_for_evaluation("memory://bucket/", local.val.classes).labels.tolist()
    with pytest.raises(DataError, match="cannot read memory://nowhere/shards.json"):
        open_scenes("memory://nowhere")
    with pytest.raises(DataError, match="cannot read"):
        open_scenes("nonsense://bucket")


def test_a_worker_is_sent_the_name_of_the_table(home):
    scenes = open_scenes(home / "packed").train
    sent = pickle.dumps(scenes)
    again = pickle.loads(sent)
    assert isinstance(again._table, np.memmap) and (again.load(1) == scenes.load(1)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "it is other"),
        ({"classes": ["one"]}, "a label has no class"),
        ({"classes": None}, "damaged"),
        ({"shards": {"train": ["../train-000000.tar"], "val": []}}, "no shard may be called"),
        ({"shards": {"train": [], "val": []}}, "an image has no shard"),
        ({"shards": []}, "damaged"),
    ],
)
def test_a_damaged_index_is_said_so(home, tmp_path, change, message):
    for file in (home / "packed").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((tmp_path / "shards.json").read_text())
    (tmp_path / "shards.json").write_text(json.dumps(index | change))
    with pytest.raises(DataError, match=message):
        open_scenes(tmp_path)


def test_damaged_tables_and_shards_are_said_so(home, tmp_path):
    for file in (home / "packed").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "train-000000.tar").write_bytes(b"")
    scenes = open_scenes(tmp_path).train
    with pytest.raises(DataError, match="shorter than its index says"):
        scenes.load(0)
    table = np.load(tmp_path / "train.npy")
    table["size"] = 4_000_000_000
    np.save(tmp_path / "train.npy", table)
    with pytest.raises(DataError, match="4000000000 bytes, at most 256000000"):
        open_scenes(tmp_path).train.load(0)
    np.save(tmp_path / "train.npy", np.arange(3))
    with pytest.raises(DataError, match="holds something else"):
        open_scenes(tmp_path)
    np.save(tmp_path / "train.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="damaged"):
        open_scenes(tmp_path)
    whole = (home / "packed/train.npy").read_bytes()
    (tmp_path / "train.npy").write_bytes(whole.replace(b"'<u8'", b"'<u\x93'"))
    with pytest.raises(DataError, match="damaged .train.npy cannot be read"):
        open_scenes(tmp_path)


def test_damaged_tables_at_a_url_are_said_so(home, bucket):
    files = pytest.importorskip("fsspec").filesystem("memory")
    whole = (home / "packed/train.npy").read_bytes()
    for damaged in (whole[:200], whole.replace(b"(24,)", b"(9**9,)"), b"", whole[:9] + whole[12:]):
        files.pipe("/bucket/train.npy", damaged)
        with pytest.raises(DataError, match="damaged .train.npy"):
            open_scenes("memory://bucket")
    files.pipe("/bucket/train.npy", whole)


@pytest.mark.parametrize(("name", "size"), [("a/x.png", 5 * 2**30), ("a/x.cls", 5_000)])
def test_a_huge_member_is_refused_by_its_header(tmp_path, name, size):
    """A sparse file: nothing of its five gigabytes is on the disk, and nothing may be read."""
    info = tarfile.TarInfo(name)
    info.size = size
    path = tmp_path / "train.tar"
    with path.open("wb") as file:
        file.write(info.tobuf())
        file.truncate(512 + -(-size // 512) * 512 + 1024)
    with pytest.raises(DataError, match=f"{name} in .* has {size} bytes"):
        index_tar(path)


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Which images of indexed shards are decoded."""
    indices: list[int] = []
    load = IndexedShards.load
    monkeypatch.setattr(IndexedShards, "load", lambda self, i: indices.append(i) or load(self, i))
    return indices


def test_images_are_checked_when_they_are_packed_and_not_again(home, bucket, tmp_path, decoded):
    for place in (home / "packed", "memory://bucket"):
        scenes = open_scenes(place).train
        assert len(check_images(scenes, progress=False).readable) == len(scenes) and not decoded
    shutil.copytree(home / "packed", tmp_path / "cut")
    os.truncate(tmp_path / "cut/train-000001.tar", 5_000)
    with pytest.raises(DataError, match="train-000001.tar is shorter than its index says"):
        check_images(open_scenes(tmp_path / "cut").train, progress=False)
    (tmp_path / "cut/train-000001.tar").unlink()
    with pytest.raises(DataError, match="cannot read .*train-000001.tar: No such file"):
        check_images(open_scenes(tmp_path / "cut").train, progress=False)


def test_shards_of_an_older_index_are_checked_once(home, tmp_path, decoded):
    shutil.copytree(home / "packed", tmp_path / "old")
    index = json.loads((tmp_path / "old/shards.json").read_text())
    older = {name: value for name, value in index.items() if name not in ("checked", "run_length")}
    (tmp_path / "old/shards.json").write_text(json.dumps(older | {"format_version": "1.0"}))
    scenes = open_scenes(tmp_path / "old").train
    check_images(scenes, progress=False)
    assert len(decoded) == len(scenes) and scenes.run_length == 1
    decoded.clear()
    check_images(open_scenes(tmp_path / "old").train, progress=False)
    assert not decoded
    os.utime(tmp_path / "old/train-000001.tar", ns=(1, 1))
    check_images(open_scenes(tmp_path / "old").train, progress=False)
    assert len(decoded) == len(scenes)


def test_broken_images_are_not_packed(tmp_path, capsys):
    make_image_folder(tmp_path / "images")
    broken = tmp_path / "images/train/class1/2.png"
    broken.write_bytes(b"nonsense")
    command = ["prepare", "shards", str(tmp_path / "images"), "--out", str(tmp_path / "packed")]
    with pytest.raises(SystemExit):
        main(command)
    assert "2.png" in capsys.readouterr().err and not (tmp_path / "packed").exists()
    main([*command, "--skip-unreadable"])
    assert "17 training, 9 validation images" in (said := capsys.readouterr().out)
    assert "skipped 1 unreadable" in said
    splits = open_scenes(tmp_path / "packed")
    assert len(splits.train) == 17 and np.bincount(splits.train.labels).tolist() == [6, 5, 6]


def test_a_test_part_is_packed_too(tmp_path, capsys):
    make_image_folder(tmp_path / "images")
    shutil.copytree(tmp_path / "images/val", tmp_path / "images/test")
    main(["prepare", "shards", str(tmp_path / "images"), "--out", str(tmp_path / "packed")])
    assert "9 test images" in capsys.readouterr().out
    folder, packed = open_scenes(tmp_path / "images"), open_scenes(tmp_path / "packed")
    assert pictures(folder.test) == pictures(packed.test) and packed.record.num_test == 9
    tested = open_for_evaluation(tmp_path / "packed", packed.train.classes, record=packed.record)
    assert pictures(tested) == pictures(packed.test)


def test_the_command_packs_what_it_is_given_and_nothing_else(tmp_path, capsys):
    make_image_folder(tmp_path / "images")
    command = ["prepare", "shards", str(tmp_path / "images"), "--out", str(tmp_path / "packed")]
    main([*command, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["num_train"] > 0 and report["num_shards"] == 2 and report["num_test"] == 0
    with pytest.raises(SystemExit):
        main(command)
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prepare", "shards", "digits", "--out", str(tmp_path / "digits")])
    assert "can be packed" in capsys.readouterr().err
