"""What an agent did in every scene, for every seed and after each glimpse: what every figure is made of."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stam.errors import StamError
from stam.evaluation.intervals import bootstrap_interval
from stam.evaluation.results import Accuracy, Curve, Locations, Readout
from stam.learning import distributed
from stam.model.belief import ensemble_log_probabilities
from stam.model.looker import LookTrace
from stam.scene.grid import Grid
from stam.shapes import Bool, Float, Int

TOP = 5  # the k of top-k accuracy


@dataclass(frozen=True)
class Outcomes:
    """What an agent did; the first axis of every array is the scene.

    Attributes:
        labels: The true classes.
        locations: Where each glimpse was sensed; -1 for a looker without a grid.
        pixels: Pixels used to classify, so far.
        ranks: How many classes were rated above the true one, by the ensemble and by each of its classifiers.
        predictions: The answer, at temperature 1 and calibrated.
        confidences: Its probability.
        losses: Negative log-probability of the true class, at temperature 1 and calibrated.
        calibrated_correct: Whether the calibrated answer is right.
    """

    labels: Int[np.ndarray, " scenes"]
    locations: Int[np.ndarray, "scenes seeds glimpses"]
    pixels: Int[np.ndarray, "scenes seeds glimpses"]
    ranks: Int[np.ndarray, "scenes seeds glimpses readouts"]
    predictions: Int[np.ndarray, "scenes seeds glimpses 2"]
    confidences: Float[np.ndarray, "scenes seeds glimpses 2"]
    losses: Float[np.ndarray, "scenes seeds glimpses 2"]
    calibrated_correct: Bool[np.ndarray, "scenes seeds glimpses"]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def correct(self) -> Bool[np.ndarray, "scenes seeds glimpses"]:
        """Whether the ensemble's answer at temperature 1 is right."""
        return self.ranks[..., 0] == 0

    def select(self, scenes: Int[np.ndarray, " chosen"]) -> "Outcomes":
        """Returns the outcomes of some scenes."""
        return Outcomes(*(getattr(self, field.name)[scenes] for field in fields(self)))

    def accuracy(self) -> Accuracy:
        """Returns the accuracy after each glimpse, for each seed, of the ensemble and of its classifiers."""
        each = [
            self.ranks[..., position] < top for position in range(self.ranks.shape[-1]) for top in (1, TOP)
        ]
        of_images = np.concatenate([right.mean(axis=1) for right in each], axis=1)  # (scenes, curves * n)
        ends = (np.split(end, len(each)) for end in bootstrap_interval(of_images))
        curves = [
            Curve.of(right.mean(axis=0, dtype=np.float64), low, high)
            for right, low, high in zip(each, *ends, strict=True)
        ]
        readouts = [Readout(top1, top5) for top1, top5 in zip(curves[::2], curves[1::2], strict=True)]
        return Accuracy(*(readouts if len(readouts) == 3 else [readouts[0], None, None]))

    def mean_pixels(self) -> Float[np.ndarray, " glimpses"]:
        """Returns the pixels used to classify after each look, the mean over scenes and seeds."""
        return self.pixels.mean(axis=(0, 1), dtype=np.float64)

    def location_counts(self, grid: Grid | None) -> Locations | None:
        """Returns how often each location of a grid was sensed at each step."""
        if grid is None:
            return None
        num_locations = grid.num_locations
        steps = np.moveaxis(self.locations, 2, 0).reshape(self.locations.shape[2], -1)  # (n, scenes * seeds)
        counts = [np.bincount(step, minlength=num_locations).tolist() for step in steps]
        return Locations(tuple(tuple(row) for row in counts))


def outcomes_of(traces: Iterable[LookTrace], labels: Int[Tensor, " batch"], temperature: float) -> Outcomes:
    """Scores what an agent did in a batch of scenes, one trace a seed."""
    parts, num_classes = [], 0
    for trace in traces:  # one at a time: together they would fill a GPU's memory
        parts.append(_score(trace, labels, temperature))
        num_classes = trace.readouts[0].shape[-1]
    locations, pixels, ranks, answers, confidences, losses, correct = (
        torch.stack(part, dim=1).cpu().numpy() for part in zip(*parts, strict=True)
    )
    require_ranks(ranks, num_classes)
    return Outcomes(labels.cpu().numpy(), locations, pixels, ranks, answers, confidences, losses, correct)


def _score(trace: LookTrace, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
    each = tuple(logits.float() for logits in trace.readouts)
    plain = ensemble_log_probabilities(*each)  # (B, n, C)
    calibrated = ensemble_log_probabilities(*(logits / temperature for logits in each))
    rated = (plain, *each) if len(each) > 1 else (plain,)
    ranks = torch.stack([true_rank(scores, labels) for scores in rated], dim=-1)
    both = torch.stack((plain, calibrated), dim=-1)  # (B, n, C, 2)
    highest, answers = both.max(dim=2)
    confidences = highest.exp().clamp_max(1)  # rounding may leave it just above
    answers = answers.to(torch.int16 if both.shape[2] < 2**15 else torch.int32)
    truth = labels.view(-1, 1, 1, 1).expand(-1, both.shape[1], 1, 2)
    losses = -both.gather(2, truth).squeeze(2)
    correct = true_rank(calibrated, labels) == 0
    locations = located_on_grid(trace)
    pixels = trace.pixels.to(torch.int32)
    return locations.to(torch.int16), pixels, ranks, answers, confidences, losses, correct


def located_on_grid(trace: LookTrace) -> Int[Tensor, "batch glimpses"]:
    """Returns where on its grid a looker looked; -1 for one without a grid."""
    nowhere = trace.pixels.new_full(trace.pixels.shape, -1)
    return getattr(trace, "locations", nowhere)


def true_rank(
    scores: Float[Tensor, "batch *steps classes"], labels: Int[Tensor, " batch"]
) -> Int[Tensor, "batch *steps"]:
    """Returns how many classes are rated above the true one; of equals, the first counts as higher.

    Where a score is not a number, which no comparison would notice, the rank is the number of classes: see
    `require_ranks`.
    """
    shape = (-1, *[1] * (scores.ndim - 1))
    truth = labels.view(shape).expand(*scores.shape[:-1], 1)
    own = scores.gather(-1, truth)
    earlier = torch.arange(scores.shape[-1], device=scores.device) < truth
    ranks = ((scores > own) | ((scores == own) & earlier)).sum(dim=-1)
    return ranks.masked_fill(scores.isnan().any(dim=-1), scores.shape[-1]).to(torch.int32)


def require_ranks(ranks: Int[np.ndarray, "..."], num_classes: int) -> None:
    """Raises where a model's scores were not numbers; on the host, so that a GPU is not waited for."""
    if (ranks >= num_classes).any():
        raise StamError("the model's scores are not numbers (NaN): its weights are damaged, take another one")


def join(parts: list[Outcomes], indices: list[np.ndarray], num_scenes: int) -> Outcomes:
    """Puts the outcomes of all batches, of all processes, in the order of the scenes."""
    names = [field.name for field in fields(Outcomes)]
    values = [{name: getattr(part, name) for name in names} for part in parts]
    return Outcomes(**gather_scenes(values, indices, num_scenes))


def gather_scenes(
    parts: list[dict[str, np.ndarray]], indices: list[np.ndarray], num_scenes: int
) -> dict[str, np.ndarray]:
    """Exchanges arrays whose first axis is the scene between all processes, and lays them in order.

    Raises:
        StamError: A scene is missing or was counted twice.
    """
    own: dict[str, Any] = {"": np.concatenate(indices) if indices else np.zeros(0, np.int64)}
    if parts:
        own |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    shares = distributed.of_all(own)
    order = np.concatenate([share[""] for share in shares])
    times = np.bincount(order, minlength=num_scenes)
    if len(times) != num_scenes or (times != 1).any():
        raise StamError(f"{(times != 1).sum()} of {num_scenes} scenes were not counted exactly once")
    place = np.argsort(order)
    filled = [share for share in shares if len(share) > 1]  # a process may have had no scene at all
    return {name: np.concatenate([share[name] for share in filled])[place] for name in filled[0] if name}
