"""Training with several processes: who am I, what is mine, and means over all of them.

Processes share batches, and draw the same random numbers, each using those of its own samples: what is
learned does not depend on how many there are. With one process nothing here does anything.
"""

import os
import shlex
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stam.model.actor_critic import RowNorm
from stam.model.randomness import RandomSource
from stam.shapes import Float

T = TypeVar("T")


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


def can_be_captured() -> bool:
    """Tells whether exchanges between processes can be part of a CUDA graph: NCCL's can, gloo's cannot.

    All processes must then capture and replay the same batches, which they do: their parts of a batch are
    equally large, and what they exchange in it is the same in every batch (tested).
    """
    return not is_distributed() or "cuda:nccl" in dist.get_backend_config()


def launcher() -> str:
    """Returns how this program was started, for commands that are shown."""
    return f"torchrun --nproc-per-node {world_size()} -m stam" if is_distributed() else "stam"


def how_to_resume(command: str, run: Path) -> str:
    """Returns the command line that goes on with a run, as it can be typed.

    Args:
        command: What the run was begun with, `train` or `teacher`.
        run: The run folder.
    """
    return f"{launcher()} {command} --resume --out {shlex.quote(str(run))}"


def was_restarted() -> bool:
    """Tells whether `torchrun` has started this job again, after one of its processes failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def job() -> str:
    """Returns which job of `torchrun` this is: the same after a restart, another for any other start.

    Nothing where `torchrun` did not start it.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name == "none":  # nobody gave it one; its launcher lives on over restarts
        name = f"{socket.gethostname()} {os.getppid()}"
    return f"{name}: {shlex.join(sys.argv[1:])}" if name else ""


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Tells of each flag whether it is true in any process."""
    if not is_distributed():
        return flags
    together = torch.tensor(flags, dtype=torch.float)
    dist.all_reduce(together)
    return tuple((together > 0).tolist())


def of_first(value: T) -> T:
    """Returns the first process's value, in all of them."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def of_all(value: T) -> list[T]:
    """Returns every process's value, in all of them."""
    values = [value] * world_size()
    if is_distributed():
        dist.all_gather_object(values, value)
    return values


class SharedRandomSource(RandomSource):
    """Draws numbers for the samples of all processes and returns those of this one."""

    def uniform(self, shape: tuple[int, ...], device: torch.device, batch_dim: int = 0) -> Tensor:
        """Returns numbers in [0, 1); `batch_dim` says which dimension counts the samples."""
        count = shape[batch_dim]
        of_all = (*shape[:batch_dim], count * world_size(), *shape[batch_dim + 1 :])
        return super().uniform(of_all, device).narrow(batch_dim, rank() * count, count)

    def integers(self, high: int, batch_size: int, device: torch.device) -> Tensor:
        """Returns a number from 0 to high - 1 for each sample."""
        return (
            super()
            .integers(high, batch_size * world_size(), device)
            .narrow(0, rank() * batch_size, batch_size)
        )


def random_source(generator: torch.Generator) -> RandomSource:
    """Returns random numbers for the samples of this process."""
    return SharedRandomSource(generator) if is_distributed() else RandomSource(generator)


class SharedRowNorm(RowNorm):
    """Batch normalisation over the rows of all processes."""

    def forward(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
        """Normalises over the rows, in training those of all processes."""
        if not self.training:
            return super().forward(rows)
        count, single = rows.shape[0] * world_size(), rows.float()
        centred = single - global_row_sum(single) / count
        variance = global_row_sum(centred.square()) / count
        assert self.momentum is not None and self.running_mean is not None and self.running_var is not None
        with torch.no_grad():
            mean = (single - centred)[0]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / max(count - 1, 1), self.momentum)
            self.get_buffer("num_batches_tracked").add_(1)
        normalised = centred * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias, normalised, self.weight).to(rows.dtype)


def share_batch_norms(model: nn.Module) -> None:
    """Makes the batch norms of a model normalise over all processes; parameters and their names stay."""
    for part in model.modules():
        if type(part) is RowNorm:
            part.__class__ = SharedRowNorm


def global_mean(*values: Tensor) -> tuple[Tensor, ...]:
    """Returns the mean of each tensor over the global batch, in one exchange; ranks hold equal parts.

    The batch is the last dimension; those before it stay.
    """
    means = tuple(value.mean(dim=-1) for value in values)
    if not is_distributed():
        return means
    together = torch.stack(means)
    dist.all_reduce(together)
    return tuple((together / world_size()).unbind())


def rows_of_all(rows: Tensor) -> Tensor:
    """Returns the rows of all processes, in their order; each has as many."""
    if not is_distributed():
        return rows
    given = rows.to(torch.uint8) if rows.dtype == torch.bool else rows.contiguous()
    parts = [torch.empty_like(given) for _ in range(world_size())]
    dist.all_gather(parts, given)
    return torch.cat(parts).to(rows.dtype)


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
