"""Rows of a learned table, with a gradient that is summed the same way every time."""

from typing import Any

import torch
from torch import Tensor

from stam.shapes import Float, Int


def look_up(table: Float[Tensor, "rows width"], index: Int[Tensor, "..."]) -> Float[Tensor, "... width"]:
    """Returns the rows of the table that the index names."""
    return _LookUp.apply(table, index)


class _LookUp(torch.autograd.Function):
    """On a GPU the usual gradient adds rows in whatever order they come, or sorts them first.

    As a product with ones where a row was taken it is exact to rounding, and as fast as reading it.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = table.shape[0]
        return torch.nn.functional.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        rows = torch.arange(ctx.num_rows, device=index.device)
        taken = (rows[:, None] == index.flatten()).to(gradient.dtype)  # (rows, taken)
        return taken @ gradient.reshape(-1, gradient.shape[-1]), None
