"""Images that two sources share are found by their bytes."""

import shutil

import numpy as np
from images import make_image_folder
from zooing import glyph_scenes

from stam.data import Subset, open_scenes, prepare_shards
from stam.data.overlap import num_shared
from stam.data.scenes import Relabelled


def test_the_same_images_are_found_under_any_name(tmp_path):
    """The folder itself, a link to a part of it, renamed copies, a tar, packed shards, some of them."""
    data = make_image_folder(tmp_path / "images", classes=2, train=4, val=2, size=12)
    trained = open_scenes(data)
    assert num_shared(trained.train, trained.train) == 8
    assert num_shared(trained.val, trained.train) == 0
    (tmp_path / "link").symlink_to(data / "train")
    assert num_shared(open_scenes(tmp_path / "link").train, trained.train, most_reads=0) == 6
    for index, image in enumerate((data / "train/class0").iterdir()):
        target = tmp_path / "copies" / image.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, target / f"other{index}.png")
    shutil.copytree(data / "val/class1", tmp_path / "copies/class1")
    copies = open_scenes(tmp_path / "copies", val_fraction=0.01)
    assert num_shared(copies.train, trained.train) == 3  # one of each class validates
    assert num_shared(Relabelled(copies.train, ("class0", "class1")), trained.train) == 3
    some = Subset(copies.train, np.array([0, 3]))
    assert num_shared(some, trained.train) == 1 == num_shared(trained.train, some)
    shutil.make_archive(str(tmp_path / "packed"), "tar", data / "train")
    tar = open_scenes(tmp_path / "packed.tar", val_fraction=0.01).train
    assert num_shared(tar, trained.train) == 6 == num_shared(trained.train, tar)
    prepare_shards(trained, tmp_path / "shards")
    assert num_shared(open_scenes(tmp_path / "shards").train, trained.train) == 8


def test_no_more_is_read_than_allowed_and_what_is_gone_is_passed_over(tmp_path):
    data = make_image_folder(tmp_path / "images", classes=2, train=4, val=2, size=12)
    shutil.copytree(data, tmp_path / "copy")
    trained, copy = open_scenes(data).train, open_scenes(tmp_path / "copy").train
    assert num_shared(copy, trained, most_reads=0) == 0
    assert num_shared(copy, trained) == 8
    (tmp_path / "copy/train/class0/0.png").unlink()
    assert num_shared(copy, trained) == 7
    assert num_shared(glyph_scenes(), trained) == 0
