"""What a classifier is first asked for: which classes it confuses, its weakest ones, its worst mistakes."""

import numpy as np

from stam.data.scenes import Scenes, name_of
from stam.evaluation.early_exit import exit_counts
from stam.evaluation.intervals import binomial_tail, bootstrap_interval
from stam.evaluation.outcomes import Outcomes
from stam.evaluation.results import Answers, Chance, Confusion, Mistake, PerClass, floats, packed_right
from stam.scene.grid import Grid
from stam.shapes import Bool, Int

NUM_MISTAKES = 8


def describe_answers(
    outcomes: Outcomes,
    reported: Outcomes,
    threshold: float,
    scenes: Scenes,
    grid: Grid | None,
    num_mistakes: int = NUM_MISTAKES,
) -> Answers:
    """Says what was answered, class by class.

    Args:
        outcomes: What the looker did in all scenes.
        reported: The part of it that the threshold was not fitted on.
        threshold: Confidence above which it stops, calibrated.
        scenes: The scenes, for their names.
        grid: Where glimpses lie, if they lie on one.
        num_mistakes: The most mistakes to keep.
    """
    num_classes = len(scenes.classes)
    last = outcomes.predictions[:, :, -1, 0]  # (scenes, seeds)
    right = outcomes.correct[:, :, -1]
    return Answers(
        confusion=confusion_of(outcomes.labels, last, num_classes),
        early_exit=confusion_of(reported.labels, early_answers(reported, threshold), num_classes),
        per_class=accuracy_of_classes(outcomes.labels, right, num_classes),
        mistakes=worst_mistakes(outcomes, scenes, grid, num_mistakes),
        chance=chance_of(outcomes.labels, right),
        right=packed_right(outcomes.correct),
    )


def confusion_of(
    labels: Int[np.ndarray, " scenes"], answers: Int[np.ndarray, "scenes seeds"], num_classes: int
) -> Confusion:
    """Counts which class was taken for which."""
    pairs = labels[:, None].astype(np.int64) * num_classes + answers
    found, times = np.unique(pairs, return_counts=True)
    cells = zip((found // num_classes).tolist(), (found % num_classes).tolist(), times.tolist(), strict=True)
    totals = answers.shape[1] * np.bincount(labels, minlength=num_classes)
    return Confusion(tuple(totals.tolist()), tuple(cells))


def early_answers(outcomes: Outcomes, threshold: float) -> Int[np.ndarray, "scenes seeds"]:
    """Returns the calibrated answer of each scene and seed where looking ends at a threshold."""
    num_scenes, num_seeds, num_glimpses = outcomes.predictions.shape[:3]
    confidences = outcomes.confidences[..., 1].reshape(-1, num_glimpses)
    ends = exit_counts(confidences, threshold).reshape(num_scenes, num_seeds, 1)
    return np.take_along_axis(outcomes.predictions[..., 1], ends - 1, axis=2)[..., 0]


def accuracy_of_classes(
    labels: Int[np.ndarray, " scenes"], right: Bool[np.ndarray, "scenes seeds"], num_classes: int
) -> PerClass:
    """Returns the accuracy of every class, with its interval over images."""
    share = right.mean(axis=1)
    counts = np.bincount(labels, minlength=num_classes)
    found = np.zeros((3, num_classes))
    for label in np.flatnonzero(counts):
        own = share[labels == label]
        low, high = bootstrap_interval(own[:, None])
        found[:, label] = own.mean(), low[0], high[0]
    return PerClass(tuple(counts.tolist()), *(floats(row) for row in found))


def worst_mistakes(outcomes: Outcomes, scenes: Scenes, grid: Grid | None, most: int) -> tuple[Mistake, ...]:
    """Returns the wrong answers of highest confidence after the last glimpse, for the first seed."""
    wrong = np.flatnonzero(~outcomes.correct[:, 0, -1])
    confidences = outcomes.confidences[wrong, 0, -1, 0]
    chosen = np.argsort(-confidences, kind="stable")[:most]
    return tuple(
        Mistake(
            scene=int(scene),
            image=name_of(scenes, int(scene)),
            label=int(outcomes.labels[scene]),
            prediction=int(outcomes.predictions[scene, 0, -1, 0]),
            confidence=float(confidence),
            locations=() if grid is None else tuple(outcomes.locations[scene, 0].tolist()),
        )
        for scene, confidence in zip(wrong[chosen], confidences[chosen], strict=True)
    )


def chance_of(labels: Int[np.ndarray, " scenes"], right: Bool[np.ndarray, "scenes seeds"]) -> Chance:
    """Compares the accuracy with always answering the largest class; seeds are averaged, images count."""
    share = float(np.bincount(labels).max() / len(labels))
    return Chance(share, binomial_tail(round(float(right.mean(axis=1).sum())), len(labels), share))
