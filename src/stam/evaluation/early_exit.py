"""Early exit: stop looking once sure. Which threshold, at what accuracy, and the time it saves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stam.errors import require
from stam.evaluation.results import ExitTiming, Operation, Sweep, ThresholdFit, floats
from stam.fast.cuda_graph import GraphedLook
from stam.fast.exit_pool import ExitPool, can_pool
from stam.learning.timing import device_name, in_turn, seconds
from stam.model.agent import Looker
from stam.model.belief import Belief, is_confident
from stam.model.episode import EpisodeAgent, Trace, rollout, sense_images
from stam.model.policy import Policy
from stam.shapes import Bool, Float, Int

# Even steps, and finer ones where a sure agent's confidences crowd.
THRESHOLDS = (*(step / 100 for step in range(100)), 0.995, 0.998, 0.999, 0.9995, 0.9999, 1.0)


@dataclass(frozen=True)
class Exits:
    """Where looking ended for each scene.

    Attributes:
        num_glimpses: Glimpses sensed before the agent was sure, or the most allowed.
        probabilities: What it believed then.
        locations: Where it looked; -1 after it stopped.
    """

    num_glimpses: Int[Tensor, " batch"]
    probabilities: Float[Tensor, "batch classes"]
    locations: Int[Tensor, "batch glimpses"]

    @property
    def predictions(self) -> Int[Tensor, " batch"]:
        """The most probable class of each scene."""
        return self.probabilities.argmax(dim=1)


@torch.no_grad()
def look_until_sure(
    agent: EpisodeAgent,
    images: Float[Tensor, "batch channels height width"],
    threshold: float,
    first_location: Int[Tensor, " batch"],
    policy: Policy,
    num_glimpses: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Exits:
    """Looks at each scene until the agent is sure of it; whoever is sure leaves the batch.

    What is left of the batch is all that is sensed, encoded and decided on, so a scene that ends early costs
    nothing from then on. The agent must be in evaluation mode.

    Args:
        agent: Remembers glimpses and says what they mean.
        images: Normalised scenes, on the agent's device.
        threshold: Looking ends at the first belief with max p above it (the paper's gamma).
        first_location: Where each scene's first glimpse is sensed.
        policy: Picks every later location.
        num_glimpses: The most glimpses to sense in a scene; by default all of them.
        temperature: Divides the logits.
        generator: Source of randomness for the policy.
    """
    most = agent.grid.num_locations if num_glimpses is None else num_glimpses
    counts = torch.zeros(len(images), dtype=torch.long, device=images.device)
    visited = torch.full((len(images), most), -1, dtype=torch.long, device=images.device)
    answers: list[Tensor] = []

    def is_sure(belief: Belief) -> Tensor:
        answers.append(belief.probabilities(temperature))
        return is_confident(answers[-1], threshold)

    found = None
    first = first_location.to(images.device)
    sense = sense_images(images, agent.grid)
    for step in rollout(agent, sense, most, first, policy, generator, leave_when=is_sure):
        counts[step.samples] = step.num_glimpses
        visited[step.samples, step.num_glimpses - 1] = step.location
        found = answers[-1].new_zeros(len(images), answers[-1].shape[1]) if found is None else found
        found[step.samples] = answers[-1]
    assert found is not None
    return Exits(counts, found, visited)


class ExitCurve:
    """Accuracy and mean glimpses of stopping early, as exact functions of the threshold.

    A scene goes on past glimpse n when the largest confidence so far is at most the threshold. So each
    glimpse but the last is an event at that confidence: a threshold above it costs one glimpse more and
    trades the answer after n for the one after n + 1. Sorted once, cumulative sums answer any threshold.
    """

    def __init__(
        self, confidences: Float[np.ndarray, "looks glimpses"], correct: Bool[np.ndarray, "looks glimpses"]
    ) -> None:
        self.num_looks = len(confidences)
        highest = np.maximum.accumulate(confidences[:, :-1], axis=1).ravel()
        order = np.argsort(highest, kind="stable")
        self.events = highest[order].astype(np.float64)
        right = correct.astype(np.int64)
        self._first_right = int(right[:, 0].sum())
        self._gains = np.concatenate(([0], np.cumsum(np.diff(right, axis=1).ravel()[order])))

    def at(self, thresholds: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the accuracy and the mean number of glimpses at each threshold."""
        passed = np.searchsorted(self.events, np.asarray(thresholds, dtype=np.float64), side="right")
        accuracy = (self._first_right + self._gains[passed]) / self.num_looks
        return accuracy, 1 + passed / self.num_looks

    def choices(self) -> np.ndarray:
        """Returns thresholds that cover every different behaviour: 0, 1, and between any two events."""
        events = np.unique(self.events)
        return np.concatenate(([0.0], (events[:-1] + events[1:]) / 2, events[-1:], [1.0]))


def sweep(
    confidences: Float[np.ndarray, "scenes seeds glimpses"],
    correct: Bool[np.ndarray, "scenes seeds glimpses"],
    thresholds: tuple[float, ...] = THRESHOLDS,
) -> Sweep:
    """Returns accuracy and mean glimpses at each threshold: mean and spread over the seeds."""
    seeds = range(confidences.shape[1])
    curves = [ExitCurve(confidences[:, seed], correct[:, seed]).at(thresholds) for seed in seeds]
    accuracy, glimpses = (np.stack(part) for part in zip(*curves, strict=True))  # (seeds, thresholds)
    freedom = 1 if len(curves) > 1 else 0
    return Sweep(
        thresholds=thresholds,
        mean_glimpses=floats(glimpses.mean(axis=0)),
        glimpses_std=floats(glimpses.std(axis=0, ddof=freedom)),
        accuracy=floats(accuracy.mean(axis=0)),
        accuracy_std=floats(accuracy.std(axis=0, ddof=freedom)),
    )


def fit_threshold(
    fit_confidences: Float[np.ndarray, "fit_scenes seeds glimpses"],
    fit_correct: Bool[np.ndarray, "fit_scenes seeds glimpses"],
    confidences: Float[np.ndarray, "scenes seeds glimpses"],
    correct: Bool[np.ndarray, "scenes seeds glimpses"],
    target_accuracy: float | None = None,
    budget: float | None = None,
) -> ThresholdFit:
    """Fits a threshold on some scenes and says what it does on others.

    Args:
        fit_confidences: Confidences of the scenes to fit on.
        fit_correct: Which of those answers are right.
        confidences: Confidences of the scenes to report on.
        correct: Which of those answers are right.
        target_accuracy: Stop as early as this accuracy allows. By default one point below the accuracy of
            taking every glimpse.
        budget: Stop as late as this mean number of glimpses allows; instead of an accuracy.
    """
    require(target_accuracy is None or budget is None, "give a target accuracy or a budget, not both")
    glimpses = confidences.shape[2]
    fitted = ExitCurve(_looks(fit_confidences), _looks(fit_correct))
    reported = ExitCurve(_looks(confidences), _looks(correct))
    choices = fitted.choices()
    accuracies, counts = fitted.at(choices)
    if budget is not None:
        require(1 <= budget <= glimpses, f"budget must be 1 to {glimpses} glimpses, got {budget}")
        goal, value, reached = "budget", budget, counts <= budget
        chosen = int(np.flatnonzero(reached)[-1]) if reached.any() else 0
    else:
        value = max(0.0, float(accuracies[-1]) - 0.01) if target_accuracy is None else target_accuracy
        require(
            target_accuracy is None or 0 < value <= 1,
            f"target accuracy must be above 0 and at most 1, got {value}",
        )
        goal, reached = "accuracy", accuracies >= value
        chosen = int(np.flatnonzero(reached)[0]) if reached.any() else int(accuracies.argmax())
    threshold = float(choices[chosen])
    exits = exit_counts(_looks(confidences), threshold)
    return ThresholdFit(
        goal=goal,
        goal_value=value,
        threshold=threshold,
        reached=bool(reached.any()),
        fitted=_operation(fitted, threshold, len(fit_confidences)),
        reported=_operation(reported, threshold, len(confidences)),
        exits=tuple(np.bincount(exits, minlength=glimpses + 1)[1:].tolist()),
    )


def exit_counts(
    confidences: Float[np.ndarray, "looks glimpses"], threshold: float
) -> Int[np.ndarray, " looks"]:
    """Returns after how many glimpses each look ends."""
    highest = np.maximum.accumulate(confidences[:, :-1], axis=1)
    return 1 + (highest <= threshold).sum(axis=1)


def _looks(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1])


def _operation(curve: ExitCurve, threshold: float, num_scenes: int) -> Operation:
    accuracy, glimpses = curve.at([threshold])
    return Operation(num_scenes, float(accuracy[0]), float(glimpses[0]))


@dataclass(frozen=True)
class TimedBatch:
    """Scenes to time early exit on."""

    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, " batch"]
    first_location: Int[Tensor, " batch"]
    policy: Policy


def time_early_exit(
    agent: EpisodeAgent,
    batches: Iterable[TimedBatch],
    threshold: float,
    num_glimpses: int,
    temperature: float = 1.0,
) -> ExitTiming:
    """Measures the same scenes with every glimpse and with early exit.

    On a GPU both are CUDA graphs, and early exit fills its batches from all scenes (`stam.fast.exit_pool`).
    Elsewhere both go batch by batch in turn.
    """
    parts = list(batches)
    first = parts[0]
    if first.images.is_cuda and can_pool(agent, first.policy, first.images):
        taken, glimpses, right = _time_pool(cast(Looker, agent), parts, threshold, num_glimpses, temperature)
    else:
        taken, glimpses, right = _time_batches(agent, parts, threshold, num_glimpses, temperature)
    num_scenes = sum(len(part.labels) for part in parts)
    return ExitTiming(
        num_scenes=num_scenes,
        batch_size=max(len(part.labels) for part in parts),
        device=device_name(first.images.device),
        threshold=threshold,
        all_seconds=taken[0],
        early_seconds=taken[1],
        all_glimpses=glimpses[0] / num_scenes,
        early_glimpses=glimpses[1] / num_scenes,
        all_accuracy=right[0] / num_scenes,
        early_accuracy=right[1] / num_scenes,
    )


_Measured = tuple[list[float], list[int], list[int]]  # seconds, glimpses and right answers, of all and early


def _time_batches(
    agent: EpisodeAgent, parts: list[TimedBatch], threshold: float, num_glimpses: int, temperature: float
) -> _Measured:
    taken, glimpses, right = [0.0, 0.0], [0, 0], [0, 0]
    # warm up, so that neither way pays for the first use of a kernel
    _timed_look(agent, parts[0], math.inf, num_glimpses, temperature)
    for part in parts:
        for way, limit in enumerate((math.inf, threshold)):
            elapsed, exits = _timed_look(agent, part, limit, num_glimpses, temperature)
            taken[way] += elapsed
            glimpses[way] += int(exits.num_glimpses.sum())
            right[way] += int((exits.predictions == part.labels).sum())
    return taken, glimpses, right


def _time_pool(
    agent: Looker, parts: list[TimedBatch], threshold: float, num_glimpses: int, temperature: float
) -> _Measured:
    policy, device = parts[0].policy, agent.device
    images, labels, first = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels", "first_location")
    )
    size = max(len(part.labels) for part in parts)
    look = GraphedLook(agent, num_glimpses, lambda: policy)
    pool = ExitPool(agent, policy, num_glimpses, len(images), size, temperature)

    def look_at_all() -> list[Trace]:
        return [look(part.images, part.first_location) for part in parts]

    for _ in range(2):  # graphs are captured when something is done for the second time
        traces, exits = look_at_all(), pool(images, first, threshold)
    runs = {"all": look_at_all, "early": lambda: pool(images, first, threshold)}
    times = in_turn(runs, device, rounds=3)
    answers = torch.cat([trace.probabilities[:, -1].argmax(dim=1) for trace in traces])
    early = exits.probabilities.argmax(dim=1)
    return (
        [min(times[way]) for way in ("all", "early")],
        [num_glimpses * len(images), int(exits.num_glimpses.sum())],
        [int((answers == labels).sum()), int((early == labels).sum())],
    )


def _timed_look(
    agent: EpisodeAgent, batch: TimedBatch, threshold: float, num_glimpses: int, temperature: float
) -> tuple[float, Exits]:
    found: list[Exits] = []

    def look() -> None:
        first, policy = batch.first_location, batch.policy
        found.append(
            look_until_sure(agent, batch.images, threshold, first, policy, num_glimpses, temperature)
        )

    return seconds(look, batch.images.device), found[0]
