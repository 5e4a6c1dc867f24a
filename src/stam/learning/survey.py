"""A first look at somebody's images: what the settings of a training depend on."""

from collections.abc import Iterator, Sequence
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
from stam.model.belief import ensemble_log_probabilities
from stam.scene.pixels import normalise
from stam.settings import DataConfig
from stam.shapes import Float, Int

_MOST_IMAGES, _MOST_ON_A_GPU = 120, 480  # a CPU takes 10 s for as many as a GPU in one
_FOLDS = 4
_NAMED = 0.94  # how often pretrained classifiers must be right to be taken as they are
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
        rows: For each class, the row of the starting weights' own classifiers that stands for it; `None`
            where there are no such classifiers, too few images, or two classes would have the same row.
        named: How often these rows name the class; `None` likewise.
    """

    num_images: int
    num_classes: int
    upside_down: float | None = None
    separable: float | None = None
    rows: tuple[int, ...] | None = None
    named: float | None = None

    @property
    def is_named(self) -> bool:
        """Whether the starting weights, as they are, name the classes: they know them among others."""
        least = max(_NAMED, self.separable or 0.0)
        return self.named is not None and self.named >= least

    @property
    def has_no_up(self) -> bool:
        """Whether images may be turned upside down: aerial views, slides under a microscope."""
        return self.upside_down is not None and self.upside_down < 0.65


def look_at(
    scenes: Scenes,
    agent: Agent,
    data: DataConfig,
    device: torch.device,
    classifiers: Sequence[tuple[Tensor, Tensor]] = (),
) -> Survey:
    """Looks at some training images through the core that a training starts with.

    Args:
        scenes: Training images.
        agent: Its core is pretrained; it is left as it was.
        data: How images are loaded.
        device: Where to compute.
        classifiers: Weight and bias of the classifiers that the core was trained with, one for each feature,
            where there are such.
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
    known = torch.from_numpy(features), torch.from_numpy(label)
    found = find_rows(*known, len(scenes.classes), classifiers) if enough else None
    return Survey(
        len(scenes),
        len(scenes.classes),
        _accuracy(both, np.arange(2)[:, None].repeat(len(features), axis=1)),
        _accuracy(features[None], label[None]) if enough else None,
        *(found or ()),
    )


def find_rows(
    features: Float[Tensor, "images features"],
    labels: Int[Tensor, " images"],
    num_classes: int,
    classifiers: Sequence[tuple[Tensor, Tensor]],
) -> tuple[tuple[int, ...], float] | None:
    """Finds the rows of pretrained classifiers that stand for classes, and how often they name them.

    The row of a class is the one that gives its images the highest log-probability on average. How often they
    are right is measured on one half of each class's images with rows that the other half chose.

    Args:
        features: What the classifiers see, all their features side by side.
        labels: The class of each image.
        num_classes: How many classes there are.
        classifiers: Weight and bias of each.

    Returns:
        The rows and that share; nothing without classifiers, where a class has fewer than two images, or
        where two classes have the same row.
    """
    if not classifiers:
        return None
    parts = features.chunk(len(classifiers), dim=1)
    each = [part @ weight.t() + bias for part, (weight, bias) in zip(parts, classifiers, strict=True)]
    log_probabilities = ensemble_log_probabilities(*each)
    if int(labels.bincount(minlength=num_classes).min()) < 2:
        return None
    by_class = labels.argsort(stable=True)
    halves = by_class[::2], by_class[1::2]
    rows = _likeliest_rows(log_probabilities, labels)
    if len(rows.unique()) < num_classes:
        return None
    right = []
    for half, other in (halves, halves[::-1]):
        chosen = _likeliest_rows(log_probabilities[half], labels[half])
        right.append(log_probabilities[other][:, chosen].argmax(dim=1) == labels[other])
    return tuple(rows.tolist()), float(torch.cat(right).float().mean())


def _likeliest_rows(
    log_probabilities: Float[Tensor, "images rows"], labels: Int[Tensor, " images"]
) -> Int[Tensor, " classes"]:
    """Returns the row that gives the images of each class the highest log-probability on average."""
    means = [log_probabilities[labels == label].mean(dim=0) for label in labels.unique()]
    return torch.stack(means).argmax(dim=1)


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
