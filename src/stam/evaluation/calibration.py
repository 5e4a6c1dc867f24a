"""Temperature calibration: one number, fitted on held-out scenes, that makes confidence mean accuracy."""

import math

import numpy as np
import torch
from torch import Tensor

from stam.evaluation.outcomes import Outcomes
from stam.evaluation.results import Calibration, Reliability, floats
from stam.learning import distributed
from stam.model.belief import ensemble_log_probabilities
from stam.model.looker import LookTrace
from stam.shapes import Float, Int

NUM_BINS = 15
_LOWEST, _HIGHEST, _NUM_CANDIDATES = 0.1, 10.0, 33  # odd, so that temperature 1 is a candidate


class TemperatureSearch:
    """Finds the temperature of least negative log-likelihood, from batches that need not be kept.

    The loss is summed for a row of temperatures, even in their logarithm; the minimum of the parabola
    through the best one and its neighbours is the answer.
    """

    def __init__(self) -> None:
        self.candidates = np.geomspace(_LOWEST, _HIGHEST, _NUM_CANDIDATES)
        self._sums = torch.zeros(_NUM_CANDIDATES, dtype=torch.float64)

    def add(self, trace: LookTrace, labels: Int[Tensor, " batch"]) -> None:
        """Adds the beliefs of a batch after every glimpse."""
        each = tuple(logits.float() for logits in trace.readouts)
        truth = labels.view(-1, 1, 1).expand(-1, each[0].shape[1], 1)
        for position, temperature in enumerate(self.candidates):
            log_p = ensemble_log_probabilities(*(logits / temperature for logits in each))
            self._sums[position] -= log_p.gather(2, truth).double().sum().cpu()

    def best(self) -> float:
        """Returns the temperature, over the batches of all processes."""
        losses = torch.stack(distributed.of_all(self._sums)).sum(dim=0).numpy()
        lowest = int(losses.argmin())
        if lowest in (0, len(losses) - 1):
            return float(self.candidates[lowest])
        left, middle, right = losses[lowest - 1 : lowest + 2]
        curvature = left - 2 * middle + right
        shift = 0.5 * (left - right) / curvature if curvature > 0 else 0.0
        step = math.log(self.candidates[1] / self.candidates[0])
        return float(self.candidates[lowest] * math.exp(shift * step))


def reliability(
    confidences: Float[np.ndarray, " answers"], correct: np.ndarray, losses: Float[np.ndarray, " answers"]
) -> Reliability:
    """Bins answers by confidence and compares it with how often they are right."""
    bins = np.minimum((confidences * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    filled = np.maximum(counts, 1)
    confidence = np.bincount(bins, weights=confidences, minlength=NUM_BINS) / filled
    accuracy = np.bincount(bins, weights=correct, minlength=NUM_BINS) / filled
    ece = float((counts * np.abs(confidence - accuracy)).sum() / counts.sum())
    return Reliability(
        ece=ece,
        nll=float(losses.mean(dtype=np.float64)),
        counts=tuple(counts.tolist()),
        confidence=floats(confidence),
        accuracy=floats(accuracy),
    )


def describe_calibration(temperature: float, num_fitted: int, reported: Outcomes) -> Calibration:
    """Says what a fitted temperature does on scenes it was not fitted on, over all numbers of glimpses."""
    before, after = (
        reliability(
            reported.confidences[..., position].ravel(),
            correct.ravel(),
            reported.losses[..., position].ravel(),
        )
        for position, correct in enumerate((reported.correct, reported.calibrated_correct))
    )
    return Calibration(temperature, num_fitted, len(reported), before, after)
