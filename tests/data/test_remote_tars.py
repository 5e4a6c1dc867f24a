"""Plain tars at a URL, made by other programs: listed once, then read by ranges."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving_files import served

from stam.cli import main
from stam.data import (
    BatchLoader,
    batches,
    check_images,
    epoch_indices,
    load_record,
    open_for_evaluation,
    open_scenes,
    remote,
)
from stam.data.listing import _digest, listing_file
from stam.data.remote_tars import is_mixed
from stam.errors import DataError

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install '.[urls]'")


def png(value: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(value).integers(0, 90, (40, 36, 3), dtype=np.uint8)
    pixels[..., value % 2] += 150
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_shard(path: Path, numbers: range) -> None:
    """Writes a tar as WebDataset does: the files of a sample side by side, and more than we read."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            label = (number * 7) % 10 // 5  # no order of classes
            files = {"cls": str(label).encode(), "json": b"{}", "png": png(2 * number + label)}
            for suffix, content in files.items():
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


NAMED = "{train-{000000..000002},val-000000}.tar"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("tars")
    for shard in range(3):
        write_shard(home / f"train-{shard:06d}.tar", range(8 * shard, 8 * shard + 8))
    write_shard(home / "val-000000.tar", range(24, 30))
    return home


@pytest.fixture
def web(home):
    pytest.importorskip("aiohttp", reason="needs aiohttp: pip install '.[urls]'")
    with served(home) as server:
        yield server


@pytest.fixture
def bucket(home):
    files = fsspec.filesystem("memory")
    for file in home.glob("*.tar"):
        files.pipe(f"/tars/{file.name}", file.read_bytes())
    yield files
    files.rm("/tars", recursive=True)


def pictures(scenes) -> list[tuple[str, bytes]]:
    return [(scenes.classes[scenes.labels[i]], scenes.load(i).tobytes()) for i in range(len(scenes))]


@pytest.mark.parametrize("source", [f"memory://tars/{NAMED}", "memory://tars/train-*.tar"])
def test_tars_at_a_url_are_those_of_the_folder(home, bucket, source):
    there, local = open_scenes(source), open_scenes(home)
    assert there.record == local.record and there.record.num_val == 6
    assert pictures(there.train) == pictures(local.train) and pictures(there.val) == pictures(local.val)
    assert pictures(open_for_evaluation(source, ("1", "0"))) == pictures(local.val)


def test_over_http_each_image_is_seen_once_and_a_pass_resumes_in_the_middle(home, web):
    scenes, local = open_scenes(f"{web.url}/{NAMED}").train, open_scenes(home).train
    order = epoch_indices(len(scenes), 0, 1.0, seed=3, batch_size=4, run_length=5)
    for workers in (0, 2):
        parts = [batches(order, 4, rank, 2) for rank in range(2)]
        loaded = [list(BatchLoader(scenes, part, num_workers=workers)) for part in parts]
        assert sorted(int(i) for part in loaded for batch in part for i in batch.indices) == list(range(24))
        rest = list(BatchLoader(scenes, parts[1][2:], num_workers=workers))
        for there, here in zip(loaded[1][2:], rest, strict=True):
            assert (there.images == here.images).all() and (there.labels == here.labels).all()
        for batch in loaded[0]:
            for pixels, index in zip(batch.images, batch.indices, strict=True):
                assert (pixels.permute(1, 2, 0).numpy() == local.load(int(index))).all()


def test_a_tar_is_listed_once_and_again_where_it_changed(home, tmp_path, web):
    web.root = tmp_path
    for file in home.glob("*.tar"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    first = open_scenes(f"{web.url}/{NAMED}")
    assert {name for method, name, _ in web.requests if method == "GET"} == {
        f.name for f in home.glob("*.tar")
    }
    web.requests.clear()
    assert open_scenes(f"{web.url}/{NAMED}").record == first.record
    assert {method for method, _, _ in web.requests} == {"HEAD"} and len(web.requests) == 4
    before = first.train.fingerprint()
    write_shard(tmp_path / "train-000001.tar", range(100, 108))  # of the same size
    os.utime(tmp_path / "train-000001.tar", ns=(1, 1))
    web.requests.clear()
    again = open_scenes(f"{web.url}/{NAMED}")
    assert {name for method, name, _ in web.requests if method == "GET"} == {"train-000001.tar"}
    assert again.record != first.record and again.train.fingerprint() != before
    assert (again.train.load(8) != first.train.load(0)).any()


def test_a_tar_is_listed_in_few_requests_and_large_files_are_passed_over(tmp_path, web):
    web.root = tmp_path
    with tarfile.open(tmp_path / "big.tar", "w") as tar:
        for name, size in (("a/0.png", 100), ("film.mp4", 40_000_000), ("b/0.png", 100), ("b/1.png", 9)):
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    open_for_evaluation(f"{web.url}/big.tar", ("a", "b"))
    asked = [part.removeprefix("bytes=").split("-") for _, _, part in web.requests if part]
    assert len(asked) <= 4 and sum(int(end) - int(start) for start, end in asked) < 20_000_000


def test_a_damaged_listing_is_made_again(home, bucket, monkeypatch):
    listings = listing_file("x").parent
    source = f"memory://tars/{NAMED}"
    whole = open_scenes(source)
    sound = {path: path.read_text() for path in listings.glob("*.json")}
    path = max(sound, key=lambda path: path.stat().st_mtime_ns)
    for change in ("", "{}", "[]", sound[path].replace('"members": [[', '"members": [[[')):
        path.write_text(change)
        assert open_scenes(source).record == whole.record
    rows = json.loads(sound[path])
    for row in (
        ["x.png"],
        ["x.png", -1, 2, ""],
        ["x.png", 1.5, 2, ""],
        [3, 1, 2, ""],
        None,
        ["x", 1, 2**40, ""],
    ):
        path.write_text(json.dumps(rows | {"members": [row], "digest": _digest([row])}))
        assert open_scenes(source).record == whole.record
    moved = [[name, offset + 1, size, text] for name, offset, size, text in rows["members"]]
    path.write_text(json.dumps(rows | {"members": moved}))  # as it might be, but other bytes
    again = open_scenes(source)
    for part, known in ((again.train, whole.train), (again.val, whole.val)):
        assert [part.content(index) for index in range(len(part))] == [
            known.content(index) for index in range(len(known))
        ]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be remembered there
    assert open_scenes(source).record == whole.record


def test_training_from_tars_behind_http(web, tmp_path):
    arguments = "--no-fit --epochs 1 --batch-size 8 --num-glimpses 2 --image-size 32 --glimpse-size 16"
    smaller = "--patch-size 8 --width 16 --depth 1 --num-heads 1 --actor-width 8 --teacher-training.epochs 1"
    more = "--teacher-training.batch-size 8 --epoch-share 1 --num-workers 0 --init none"
    source, run = f"{web.url}/{NAMED}", tmp_path / "run"
    main(["train", "tiny", source, "--out", str(run), *f"{arguments} {smaller} {more}".split()])
    assert (run / "last/model.safetensors").is_file()
    assert load_record(run / "split.json") == open_scenes(source).record


def test_images_are_checked_once(home, bucket, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "stam.data.indexed.read_ranges", lambda parts: asked.extend(parts) or remote.read_ranges(parts)
    )
    for expected in (24, 0):
        asked.clear()
        check_images(open_scenes(f"memory://tars/{NAMED}").train, progress=False)
        assert len(asked) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train-{000001..000003}.tar", "cannot read .*train-000003.tar"),
        ("train-{000000,000000}.tar", "names a tar twice"),
        ("other-*.tar", "no tars at .*; where a server does not list its files"),
        ("{x.tar", "is not closed"),
        ("x.tar.gz", "x.tar.gz is compressed"),
        ("", "cannot read .*shards.json.*; tars without an index are named each, as in .*/train-{000"),
    ],
)
def test_what_cannot_be_opened_is_named(bucket, name, message):
    with pytest.raises(DataError, match=message) as raised:
        open_scenes(f"memory://tars/{name}")
    assert "\n" not in str(raised.value)


def test_a_tar_that_was_cut_short_is_named(home, bucket):
    content = (home / "train-000001.tar").read_bytes()
    bucket.pipe("/tars/train-000001.tar", content[: content.index(b"000011.png")])
    with pytest.raises(DataError, match="train-000001.tar is not a whole tar file"):
        open_scenes(f"memory://tars/{NAMED}")


def test_a_server_without_ranges_is_no_good(home):
    pytest.importorskip("aiohttp", reason="needs aiohttp: pip install '.[urls]'")
    with served(home, by_ranges=False) as server, pytest.raises(DataError, match="cannot read"):
        pictures(open_scenes(f"{server.url}/{NAMED}").train)


def test_a_server_that_is_away_for_a_moment(web, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    scenes = open_scenes(f"{web.url}/{NAMED}").train
    web.failures = 2
    scenes.load(0)
    assert len(pauses) == 2


def test_a_signed_url_is_read(home, web):
    scenes = open_scenes(f"{web.url}/train-{{000000..000002}}.tar?signature=val", val_fraction=0.25)
    assert len(scenes.train) == 18 and scenes.record.seed == 0
    assert scenes.record.train[0].startswith("train-000000.tar/")
    assert scenes.train.load(0).shape == (40, 36, 3)


def test_images_that_are_sorted_by_class_are_not_shown_in_runs():
    random = np.random.default_rng(0)
    assert is_mixed(random.integers(0, 10, 1000)) and is_mixed(random.integers(0, 1000, 50_000))
    assert is_mixed(random.integers(0, 2, 1000)) and is_mixed((random.random(5000) < 0.05).astype(int))
    assert not is_mixed(np.arange(1000) // 100) and not is_mixed(np.arange(1000) // 500)
    assert not is_mixed(np.array([0])) and not is_mixed((np.arange(5000) < 250).astype(int))


def test_a_reference_file_is_never_opened():
    """Older versions of fsspec run the templates in it."""
    for url in ("reference::file:///tmp/x.json", "simplecache::reference://x/train.tar"):
        with pytest.raises(DataError, match="may hold templates"):
            open_scenes(url)


def test_an_index_of_absurd_size_is_not_read(bucket, monkeypatch):
    monkeypatch.setattr(remote, "_MOST_BYTES", 1_000)
    bucket.pipe("/tars/shards.json", bytes(2_000))
    monkeypatch.setattr(type(bucket), "cat_file", lambda *_, **__: pytest.fail("it is read"))
    with pytest.raises(DataError, match="it has more than"):
        open_scenes("memory://tars")
