"""Averages of weights, which generalise better than the weights themselves."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class MovingAverage(AveragedModel):
    """A copy of a model that averages its weights and statistics over about the last batches.

    The first `num_batches` updates count alike; from then on the average is exponential.
    """

    def __init__(self, model: nn.Module, num_batches: int) -> None:
        super().__init__(model, multi_avg_fn=self._average, use_buffers=True)
        self.num_batches = num_batches

    def _average(self, averaged: Sequence[Tensor], latest: Sequence[Tensor], _: Tensor | int) -> None:
        if averaged[0].is_floating_point():
            weight = 1 / min(int(self.n_averaged) + 1, self.num_batches)  # its own count: not on a GPU
            torch._foreach_lerp_(list(averaged), list(latest), weight)
        else:
            torch._foreach_copy_(list(averaged), list(latest))


class CoreSoup:
    """Cores that were trained one after another from the same start, and the average of their weights.

    Attributes:
        start: The core as it was before.
    """

    def __init__(self, core: nn.Module) -> None:
        self.start = copy.deepcopy(core)
        self._average = AveragedModel(core)

    def add(self, core: nn.Module) -> None:
        """Takes in one more core."""
        self._average.update_parameters(core)

    def copy_to(self, core: nn.Module) -> None:
        """Gives a core the average of all that were added."""
        core.load_state_dict(self._average.module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self._average.load_state_dict(state)


def averaged_state(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the saved average; version 0.1 saved only what it averaged, without the module's prefix."""
    saved = state["averaged"]
    if "average" not in saved:
        return saved
    weights = state["agent"] | saved["average"]
    named = {f"module.{name}": value for name, value in weights.items()}
    return named | {"n_averaged": torch.tensor(saved["count"])}
