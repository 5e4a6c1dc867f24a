"""Giving freed memory back to the system."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Finds glibc's `malloc_trim`; other allocators have none, and need none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return trim


def return_freed_memory() -> None:
    """Gives the pages of freed blocks back to the system.

    Sessions of different lengths leave holes that no later block fits exactly. glibc keeps them: a service
    would grow by them as long as it runs. It takes milliseconds, in which other threads run on.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
