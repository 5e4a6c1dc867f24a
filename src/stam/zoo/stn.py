"""STN: the saliency sampler of Recasens, Kellnhofer, Stent, Matusik, Torralba, "Learning to Zoom", ECCV 2018.

A saliency map of the whole scene bends a sampling grid, so that salient parts are enlarged (section 3.1,
equations 1 to 3); a classifier sees the bent scene once, at fewer pixels than the scene has. All is
differentiable and trained by cross-entropy alone (section 3.2). The STAM paper's Table 1 calls it STN, as
the authors of PatchDrop do, who ran it at 168 pixels (148 on fMoW).

Departs from the paper:
- without the random blur of the first epochs, which keeps the sampler from staying uniform on long
  trainings;
- the saliency network is a small convolutional one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.errors import require
from stam.model.looker import SceneTrace
from stam.model.randomness import RandomSource
from stam.shapes import Float, Int
from stam.zoo.backbone import Backbone
from stam.zoo.sensing import shrunk, whole_boxes
from stam.zoo.system import LEARNED, Stage, System, SystemConfig


@dataclass(frozen=True)
class StnConfig(SystemConfig):
    """The saliency sampler's settings.

    Attributes:
        sampled_size: Pixels of the bent scene's side, which is all that is classified; 148 on fMoW.
        saliency_size: Pixels of the whole scene that the saliency network sees.
        num_points: Points of the saliency map in a row, and rows.
        kernel_width: Width of the Gaussian that pulls the grid, in points, at half of its height.
        sampler: Whether the scene is bent; without it, the same classifier sees it shrunk evenly.
        backbone: The classifier: conv or deit-tiny.
    """

    sampled_size: int = 168
    saliency_size: int = 56
    num_points: int = 31
    kernel_width: int = 13
    sampler: bool = True
    num_glimpses: int = 1
    backbone: str = "deit-tiny"

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        require(self.num_glimpses == 1, f"stn looks once: num_glimpses must be 1, got {self.num_glimpses}")

    clutter: ClassVar[dict[str, Any]] = {"sampled_size": 16, "saliency_size": 30, "backbone": "conv"}


class Stn(System):
    """The saliency sampler."""

    name, paper, settings = "stn", "Recasens et al. 2018", StnConfig
    whole_to_attend = whole_to_classify = True
    policies = (LEARNED,)
    stages = (Stage("together", 1.0, ("saliency", "rate", "task", "classifier")),)

    def __init__(self, config: StnConfig) -> None:
        super().__init__(config)
        self.saliency = nn.Sequential(
            *(nn.Conv2d(config.channels, 32, 5, stride=2, padding=2), nn.ReLU()),
            *(nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2), nn.ReLU()),
        )
        self.rate = nn.Conv2d(32, 1, 1)
        self.task = Backbone(config.backbone, config.sampled_size, config.channels)
        self.classifier = nn.Linear(self.task.width, config.num_classes)
        nn.init.zeros_(self.rate.weight)  # the grid starts even
        self.register_buffer("pull", attraction(config.kernel_width, config.num_points), persistent=False)

    def map(self, images: Tensor) -> Float[Tensor, "batch 1 points points"]:
        """Returns the saliency S of every point: positive, 1 in all (section 3.1, saliency network)."""
        rated = self.rate(self.saliency(shrunk(images, self.config.saliency_size))).float()
        points = (self.config.num_points, self.config.num_points)
        rated = F.interpolate(rated, size=points, mode="bilinear", align_corners=False)
        return rated.flatten(1).softmax(dim=1).view(-1, 1, *points)

    def grid(self, saliency: Float[Tensor, "batch 1 points points"]) -> Float[Tensor, "batch size size 2"]:
        """Returns where to sample: every point is pulled towards salient ones (equations 2 and 3).

        Mass and pull are convolutions with a Gaussian, which is separable: one matrix from each side.
        """
        pull, count = self.get_buffer("pull"), saliency.shape[-1]
        margin = (pull.shape[1] - count) // 2
        # the map goes on beyond its edges, as it is there, and so do the places of its points
        weights = F.pad(saliency, (margin,) * 4, mode="replicate")[:, 0]
        long = torch.arange(-margin, count + margin, device=saliency.device) * (2 / (count - 1)) - 1
        mass = (pull @ weights @ pull.T).clamp_min(1e-12)
        across, down = pull @ (weights * long) @ pull.T, pull @ (weights * long[:, None]) @ pull.T
        pulled = torch.stack((across, down), dim=1) / mass[:, None]
        size = (self.config.sampled_size, self.config.sampled_size)
        pulled = F.interpolate(pulled, size=size, mode="bilinear", align_corners=True)
        return pulled.permute(0, 2, 3, 1).clamp(-1, 1)

    def bent(self, images: Tensor) -> Float[Tensor, "batch channels size size"]:
        """Senses the scene by the bent grid: what the classifier sees (equation 1)."""
        if not self.config.sampler:
            return shrunk(images, self.config.sampled_size)
        saliency = self.map(images)
        with torch.autocast(images.device.type, enabled=False):  # bfloat16 is too coarse for places
            return F.grid_sample(images, self.grid(saliency), align_corners=True)

    def answer(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Bends the scene and classifies it."""
        return self.classifier(self.task(self.bent(images))).float()

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Cross-entropy; its gradient bends the grid (section 3.2)."""
        return {"classification": F.cross_entropy(self.answer(images), labels)}

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Senses the whole scene once, at fewer pixels than it has."""
        size = (self.config.sampled_size, self.config.sampled_size)
        return SceneTrace.of([whole_boxes(len(images), images.device)], [[size]], [self.answer(images)])


def attraction(width: int, count: int) -> Float[Tensor, "points longer"]:
    """Returns how a row of points is pulled by a longer row, which goes on beyond its ends, by a Gaussian.

    Args:
        width: Of the Gaussian at half of its height, in points.
        count: Points; the longer row has as many again, but one, at either end.
    """
    margin = count - 1
    distances = torch.arange(count + 2 * margin) - torch.arange(margin, margin + count)[:, None]
    near = torch.exp(-4 * torch.log(torch.tensor(2.0)) * (distances / width) ** 2)
    return near * (distances.abs() <= margin)
