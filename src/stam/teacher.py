"""Whole-image teachers: what the agent should come to believe, from an image it never sees whole."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stam.episode import ensemble_log_probabilities
from stam.shapes import Float
from stam.vit import VisionTransformer

Logits = Tensor | tuple[Tensor, ...]


class Teacher(nn.Module):
    """Predicts q(y|X) from a whole image, always in evaluation mode and without gradient.

    A distilled DeiT gives the mean of its two softmaxes, any other model its one.
    """

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.num_classes = num_classes
        self._classify: Callable[[Tensor], Logits] = (
            model.classify_images if isinstance(model, VisionTransformer) else model
        )

    def train(self, mode: bool = True) -> "Teacher":
        """A teacher does not train: its mode stays what it is."""
        return self

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns log q for normalised whole images."""
        logits = self._classify(images)
        return ensemble_log_probabilities(*(logits if isinstance(logits, tuple) else (logits,)))
