"""A running average of the weights a training passes through, which generalises better than the latest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class AveragedWeights:
    """The weights and statistics of a model, averaged over about the last `span` times `update` was called.

    The first `span` count alike; from then on the average is exponential.
    """

    def __init__(self, model: nn.Module, span: int, leave_out: tuple[str, ...] = ()) -> None:
        """Starts from the model as it is; names that begin with one of `leave_out` are not averaged."""
        state = model.state_dict()
        self._names = [
            name
            for name, value in state.items()
            if value.is_floating_point() and not name.startswith(leave_out)
        ]
        self._latest = [state[name] for name in self._names]  # the model's own memory, not copies
        self._average = [value.clone() for value in self._latest]
        self._span, self._count = span, 0

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are now into the average."""
        self._count += 1
        torch._foreach_lerp_(self._average, self._latest, 1 / min(self._count, self._span))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it the model has the averaged weights."""
        latest = [value.clone() for value in self._latest]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._latest, latest)

    @torch.no_grad()
    def settle(self) -> None:
        """Gives the model the averaged weights for good."""
        if self._count:
            torch._foreach_copy_(self._latest, self._average)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average, to go on from."""
        return {"count": self._count, "average": dict(zip(self._names, self._average, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved average."""
        self._count = state["count"]
        averages: dict[str, Tensor] = state["average"]
        with torch.no_grad():
            torch._foreach_copy_(self._average, [averages[name] for name in self._names])
