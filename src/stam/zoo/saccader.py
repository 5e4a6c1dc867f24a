"""Saccader: Elsayed, Kornblith, Le, "Improving Accuracy of Hard Attention Models for Vision", NeurIPS 2019.

A local representation gives features and logits for every place of a grid, each from its own window alone.
A cell with a map of visited places picks places one after the other; the answer is the mean of the logits
there (section 3.1). Three stages (section 3.2): the representation, by the mean of all logits; the places,
to follow the order of the logits of the class that the representation predicts; both, by REINFORCE and
cross-entropy. The baseline of REINFORCE is the batch's mean reward.

Departs from the paper:
- windows are encoded one by one, with a DeiT or a small network, where BagNet-77 shares convolutions among
  them; so there are fewer of them, and the last stage leaves their encoder as it is;
- the attention network has no batch normalisation.
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
from stam.zoo.sensing import all_crops, crop_boxes, grid_places, inside
from stam.zoo.system import LEARNED, RANDOM, Stage, System, SystemConfig, is_right, sample

_NEVER = 1e5  # taken from the logits of visited places (in the cell)


@dataclass(frozen=True)
class SaccaderConfig(SystemConfig):
    """Saccader's settings.

    Attributes:
        glimpse_size: Pixels of a window.
        num_places: Windows in a row, and rows; they lie evenly over the scene.
        attention_width: Width of the attention network's features.
        backbone: What encodes a window: conv or deit-tiny.
    """

    glimpse_size: int = 77
    num_places: int = 6
    attention_width: int = 128
    num_glimpses: int = 6
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {
        "glimpse_size": 20,
        "num_places": 9,
        "num_glimpses": 4,
        "backbone": "conv",
    }

    def __post_init__(self) -> None:
        """Checks that there are places enough."""
        super().__post_init__()
        most = self.num_places**2
        require(self.num_glimpses <= most, f"num_glimpses {self.num_glimpses} is more than the {most} places")


class Saccader(System):
    """The Saccader."""

    name, paper, settings = "saccader", "Elsayed et al. 2019", SaccaderConfig
    whole_to_attend, whole_to_classify = True, False
    stages = (
        Stage("representation", 0.6, ("local", "classifier")),
        Stage("order", 0.2, ("what", "where", "mixed", "attention")),
        Stage("together", 0.2, ("classifier", "what", "where", "mixed", "attention"), rate=0.1),
    )

    def __init__(self, config: SaccaderConfig) -> None:
        super().__init__(config)
        width = config.attention_width
        self.local = Backbone(config.backbone, config.glimpse_size, config.channels)
        self.classifier = nn.Linear(self.local.width, config.num_classes)
        self.what = nn.Conv2d(self.local.width, width, 1)
        self.where = nn.Sequential(  # the attention network: 1x1, then 3x3 with holes, twice
            *(nn.Conv2d(self.local.width, width, 1), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.ReLU()),
            *(nn.Conv2d(width, width, 1), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.ReLU()),
        )
        self.mixed = nn.Conv2d(2 * width, width, 1)
        self.attention = nn.ParameterList(
            [nn.Parameter(torch.randn(width) / width**0.5)]
        )  # the cell's vector a

    def represent(self, images: Tensor) -> tuple[Float[Tensor, "batch places width"], Tensor]:
        """Returns the features and the logits of every window."""
        features = self.local.each(all_crops(images, self.config.num_places, self.config.glimpse_size))
        return features, self.classifier(features).float()

    def attend(
        self, features: Float[Tensor, "batch places width"]
    ) -> Float[Tensor, "batch places attention"]:
        """Returns the attention network's features D of every place."""
        side = self.config.num_places
        grid = features.transpose(1, 2).unflatten(2, (side, side))
        return (
            self.mixed(torch.cat((self.what(grid), self.where(grid)), dim=1))
            .flatten(2)
            .transpose(1, 2)
            .float()
        )

    def rate(self, attended: Tensor, visited: Float[Tensor, "batch places"]) -> Float[Tensor, "batch places"]:
        """Returns the logits of the next place: the Saccader cell."""
        scale = attended.shape[2] ** -0.5
        first = (attended @ self.attention[0]) * scale - _NEVER * visited
        summary = (first.softmax(dim=1)[..., None] * attended).sum(dim=1)  # (B, attention)
        channels = summary.softmax(dim=1)  # which features count
        return (attended @ channels[..., None]).squeeze(2) - _NEVER * visited

    def visit(
        self, attended: Tensor, count: int, way: str, random: RandomSource
    ) -> tuple[Int[Tensor, "batch looks"], Float[Tensor, " batch"]]:
        """Picks places one after the other; returns them and the log-probability of the whole choice."""
        visited = torch.zeros_like(attended[..., 0])
        picked, score = [], torch.zeros_like(visited[:, 0])
        for _ in range(count):
            logits = self.rate(attended, visited)
            if way == RANDOM:
                logits = -_NEVER * visited
            chances = logits.softmax(dim=1)
            place = chances.argmax(dim=1) if way == LEARNED else sample(chances, random)
            score = score + logits.log_softmax(dim=1).gather(1, place[:, None]).squeeze(1)
            picked.append(place)
            visited = visited.scatter(1, place[:, None], 1.0)
        return torch.stack(picked, dim=1), score

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """The losses of the three stages."""
        features, logits = self.represent(images)
        if stage == "representation":
            return {"classification": F.cross_entropy(logits.mean(dim=1), labels)}
        attended, count = self.attend(features.detach()), self.config.num_glimpses
        if stage == "order":  # twice as many places as are visited later: 12, as in the authors' code
            predicted = logits.detach().mean(dim=1).argmax(dim=1).view(-1, 1, 1)
            rated = logits.detach().gather(2, predicted.expand(-1, logits.shape[1], 1)).squeeze(2)
            order = rated.argsort(dim=1, descending=True)[:, : 2 * count]
            visited, each = torch.zeros_like(rated), []
            for place in order.unbind(dim=1):
                each.append(F.cross_entropy(self.rate(attended, visited), place))
                visited = visited.scatter(1, place[:, None], 1.0)
            return {"order": torch.stack(each).mean()}
        places, score = self.visit(attended, count, "drawn", random)
        answer = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[2])).mean(dim=1)
        reward = is_right(answer, labels)
        return {
            "classification": F.cross_entropy(answer, labels),
            "policy": -(score * (reward - reward.mean())).mean() / count,
        }

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Visits the likeliest place that was not visited yet, and averages the logits there."""
        features, logits = self.represent(images)
        picked, _ = self.visit(self.attend(features), num_glimpses, policy, random)
        chosen = logits.gather(1, picked[..., None].expand(-1, -1, logits.shape[2]))
        counts = torch.arange(1, num_glimpses + 1, device=images.device)[:, None]
        answers = (chosen.cumsum(dim=1) / counts).unbind(dim=1)
        size, image_size = self.config.glimpse_size, self.facts.image_size
        places = inside(grid_places(self.config.num_places, images.device), size, image_size)
        boxes = crop_boxes(places, size, image_size)[picked]  # (B, n, 4)
        each = [box[:, None] for box in boxes.unbind(dim=1)]
        return SceneTrace.of(each, [[(size, size)]] * num_glimpses, list(answers))
