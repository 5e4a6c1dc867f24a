"""A teacher is a frozen classifier of whole images; what it predicts is the agent's target and its reward."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stam.errors import require
from stam.model.belief import ensemble_log_probabilities
from stam.model.vit import VisionTransformer
from stam.shapes import Float


@dataclass(frozen=True)
class TeacherOutput:
    """What a teacher says of whole images.

    Attributes:
        log_q: The logarithm of its distribution over the classes.
        features: Its read-out features before the classifiers, one vector for each read-out token; `None`
            where the model is not a DeiT.
    """

    log_q: Float[Tensor, "batch classes"]
    features: Float[Tensor, "batch readout width"] | None = None

    def repeated(self, times: int) -> "TeacherOutput":
        """Returns what it says of each image so many times, one image after the other."""
        features = None if self.features is None else self.features.repeat_interleave(times, 0)
        return TeacherOutput(self.log_q.repeat_interleave(times, 0), features)


class Teacher(nn.Module):
    """Predicts q(y|X) from a whole image, always in evaluation mode and without gradient.

    A distilled DeiT gives the mean of its two softmaxes, any other model its one.
    """

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.num_classes = num_classes

    def train(self, mode: bool = True) -> "Teacher":
        """A teacher does not train: its mode stays what it is."""
        return self

    @property
    def feature_width(self) -> int | None:
        """Width of the features it classifies by, where they can be had."""
        return self.model.pos_embed.shape[2] if isinstance(self.model, VisionTransformer) else None

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch channels height width"]) -> TeacherOutput:
        """Returns what it says of normalised whole images, with its features if it is a DeiT."""
        if not isinstance(self.model, VisionTransformer):
            return TeacherOutput(ensemble_log_probabilities(self.model(images)))
        features = self.model(*self.model.all_patches(images))
        return TeacherOutput(ensemble_log_probabilities(*self.model.classify(features)), features)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns log q for normalised whole images."""
        return self.predict(images).log_q


def require_features(teacher: Teacher, width: int, weight: float) -> None:
    """Raises unless the teacher has features that an agent can follow, if they have a weight at all."""
    found = teacher.feature_width
    require(
        weight == 0 or found == width,
        f"feature_weight {weight} needs a DeiT of width {width} as teacher, this one "
        f"{'has no such features' if found is None else f'is {found} wide'}: use feature_weight 0",
    )
