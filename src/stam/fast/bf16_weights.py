"""Copies of the weights in bfloat16, made once an update, and the gradients they give back.

Autocast rounds every weight where it is used, one small kernel each, and as many again for the gradients: for
a small model a tenth of a training step. Here all are rounded together. The numbers are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Bf16Weights:
    """Copies of a model's matrices and biases in half precision, to compute with under autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        """Finds what autocast would round: the parameters of linear layers and convolutions."""
        layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        self._places = [
            (layer, name) for layer in layers for name, _ in layer.named_parameters(recurse=False)
        ]
        self._originals = tuple(layer.get_parameter(name) for layer, name in self._places)
        self._copies = tuple(
            nn.Parameter(original.detach().to(dtype), requires_grad=original.requires_grad)
            for original in self._originals
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it the model computes with copies of its weights as they are now."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._originals)
        self._put_in_place(self._copies)
        try:
            yield
        finally:
            self._put_in_place(self._originals)

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Moves the gradients of the copies to the weights; a weight without one stays without."""
        given: list[Tensor] = []
        received: list[Tensor] = []
        for original, copy in zip(self._originals, self._copies, strict=True):
            if copy.grad is not None:
                original.grad = torch.empty_like(original)
                given.append(copy.grad)
                received.append(original.grad)
                copy.grad = None
        if given:
            torch._foreach_copy_(received, given)

    def _put_in_place(self, parameters: tuple[nn.Parameter, ...]) -> None:
        for (layer, name), parameter in zip(self._places, parameters, strict=True):
            setattr(layer, name, parameter)
