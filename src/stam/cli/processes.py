"""Commands that several processes run together, as `torchrun` starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from stam.errors import require
from stam.learning import distributed
from stam.learning.optimisation import choose_device


@contextmanager
def processes(device: str) -> Iterator[torch.device]:
    """Joins the processes that `torchrun` started, if it did, and yields this one's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_distributed():
        yield choose_device(device)
        return
    local = os.environ.get("LOCAL_RANK", "0")
    require(
        not device.startswith("cuda:"),
        f"each process has a GPU of its own: use --device cuda instead of {device}",
    )
    own = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    chosen = choose_device(f"cuda:{local}" if own else device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    _join("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield chosen
    finally:
        dist.destroy_process_group()


def _join(backend: str) -> None:
    """Joins the others. `torchrun` keeps its store over a restart: what the dead wrote there is passed by."""
    store, rank, world_size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)
