"""Small systems of the zoo, and scenes a small network can learn in seconds."""

from pathlib import Path

import numpy as np
import torch

from stam.data import ClutteredScenes
from stam.zoo import System, build, require_system

SMALL = {  # settings of each system on grey scenes of 24 pixels
    "ram": {"glimpse_size": 4, "num_scales": 2, "num_glimpses": 3, "glimpse_width": 32, "hidden_width": 48},
    "dram": {
        "glimpse_size": 8,
        "num_scales": 1,
        "context_size": 12,
        "num_glimpses": 2,
        "hidden_width": 32,
        "backbone": "conv",
    },
    "gfnet": {"glimpse_size": 8, "num_glimpses": 3, "hidden_width": 32, "backbone": "conv"},
    "saccader": {
        "glimpse_size": 8,
        "num_places": 3,
        "num_glimpses": 2,
        "attention_width": 16,
        "backbone": "conv",
    },
    "tnet": {"glimpse_size": 8, "num_cells": 3, "num_glimpses": 2, "backbone": "conv"},
    "stn": {"sampled_size": 8, "saliency_size": 12, "num_points": 9, "kernel_width": 5, "backbone": "conv"},
    "patchdrop": {"low_size": 6, "num_patches": 3, "backbone": "conv"},
}


def small(name: str, **settings) -> System:
    torch.manual_seed(0)
    kind = require_system(name)
    common = dict(
        num_classes=3, labels=("x", "o", "s"), image_size=24, grey=True, mean=(0.0,) * 3, std=(1.0,) * 3
    )
    return build(name, kind.settings(**(common | SMALL[name] | settings))).eval()


def glyphs(count: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Three glyphs of 8 pixels that differ in detail only: a cross, a ring, a stripe."""
    shapes = np.zeros((3, 8, 8), np.uint8)
    index = np.arange(8)
    shapes[0, index, index] = shapes[0, index, 7 - index] = 255
    shapes[1, [0, 7], :] = shapes[1, :, [0, 7]] = 255
    shapes[2, ::2, :] = 160
    labels = np.arange(count) % 3
    return shapes[labels], labels


def glyph_scenes(count: int = 48) -> ClutteredScenes:
    scenes = ClutteredScenes(*glyphs(count), seed=count, scene_size=24, num_pieces=1, piece_size=4)
    scenes.classes = ("x", "o", "s")
    return scenes


def glyph_file(folder: Path, side: int = 28) -> Path:
    """Digits in a file as MNIST comes, of the size the default scenes have room for."""
    images, labels = glyphs(24)
    large = np.kron(images, np.ones((1, 3, 3), np.uint8))[:, :side, :side]
    path = folder / "glyphs.npz"
    np.savez(path, train_images=large, train_labels=labels, test_images=large[:9], test_labels=labels[:9])
    return path
