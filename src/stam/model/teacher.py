"""Whole-image teachers: what the agent should come to believe, from an image it never sees whole."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stam.config import require
from stam.model.episode import ensemble_log_probabilities
from stam.model.vit import VisionTransformer
from stam.shapes import Float

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

    @property
    def feature_width(self) -> int | None:
        """Width of the features it classifies by, where they can be had."""
        return self.model.pos_embed.shape[2] if isinstance(self.model, VisionTransformer) else None

    @torch.no_grad()
    def explain(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch readout features"]]:
        """Returns log q and the features it comes from: one for each token that is read out."""
        assert isinstance(self.model, VisionTransformer)
        features = self.model.encode_images(images)
        return ensemble_log_probabilities(*self.model.classify(features)), features

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns log q for normalised whole images."""
        logits = self._classify(images)
        return ensemble_log_probabilities(*(logits if isinstance(logits, tuple) else (logits,)))


def require_features(teacher: Teacher, width: int, weight: float) -> None:
    """Raises unless the teacher has features that an agent can follow, if they have a weight at all."""
    found = teacher.feature_width
    require(
        weight == 0 or found == width,
        f"feature_weight {weight} needs a DeiT of width {width} as teacher, this one "
        f"{'has no such features' if found is None else f'is {found} wide'}: use feature_weight 0",
    )
