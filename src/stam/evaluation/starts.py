"""Where looking had better begin: the accuracy of each first location, and whether the best one is better.

The best location is chosen on some images and tested against the present one on others, so that it does not
look better than it is for having been chosen.
"""

import numpy as np

from stam.evaluation.intervals import bootstrap_interval
from stam.evaluation.results import FirstLocations, floats
from stam.shapes import Float

NUM_GLIMPSES = 5  # where looking begins matters for the first few
NUM_CHOOSING, NUM_TESTING = 128, 512  # images; all locations are tried on the first, two on the others


def best_location(scores: Float[np.ndarray, "images locations"], present: int) -> int:
    """Returns the location of highest mean score; the present one if it is as good, else another."""
    means = scores.mean(axis=0)
    return present if means[present] >= means.max() else int(means.argmax())


def describe_first_locations(
    scores: Float[np.ndarray, "images locations"],
    pairs: Float[np.ndarray, "tested 2"],
    present: int,
    best: int,
    num_glimpses: int,
) -> FirstLocations:
    """Says which first location is best and how sure that is.

    Args:
        scores: For each image and first location, the share of right answers after 1..n glimpses.
        pairs: The same of the present and the best location, for other images.
        present: Where looking begins now.
        best: The best location by the scores.
        num_glimpses: The n.
    """
    gains = pairs[:, 1] - pairs[:, 0]
    low, high = bootstrap_interval(gains[:, None])
    return FirstLocations(
        num_glimpses=num_glimpses,
        num_chosen=len(scores),
        num_tested=len(pairs),
        accuracy=floats(scores.mean(axis=0)),
        present=present,
        best=best,
        gain=float(gains.mean()),
        low=float(low[0]),
        high=float(high[0]),
    )
