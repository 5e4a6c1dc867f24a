"""Scenes that are still looked at, kept together at the front of a list."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _close_ranks(order, is_done, left, size, spare, block: tl.constexpr):
    number, count = tl.arange(0, block), tl.load(left).to(tl.int32)
    kept = count * 0
    for start in range(0, count, block):
        inside = start + number < count
        scene = tl.load(order + start + number, mask=inside, other=0)
        stays = inside & (tl.load(is_done + scene, mask=inside, other=1) == 0)
        # nobody moves backwards, and the sum waits for all that is read here: nothing is overwritten unread
        place = kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(order + place, scene, mask=stays)
        kept += tl.sum(stays.to(tl.int32), 0)
    tl.debug_barrier()
    filler = tl.load(order)
    if kept == 0:
        filler = filler * 0 + spare
    tl.debug_barrier()
    for start in range(0, size, block):
        place = start + number
        tl.store(order + place, tl.zeros((block,), tl.int64) + filler, mask=(place >= kept) & (place < size))
    tl.store(left, kept.to(tl.int64))


def close_ranks(order: Tensor, is_done: Tensor, left: Tensor, spare: int) -> None:
    """Moves those of the first `left` scenes of a list that are not done to its front, in the same order.

    The rest of the list is filled with the first of them, or with `spare` where none is left.

    Args:
        order: The list (size,), changed in place.
        is_done: Of each scene, (scenes,).
        left: A single number, changed in place.
        spare: See above.
    """
    _close_ranks[(1,)](order, is_done.view(torch.uint8), left, len(order), spare, _BLOCK, num_warps=8)
