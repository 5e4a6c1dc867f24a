import hashlib
import time

import numpy as np
import pytest
from processes import run_together

from stam.data import ClutteredDigits, Scenes, open_scenes
from stam.errors import ConfigError


def digest(scenes: ClutteredDigits, indices: list[int]) -> str:
    return hashlib.sha256(scenes.load_batch(np.array(indices)).tobytes()).hexdigest()


def test_scenes_look_as_promised() -> None:
    digits = ClutteredDigits("test", num_scenes=50)
    assert isinstance(digits, Scenes)
    scene = digits.load(0)
    assert scene.shape == (56, 56, 3)
    assert scene.dtype == np.uint8
    assert (scene[..., 0] == scene[..., 2]).all()
    assert digits.classes == tuple("0123456789")
    assert len(digits) == 50
    assert len(ClutteredDigits("train")) == 60_000
    assert len(ClutteredDigits("test")) == 2_000


def test_train_and_test_share_no_digit() -> None:
    for seed in (0, 1):
        train, test = ClutteredDigits("train", seed=seed), ClutteredDigits("test", seed=0)
        assert not set(train.source_digits) & set(test.source_digits)
    assert len(set(train.source_digits)) == 1438
    assert len(set(test.source_digits)) >= 355  # of 359


def test_labels_are_balanced() -> None:
    shares = np.bincount(ClutteredDigits("train").labels) / 60_000
    assert shares.min() > 0.08
    assert shares.max() < 0.12


def test_a_scene_depends_on_seed_split_and_index_only() -> None:
    digits = ClutteredDigits("train", num_scenes=100)
    longer = ClutteredDigits("train", num_scenes=1000)
    forwards, backwards = digits.load_batch(np.arange(9)), longer.load_batch(np.arange(9)[::-1])
    assert np.array_equal(forwards, backwards[::-1])
    assert np.array_equal(forwards[4], longer.load(4))
    assert not np.array_equal(forwards, ClutteredDigits("train", seed=1).load_batch(np.arange(9)))
    assert not np.array_equal(forwards, ClutteredDigits("test").load_batch(np.arange(9)))


def test_scenes_are_the_same_in_another_process(tmp_path) -> None:
    script = (
        "import hashlib, numpy as np; from stam.data import ClutteredDigits;"
        "print(hashlib.sha256(ClutteredDigits(seed=3).load_batch(np.array([5, 1])).tobytes()).hexdigest())"
    )
    (other,) = run_together(script, [], [{}], tmp_path)
    assert other.code == 0 and other.out.strip() == digest(ClutteredDigits(seed=3), [5, 1])


def test_the_digit_lies_in_its_box_and_anywhere_in_the_scene() -> None:
    clean = ClutteredDigits("train", num_scenes=2000, num_fragments=0, noise=0)
    full = ClutteredDigits("train", num_scenes=2000)
    corners = []
    for index in range(2000):
        box = clean.digit_box(index)
        corners.append((box.top, box.left))
        if index < 100:
            assert box == full.digit_box(index)
            scene = clean.load(index)[..., 0].copy()
            inside = scene[box.top : box.top + box.height, box.left : box.left + box.width]
            assert inside.max() > 100
            inside[:] = 0
            assert scene.max() == 0
    low, high = np.min(corners, axis=0), np.max(corners, axis=0)
    assert low.tolist() == [0, 0]
    assert (high >= 56 - 16).all()
    assert 14 <= box.height <= 18


def test_fragments_touch_the_rim_of_the_digit_at_most() -> None:
    settings = {"num_scenes": 200, "noise": 0, "contrast_jitter": 0.0}
    clean = ClutteredDigits("train", num_fragments=0, **settings)
    full = ClutteredDigits("train", **settings)
    for index in range(200):
        box = clean.digit_box(index)
        inner = (slice(box.top + 1, box.top + box.height - 1), slice(box.left + 1, box.left + box.width - 1))
        assert np.array_equal(clean.load(index)[inner], full.load(index)[inner])
        assert (full.load(index) > clean.load(index)).any()


def test_other_sizes() -> None:
    digits = ClutteredDigits(
        "test", num_scenes=3, scene_size=40, digit_size=12, size_jitter=0, fragment_size=4
    )
    assert digits.load(2).shape == (40, 40, 3)
    assert digits.digit_box(2)[2:] == (12, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "val"}, "split 'val' is unknown: allowed: test, train"),
        ({"scene_size": 20}, "scene_size 20 leaves no room beside a digit of 18: use at least 30"),
        ({"fragment_size": 15}, "fragment_size must be at least 1 and within the digit, got 15"),
        ({"noise": 300}, "noise must be in 0..128"),
        ({"num_scenes": 0}, "num_scenes must be at least 1"),
        ({"seed": -1}, "a seed must be 0 or more, got -1"),
    ],
)
def test_settings_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClutteredDigits(**settings)


def test_the_word_digits_opens_them() -> None:
    splits = open_scenes("digits", seed=4)
    assert (len(splits.train), len(splits.val)) == (60_000, 2_000)
    assert np.array_equal(splits.val.load(7), ClutteredDigits("test", seed=4).load(7))
    assert splits.record.classes == splits.train.classes


def test_scenes_are_made_fast() -> None:
    digits = ClutteredDigits("train")
    start = time.process_time()
    digits.load_batch(np.arange(500))
    assert time.process_time() - start < 0.5  # a fifth of what is usual, for a busy machine
