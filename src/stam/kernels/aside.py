"""A second stream of work on a GPU, beside the usual one: many launches of a step are too small to fill it.

Gradients of weights are half of a backward's launches, and nobody asks for them before the optimiser; nor for
the losses before the look-ahead is done.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# What is computed aside holds on to what it reads. Beyond this many, the usual stream waits for the first,
# lest everything a backward lets go of is kept until its end.
_MOST_PENDING = 12

_pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] | None = None


def aside(work: Callable[..., Result], *inputs: Tensor) -> Result:
    """Returns work(*inputs), computed on the second stream within `gradients_aside`.

    There it may only be read after that: as a gradient that autograd hands to a weight as it is.
    """
    if _pending is None:
        return work(*inputs)
    usual = torch.cuda.current_stream()
    second = _second_stream(usual.device)
    second.wait_stream(usual)
    with torch.cuda.stream(second):
        result = work(*inputs)
    _pending.append((second.record_event(), inputs))
    if len(_pending) > _MOST_PENDING:
        done, _ = _pending.popleft()
        usual.wait_event(done)
    return result


@contextmanager
def gradients_aside(wanted: bool) -> Iterator[None]:
    """Within it, a backward computes on two streams; after it, all gradients are there.

    Only for weights that the kernels take as they are, once: whatever else autograd does with a gradient, as
    adding another to it, it would do too early.
    """
    global _pending
    if not wanted:
        yield
        return
    _pending = deque()
    try:
        yield
    finally:
        if _pending:
            last, _ = _pending[-1]
            torch.cuda.current_stream().wait_event(last)
        _pending = None


@contextmanager
def second_stream(wanted: bool) -> Iterator[Callable[[], None]]:
    """Within it, work goes to the second stream, and so will its gradients.

    It gives what is to be called before anything reads the results; until then, what the work reads has to
    live.
    """
    if not wanted:
        yield lambda: None
        return
    usual = torch.cuda.current_stream()
    second = _second_stream(usual.device)
    second.wait_stream(usual)
    with torch.cuda.stream(second):
        yield lambda: usual.wait_stream(second)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def matrix_gradient(given: Tensor, inputs: Tensor) -> Tensor:
    """Returns the gradient of W, of rows W inputs that were given a gradient."""
    return given.t() @ inputs
