"""The little that many processes need: who am I, and the mean of a tensor over all of them."""

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Tells whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Returns this process's number."""
    return dist.get_rank() if is_distributed() else 0


def global_mean(*values: Tensor) -> tuple[Tensor, ...]:
    """Returns the mean of each tensor over the global batch, in one exchange; ranks hold equal parts."""
    means = tuple(value.mean() for value in values)
    if not is_distributed():
        return means
    together = torch.stack(means)
    dist.all_reduce(together)
    return tuple((together / world_size()).unbind())
