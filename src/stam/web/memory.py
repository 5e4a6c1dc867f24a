"""Keeping a service that runs for months from growing.

Sessions of different lengths leave holes in glibc's heap that no later block fits exactly, and glibc keeps
them. Other allocators are left alone.
"""

import ctypes
import sys
from functools import cache

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BLOCK = 1 << 20


@cache
def _libc() -> ctypes.CDLL | None:
    """Finds the C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    return libc


def keep_large_blocks_apart() -> None:
    """Has large blocks, such as the tensors of a batch, go back to the system as soon as they are freed.

    By itself glibc puts ever larger blocks into the heap, between small ones that stay. It is a setting of
    the whole process.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def return_freed_memory() -> None:
    """Gives the pages of freed blocks back to the system; it takes milliseconds."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
