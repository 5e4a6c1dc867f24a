"""Sums of what many programs leave behind, in an order that is always the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import cells, padded

# most rows and least columns of a tile, warps that share it; `benchmarks/kernels.py` tries others
LAUNCH = {"rows": 512, "columns": 8, "warps": 8}


@triton.jit(do_not_specialize=["rows"])
def _add_up(parts, result, rows, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((tile, block), tl.float32)
    for start in range(0, rows, tile):
        place, inside = cells(start + tl.arange(0, tile), column, rows, width)
        total += tl.load(parts + place, mask=inside, other=0.0)
    tl.store(result + column, tl.sum(total, 0).to(result.dtype.element_ty), mask=column < width)


def add_up(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the sum of single-precision parts (programs, ...)."""
    result = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    width, tile = result.numel(), min(LAUNCH["rows"], padded(len(parts)))
    block = LAUNCH["columns"] * (LAUNCH["rows"] // tile)  # as many numbers in a tile, however few the rows
    _add_up[(triton.cdiv(width, block),)](
        parts, result, len(parts), width, tile, block, num_warps=LAUNCH["warps"]
    )
    return result
