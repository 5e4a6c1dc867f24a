"""A system to copy: random crops of a scene, whose answers are averaged. See docs/zoo.md, "Add your own".

It is no system of a paper and `stam train` does not know it: a new one is a file like this in `stam/zoo`,
named as the system, with a class named as the file, and its name in `stam.zoo.saving.TITLES`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.looker import SceneTrace
from stam.model.randomness import RandomSource
from stam.shapes import Float, Int
from stam.zoo.backbone import Backbone
from stam.zoo.sensing import crop_boxes, crops, inside
from stam.zoo.system import Stage, System, SystemConfig


@dataclass(frozen=True)
class TemplateConfig(SystemConfig):
    """Settings, with the paper's values as defaults.

    Attributes:
        glimpse_size: Pixels of a crop's side.
        backbone: What encodes a crop: conv or deit-tiny.
    """

    glimpse_size: int = 96
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {"glimpse_size": 20, "backbone": "conv"}  # for .npz digits


class Template(System):
    """Crops at random places."""

    name, paper, settings = "template", "nobody", TemplateConfig
    whole_to_attend = whole_to_classify = False  # what the paper's Table 1 asks
    stages = (Stage("together", 1.0, ("encoder", "classifier")),)

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__(config)
        self.encoder = Backbone(config.backbone, config.glimpse_size, config.channels)
        self.classifier = nn.Linear(self.encoder.width, config.num_classes)

    def answers(self, images: Tensor, places: Float[Tensor, "batch looks 2"]) -> list[Tensor]:
        """Returns the logits after each look: the mean of those of all crops so far."""
        logits = self.classifier(self.encoder.each(crops(images, places, self.config.glimpse_size))).float()
        counts = torch.arange(1, places.shape[1] + 1, device=images.device)[:, None]
        return list((logits.cumsum(dim=1) / counts).unbind(dim=1))

    def places(self, images: Tensor, count: int, random: RandomSource) -> Float[Tensor, "batch looks 2"]:
        """Draws where to look, one look after the other, so that fewer looks are the first of more."""
        drawn = [2 * random.uniform((len(images), 2), images.device) - 1 for _ in range(count)]
        size = self.config.glimpse_size
        return torch.stack([inside(each, size, self.facts.image_size) for each in drawn], dim=1)

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Cross-entropy after every look. Nothing may wait for a GPU: no `.item()`, no `if` on a tensor."""
        answers = self.answers(images, self.places(images, self.config.num_glimpses, random))
        return {"classification": torch.stack([F.cross_entropy(each, labels) for each in answers]).mean()}

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Looks, and says for each look what was sensed, at which size, and the answer after it."""
        places, size = self.places(images, num_glimpses, random), self.config.glimpse_size
        boxes = [crop_boxes(place, size, self.facts.image_size)[:, None] for place in places.unbind(dim=1)]
        return SceneTrace.of(boxes, [[(size, size)]] * num_glimpses, self.answers(images, places))
