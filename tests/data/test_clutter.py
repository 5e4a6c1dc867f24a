"""Cluttered translated digits from an .npz file: what a scene shows, and whose numbers it depends on."""

import numpy as np
import pytest
import torch

from stam.data import ClutteredScenes, PaintedScenes, Scenes, open_for_evaluation, open_scenes
from stam.data.clutter import hashed
from stam.errors import DataError

NAMES = ("train_images", "train_labels", "test_images", "test_labels")


def digits(count: int = 20, side: int = 28, seed: int = 0) -> np.ndarray:
    """Made-up digits: each a filled square of its own grey level, so that a pixel names its digit."""
    images = np.zeros((count, side, side), np.uint8)
    images[:] = np.arange(1, count + 1, dtype=np.uint8)[:, None, None] * 12
    return images


def scenes(**settings) -> ClutteredScenes:
    return ClutteredScenes(digits(), np.arange(20) % 10, **settings)


@pytest.fixture
def file(tmp_path):
    labels = np.arange(20) % 10
    np.savez(tmp_path / "d.npz", **dict(zip(NAMES, (digits(), labels, digits(10), labels[:10]), strict=True)))
    return tmp_path / "d.npz"


def test_a_scene_shows_its_digit_and_nothing_else_without_pieces():
    made = scenes(num_pieces=0)
    assert isinstance(made, Scenes) and isinstance(made, PaintedScenes)
    for index in (0, 7, 19):
        image = made.load(index)
        assert image.shape == (60, 60, 3) and (image[..., 0] == image[..., 2]).all()
        rows, columns = np.nonzero(image[..., 0])
        assert (np.ptp(rows), np.ptp(columns), len(rows)) == (27, 27, 28 * 28)
        assert set(image[rows, columns, 0]) == {12 * (index + 1)}


def test_pieces_are_of_other_digits_and_of_their_size():
    plain, cluttered = scenes(num_pieces=0), scenes(num_pieces=1)
    for index in range(20):
        added = cluttered.load(index)[..., 0].astype(int) - plain.load(index)[..., 0]
        rows, columns = np.nonzero(added)
        assert len(rows) and np.ptp(rows) <= 7 and np.ptp(columns) <= 7
        clear = added[(plain.load(index)[..., 0] == 0) & (added > 0)]
        assert 12 * (index + 1) not in set(clear.tolist()) and len(set(clear.tolist())) <= 1


def test_places_cover_the_scene_evenly():
    made = ClutteredScenes(np.full((4000, 28, 28), 200, np.uint8), np.zeros(4000, int), num_pieces=0)
    batch = made.paint(np.arange(4000)).images[:, 0] > 0
    tops, lefts = batch.any(2).int().argmax(1), batch.any(1).int().argmax(1)
    for places in (tops, lefts):
        counts = torch.bincount(places, minlength=33)
        assert len(counts) == 33 and counts.min() > 70 and counts.max() < 180
    assert abs(float(torch.corrcoef(torch.stack((tops, lefts)).float())[0, 1])) < 0.05


def test_a_scene_belongs_to_its_seed_epoch_and_index_and_to_no_batch():
    made = scenes(seed=3)
    whole = made.paint(np.arange(20)).images
    assert made.paint(np.array([4, 17])).images.equal(whole[[4, 17]])
    assert np.array_equal(made.load(4), whole[4].permute(1, 2, 0).numpy())
    assert not made.paint(np.arange(20), epoch=1).images.equal(whole)
    assert not scenes(seed=4).paint(np.arange(20)).images.equal(whole)
    assert made.to(torch.device("cpu")).paint(np.arange(20)).images.equal(whole)


def test_hashed_words_are_known():
    """The scenes of a published figure must stay what they were."""
    known = [[6709889912913257682, 2472934114368744514], [4104881364387972861, 5130671365305133948]]
    assert hashed(7, torch.tensor([0, 1]), 2).tolist() == known
    words = hashed(0, torch.arange(2000), 8)
    assert (words >= 0).all() and len(words.unique()) == 16000
    assert (words % 10).double().mean() == pytest.approx(4.5, abs=0.1)


def test_an_npz_file_is_data_like_any_other(file):
    splits = open_scenes(file, seed=2)
    assert (len(splits.train), len(splits.val)) == (20, 10) and splits.train.classes == tuple("0123456789")
    assert splits.record == open_scenes(file, seed=2).record
    held_out = open_for_evaluation(file, splits.train.classes, seed=2)
    assert np.array_equal(held_out.load(3), splits.val.load(3))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_images": digits()}, "lacks train_labels, test_images, test_labels"),
        (dict.fromkeys(NAMES, np.zeros(3)), "must be bytes"),
        (
            dict(zip(NAMES, (digits(), np.arange(20), digits(2), np.arange(2)), strict=True)),
            "of other classes",
        ),
    ],
)
def test_a_wrong_file_is_named(tmp_path, arrays, message):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=message):
        open_scenes(tmp_path / "d.npz")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "d.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DataError, match="cannot be read as digits"):
        open_scenes(tmp_path / "d.npz")
