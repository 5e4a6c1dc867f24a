"""What the kernels share: where a tile lies, half-precision weights, and how many programs to start."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def cells(row, column, rows, width):
    """Returns where the cells of a tile lie in (rows, width), and which of them there are."""
    place = row[:, None].to(tl.int64) * width + column[None, :]
    return place, (row[:, None] < rows) & (column[None, :] < width)


@triton.jit
def of_column(values, column, width):
    """Loads one number a column."""
    return tl.load(values + column, mask=column < width, other=0.0)


def in_half(*weights: Tensor) -> tuple[Tensor, ...]:
    """Returns weights as autocast rounds them; nothing happens to those that are rounded already."""
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(weight.to(dtype) for weight in weights)


def num_programs(tiles: int, a_processor: int, device: torch.device) -> int:
    """Returns how many programs to share tiles among, where each leaves sums to be added up."""
    return max(1, min(tiles, a_processor * _num_processors(device)))


def shared_grid(rows: int, width: int, tile: int, block: int, device: torch.device) -> tuple[int, int]:
    """Returns a grid of (programs that share the rows, blocks of columns), likewise."""
    blocks = triton.cdiv(width, block)
    return max(1, min(triton.cdiv(rows, tile), 16 * _num_processors(device) // blocks)), blocks


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def where_chosen(chosen: Tensor, size: int) -> Tensor:
    """Returns (B, size): where each of `size` entries stands among the (B, K) chosen, none of them twice.

    Those that were not chosen stand at K.
    """
    count = chosen.shape[1]
    places = torch.arange(count, device=chosen.device).expand_as(chosen)
    return torch.full((len(chosen), size), count, device=chosen.device).scatter_(1, chosen, places)


def padded(width: int) -> int:
    """Returns the side of a tile that holds a row."""
    return triton.next_power_of_2(width)
