"""How far a result would move with other images: intervals, a paired test, and a test against chance.

Images are what varies in all of them. What was measured for several first locations is averaged over those
first, so that an image counts once. Everything is seeded: the same result gives the same numbers again.
"""

import numpy as np

from stam.data.randomness import random_words
from stam.shapes import Float

LEVEL = 0.95  # of every interval and every band in a figure
NUM_RESAMPLES = 1000
NUM_FLIPS = 10_000
_CHUNK = 50  # resamples at once: what is drawn for ImageNet's 50,000 images fits in memory

Interval = tuple[Float[np.ndarray, " columns"], Float[np.ndarray, " columns"]]


def bootstrap_interval(values: Float[np.ndarray, "images columns"]) -> Interval:
    """Returns the ends of the 95 % interval of each column's mean: the percentile bootstrap over images."""
    count, means = len(values), []
    values = values.astype(np.float32)
    for chunk in range(NUM_RESAMPLES // _CHUNK):
        drawn = (random_words(_CHUNK * count, "bootstrap", chunk) % np.uint64(count)).astype(np.int64)
        times = [np.bincount(row, minlength=count) for row in drawn.reshape(_CHUNK, count)]
        means.append(np.stack(times).astype(np.float32) @ values / count)  # (resamples, columns)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(np.concatenate(means).astype(np.float64), (tail, 100 - tail), axis=0)
    return low, high


def sign_flip_test(differences: Float[np.ndarray, " images"]) -> float:
    """Returns the p-value of a mean difference of 0, two-sided, from paired differences of images.

    If both were equally good, each image's difference would have either sign with equal chance. With one
    answer for each image this is McNemar's test.
    """
    changed = np.abs(differences[differences != 0]).astype(np.float64)
    if not len(changed):
        return 1.0
    found = abs(float(differences.sum(dtype=np.float64)))
    as_far = 0
    for chunk in range(NUM_FLIPS // _CHUNK):
        words = random_words(-(-_CHUNK * len(changed) // 64), "sign flips", chunk)
        bits = np.unpackbits(words.view(np.uint8))[: _CHUNK * len(changed)]
        sums = (2.0 * bits.reshape(_CHUNK, -1) - 1) @ changed
        as_far += int((np.abs(sums) >= found - 1e-9).sum())
    return (1 + as_far) / (1 + NUM_FLIPS)


def binomial_tail(right: int, count: int, chance: float) -> float:
    """Returns the probability of so many right answers or more, when each is right with some chance."""
    if right <= 0 or chance >= 1:
        return 1.0
    if chance <= 0:
        return 0.0
    steps = np.arange(1, count + 1)
    ratios = np.log((count - steps + 1) / steps) + np.log(chance) - np.log1p(-chance)
    log_mass = count * np.log1p(-chance) + np.concatenate(([0.0], np.cumsum(ratios)))
    return float(min(1.0, np.exp(log_mass[right:]).sum()))
