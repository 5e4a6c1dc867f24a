"""An average of the weights a training passes through, which generalises better than the latest ones.

Also with those it started from: what a pretrained core can do and its new task does not ask for is forgotten
little by little, and comes back with a share of the old weights.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class AveragedWeights:
    """Weights averaged over about the last `span` times that `update` was called.

    The first `span` count alike; from then on the average is exponential.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        span: int,
        start_share: float = 0.0,
        pretrained: Collection[str] = (),
    ) -> None:
        """Begins with the weights as they are.

        Args:
            weights: A model's own tensors, which change in place.
            span: How many to average; 1 is the latest alone.
            start_share: Share that the weights as they are now have in what is used.
            pretrained: The names of those that have such a share.
        """
        self._latest = dict(weights)
        self._average = {name: value.clone() for name, value in weights.items()}
        self._start = {name: weights[name].clone() for name in pretrained} if start_share > 0 else {}
        self._span, self._start_share, self._count = span, start_share, 0

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are now into the average."""
        self._count += 1
        weight = 1 / min(self._count, self._span)
        torch._foreach_lerp_([*self._average.values()], [*self._latest.values()], weight)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it the model has the averaged weights."""
        latest = [value.clone() for value in self._latest.values()]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([*self._latest.values()], latest)

    @torch.no_grad()
    def settle(self) -> None:
        """Gives the model the averaged weights for good."""
        torch._foreach_copy_([*self._latest.values()], [*self._average.values()])
        if self._start:
            mixed = [self._latest[name] for name in self._start]
            torch._foreach_lerp_(mixed, [*self._start.values()], self._start_share)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average, to go on from."""
        return {"count": self._count, "average": dict(self._average), "start": dict(self._start)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved average."""
        self._count = state["count"]
        for own, saved in ((self._average, state["average"]), (self._start, state["start"])):
            for name, value in own.items():
                value.copy_(saved[name])


def average_of(agent: nn.Module, span: int, start_share: float) -> AveragedWeights | None:
    """Returns the average of an agent's weights that is to be used, if it is another than the latest."""
    if span == 1 and start_share == 0:
        return None
    weights = {
        name: value
        for name, value in agent.state_dict().items()
        if value.is_floating_point() and not name.startswith("critic.")
    }
    pretrained = [name for name in weights if name.startswith("core.") and not name.startswith("core.head")]
    return AveragedWeights(weights, span, start_share, pretrained)
