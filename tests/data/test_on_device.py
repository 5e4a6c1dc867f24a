"""Images kept on a device give the batches that a loader gives."""

import numpy as np
import torch
from images import make_image_folder

from stam.data import BatchLoader, PaintedScenes, TrainingView, open_scenes
from stam.data.on_device import keep_on_device, kept_on
from stam.data.scenes import run_length

CPU = torch.device("cpu")


def test_batches_are_those_of_a_loader(tmp_path):
    scenes = open_scenes(make_image_folder(tmp_path / "images")).train
    kept = kept_on(scenes, CPU, 24, num_workers=0, room=1e9, progress=False)
    assert isinstance(kept, PaintedScenes) and len(kept) == len(scenes) and kept.classes == scenes.classes
    chosen = np.array([3, 0, 5])
    painted, (loaded,) = kept.paint(chosen, epoch=7), BatchLoader(scenes, [chosen], TrainingView(24))
    for name in ("images", "sizes", "labels", "indices"):
        assert torch.equal(getattr(painted, name), getattr(loaded, name)), name
    assert np.array_equal(kept.load(2), scenes.load(2))
    assert run_length(kept) == run_length(scenes)


def test_what_is_too_large_is_not_kept(tmp_path):
    scenes = open_scenes(make_image_folder(tmp_path / "images")).train
    assert kept_on(scenes, CPU, None, num_workers=0, room=1000, progress=False) is None
    assert keep_on_device(scenes, CPU, None, num_workers=0) is scenes  # there is no GPU to keep them on
