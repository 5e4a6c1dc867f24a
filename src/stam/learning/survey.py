"""A first look at somebody's images: what the settings of a training depend on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stam.data import BatchLoader, EvaluationView, Scenes, batches
from stam.data.randomness import random_order
from stam.learning.linear import fit_linear
from stam.learning.loop import num_workers
from stam.learning.optimisation import autocast
from stam.model.agent import Agent, evaluating
from stam.scene.pixels import normalise
from stam.settings import DataConfig

_MOST_IMAGES, _MOST_ON_A_GPU = 120, 480  # a CPU takes 10 s for as many as a GPU in one
_FOLDS = 4
_LEAST_A_CLASS = 4  # fewer examples say nothing about how well the features separate the classes


@dataclass(frozen=True)
class Survey:
    """What was found.

    Attributes:
        num_images: Training images.
        num_classes: Their classes.
        upside_down: How often a linear classifier of the starting core's features tells an image from the
            same image upside down; 0.5 is chance. `None` where that was not tried.
        separable: How often such a classifier names the class. `None` where that was not tried.
    """

    num_images: int
    num_classes: int
    upside_down: float | None = None
    separable: float | None = None

    @property
    def has_no_up(self) -> bool:
        """Whether images may be turned upside down: aerial views, slides under a microscope."""
        return self.upside_down is not None and self.upside_down < 0.65


def look_at(scenes: Scenes, agent: Agent, data: DataConfig, device: torch.device) -> Survey:
    """Looks at some training images through the core that a training starts with.

    Args:
        scenes: Training images.
        agent: Its core is pretrained; it is left as it was.
        data: How images are loaded.
        device: Where to compute.
    """
    most = _MOST_ON_A_GPU if device.type == "cuda" else _MOST_IMAGES
    chosen = random_order(len(scenes), "survey")[:most]
    upright, flipped, labels = [], [], []
    home = agent.device
    agent.to(device)
    with torch.no_grad(), evaluating(agent), autocast(device, "auto"):
        for images, classes in _load(scenes, chosen, agent, data):
            upright.append(_features(agent, images.to(device)))
            flipped.append(_features(agent, images.flip(2).to(device)))
            labels.append(classes)
    agent.to(home)
    features, label = np.concatenate(upright), np.concatenate(labels)
    both = np.stack((features, np.concatenate(flipped)))  # (2, images, D)
    enough = len(chosen) >= _LEAST_A_CLASS * max(len(scenes.classes), _FOLDS)
    return Survey(
        len(scenes),
        len(scenes.classes),
        _accuracy(both, np.arange(2)[:, None].repeat(len(features), axis=1)),
        _accuracy(features[None], label[None]) if enough else None,
    )


def _load(
    scenes: Scenes, chosen: np.ndarray, agent: Agent, data: DataConfig
) -> Iterator[tuple[Tensor, np.ndarray]]:
    view = EvaluationView(agent.config.image_size, data.resize_size)
    planned = batches(chosen, 30, drop_last=False)
    for raw in BatchLoader(scenes, planned, view, num_workers(data)):
        yield normalise(raw.images, agent.config.mean, agent.config.std), raw.labels.numpy()


def _features(agent: Agent, images: Tensor) -> np.ndarray:
    """Returns what the core makes of whole images."""
    return agent.core(*agent.core.all_patches(images)).flatten(1).float().cpu().numpy()


def _accuracy(features: np.ndarray, labels: np.ndarray) -> float | None:
    """Cross-validates a linear classifier.

    Args:
        features: (views, images, D). Views of one image are all trained on or all held out.
        labels: (views, images).
    """
    num_images, right = features.shape[1], []
    for fold in range(_FOLDS):
        held_out = np.arange(num_images) % _FOLDS == fold
        known_labels = labels[:, ~held_out].ravel()
        if len(np.unique(known_labels)) < 2 or not held_out.any():
            return None
        known, new = (features[:, part].reshape(-1, features.shape[2]) for part in (~held_out, held_out))
        weight, bias = fit_linear(known, known_labels, int(labels.max()) + 1, strength=0.01)
        right.append((new @ weight.T + bias).argmax(axis=1) == labels[:, held_out].ravel())
    return float(np.concatenate(right).mean())
