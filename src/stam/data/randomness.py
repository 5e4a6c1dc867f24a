"""Random numbers as a pure function of a key, the same in every process and with every version of numpy.

numpy promises stable streams only for its raw bits, not for `permutation` and the like, so whatever a resumed
run must find again (splits, subsets, scenes) is made from raw bits here.
"""

from typing import Any

import numpy as np
from numpy.random import Philox, SeedSequence

from stam.errors import require
from stam.shapes import Int


def random_key(purpose: str, *numbers: int) -> int:
    """Returns 64 random bits that belong to a purpose and some numbers, such as a seed and an epoch."""
    return int(_sequence(purpose, numbers).generate_state(1, np.uint64)[0])


def random_words(count: int, purpose: str, *numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns `count` random 64-bit words; a longer request begins with the words of a shorter one."""
    return Philox(_sequence(purpose, numbers)).random_raw(count)


def random_order(count: int, purpose: str, *numbers: int) -> Int[np.ndarray, "count"]:
    """Returns 0..count-1 in random order."""
    return np.argsort(random_words(count, purpose, *numbers), kind="stable")


def _sequence(purpose: str, numbers: tuple[int, ...]) -> SeedSequence:
    require(min(numbers, default=0) >= 0, f"a seed must be 0 or more, got {min(numbers, default=0)}")
    return SeedSequence([int.from_bytes(purpose.encode(), "big"), *numbers])
