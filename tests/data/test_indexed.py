"""Shards with an index: packed from any source, read from any place, each image once a pass."""

import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from images import make_image_folder

from stam.cli import main
from stam.data import (
    BatchLoader,
    batches,
    epoch_indices,
    open_for_evaluation,
    open_scenes,
    prepare_shards,
)
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
def test_processes_and_workers_see_each_image_once_and_resume_in_the_middle(home, world_size, num_workers):
    scenes = open_scenes(home / "packed").train
    order = epoch_indices(len(scenes), 0, 1.0, seed=3, batch_size=4)
    parts = [batches(order, 4, rank, world_size) for rank in range(world_size)]
    loaded = [list(BatchLoader(scenes, part, num_workers=num_workers)) for part in parts]
    seen = np.concatenate([batch.indices.numpy() for part in loaded for batch in part])
    assert sorted(seen) == list(range(len(scenes)))
    for part, whole in zip(parts, loaded, strict=True):
        rest = list(BatchLoader(scenes, part[2:], num_workers=num_workers))
        for there, here in zip(whole[2:], rest, strict=True):
            assert (there.images == here.images).all() and (there.labels == here.labels).all()


def test_urls_are_read_by_ranges(home):
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install '.[urls]'")
    files = fsspec.filesystem("memory")
    for file in (home / "packed").iterdir():
        files.pipe(f"/bucket/{file.name}", file.read_bytes())
    reads = []
    real = type(files).cat_file
    try:
        type(files).cat_file = lambda self, path, start=None, end=None, **more: (
            reads.append((path, start, end)) or real(self, path, start, end, **more)
        )
        remote, local = open_scenes("memory://bucket"), open_scenes(home / "packed")
        assert remote.record == local.record
        reads.clear()
        assert (remote.train.load(3) == local.train.load(3)).all()
    finally:
        type(files).cat_file = real
    assert len(reads) == 1 and reads[0][2] - reads[0][1] < 5_000
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


def test_the_command_packs_what_it_is_given_and_nothing_else(tmp_path, capsys):
    make_image_folder(tmp_path / "images")
    command = ["prepare", "shards", str(tmp_path / "images"), "--out", str(tmp_path / "packed")]
    main([*command, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["num_train"] > 0 and report["num_shards"] == 2
    with pytest.raises(SystemExit):
        main(command)
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prepare", "shards", "digits", "--out", str(tmp_path / "digits")])
    assert "can be packed" in capsys.readouterr().err
