"""Sums over rows, in an order that is always the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.kernels.launching import cells, shared_grid

_ROWS, _COLUMNS = 16, 128


@triton.jit(do_not_specialize=["rows"])
def _sum_some_rows(x, sums, rows, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((tile, block), tl.float32)
    for start in range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, rows, width)
        total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0) * width + column, tl.sum(total, 0), mask=column < width)


def sum_rows(x: Tensor) -> Tensor:
    """Returns the sum over the rows of (rows, width), in single precision."""
    rows, width = x.shape
    programs, blocks = shared_grid(rows, width, _ROWS, _COLUMNS, x.device)
    sums = torch.empty((programs, width), device=x.device)
    _sum_some_rows[(programs, blocks)](x, sums, rows, width, _ROWS, _COLUMNS, num_warps=4)
    return add_up(sums)


def add_up(parts: Tensor) -> Tensor:
    """Returns the sum of what many programs have left, (programs, ...), in single precision."""
    result = parts.new_empty(parts.shape[1:])
    width = result.numel()
    _sum_some_rows[(1, triton.cdiv(width, 32))](parts, result, len(parts), width, 256, 32, num_warps=8)
    return result
