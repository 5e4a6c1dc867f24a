"""The little that many processes need: who am I, what is mine, and the mean of a tensor over all of them.

Processes share batches, and draw the same random numbers, each using those of its own rows: what is computed
does not depend on how many there are. Without them nothing here does anything.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_is_alone = False


def is_distributed() -> bool:
    """Tells whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Returns this process's number."""
    return dist.get_rank() if is_distributed() else 0


def wait() -> None:
    """Waits for all processes to come here."""
    if is_distributed():
        dist.barrier()


def launcher() -> str:
    """Returns how this program was started, for commands that are shown."""
    return f"torchrun --nproc-per-node {world_size()} -m stam" if is_distributed() else "stam"


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Tells of each flag whether it is true in any process."""
    if not is_distributed():
        return flags
    together = torch.tensor(flags, dtype=torch.float)
    dist.all_reduce(together)
    return tuple((together > 0).tolist())


@contextmanager
def alone() -> Iterator[None]:
    """Within it this process draws random numbers for itself, for work that the others have no part in."""
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def draw_rows(draw: Callable[[int], Tensor], count: int, dim: int = 0) -> Tensor:
    """Draws random numbers for the rows of all processes and returns those of this one.

    Args:
        draw: Given a number of rows, returns as many.
        count: Rows of this process, and of every other.
        dim: Which dimension rows are.
    """
    if _is_alone:
        return draw(count)
    return draw(count * world_size()).narrow(dim, rank() * count, count)


def global_mean(*values: Tensor) -> tuple[Tensor, ...]:
    """Returns the mean of each tensor over the global batch, in one exchange; ranks hold equal parts."""
    means = tuple(value.mean() for value in values)
    if not is_distributed():
        return means
    together = torch.stack(means)
    dist.all_reduce(together)
    return tuple((together / world_size()).unbind())


def global_row_sum(rows: Tensor) -> Tensor:
    """Returns the sum over the rows of all processes, through which gradients flow to all of them."""
    return _SumOverProcesses.apply(rows.sum(dim=0))


class _SumOverProcesses(torch.autograd.Function):
    """What each process gives counts in the sum of all, and so in the losses of all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient)


def _sum(values: Tensor) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


@torch.no_grad()
def average(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor by its mean over the processes, all in one exchange."""
    if not is_distributed():
        return
    given = list(tensors)
    together = torch.cat([tensor.flatten() for tensor in given])
    dist.all_reduce(together)
    parts = (together / world_size()).split([tensor.numel() for tensor in given])
    torch._foreach_copy_(given, [part.view_as(tensor) for part, tensor in zip(parts, given, strict=True)])
