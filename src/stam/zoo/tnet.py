"""TNet: Papadopoulos, Korus, Memon, "Hard-Attention for Scalable Image Classification", NeurIPS 2021.

The whole scene at low resolution gives features (the feature extraction module) and, from its feature map,
a rating of every cell of a grid (the location module). The best cells are then sensed at full resolution.
The features of all looks, each with the position it was sensed at (the positional encoding module), are
averaged and classified (the classification module). The location module is trained by REINFORCE (the
paper's learning rule). Every feature vector is also classified and rewarded alone, the paper's per-feature
regularisation, which tells the location module which of its cells was worth it.

Departs from the paper:
- one level of attention, as it has for ImageNet; the paper can go into the cells of cells;
- a position is encoded by a linear layer, where the paper has sines;
- the joint answer is trained after every look, so that each number can be evaluated;
- the baseline of REINFORCE is the batch's mean reward, where the paper has a moving average.
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
from stam.zoo.sensing import crop_boxes, crops, grid_places, inside, shrunk, whole_boxes
from stam.zoo.system import LEARNED, RANDOM, Stage, System, SystemConfig, is_right, sample


@dataclass(frozen=True)
class TnetConfig(SystemConfig):
    """TNet's settings.

    Attributes:
        glimpse_size: Pixels of the whole view, and of a cell.
        num_cells: Cells in a row, and rows; they overlap so as to cover the scene.
        location_width: Width of the location module.
        joint_weight: Weight of all looks together, in cross-entropy and in rewards; each look alone has the
            rest.
        policy_weight: Weight of REINFORCE.
        num_glimpses: The whole view and the cells after it.
        backbone: The encoder: conv or deit-tiny.
    """

    glimpse_size: int = 77
    num_cells: int = 5
    location_width: int = 128
    joint_weight: float = 0.3
    policy_weight: float = 0.1
    num_glimpses: int = 6
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {"glimpse_size": 20, "num_glimpses": 4, "backbone": "conv"}

    def __post_init__(self) -> None:
        """Checks that there are cells enough."""
        super().__post_init__()
        most = 1 + self.num_cells**2
        require(self.num_glimpses <= most, f"num_glimpses {self.num_glimpses} is more than {most}, all cells")


class Tnet(System):
    """The traversal network."""

    name, paper, settings = "tnet", "Papadopoulos et al. 2021", TnetConfig
    whole_to_attend = whole_to_classify = True
    stages = (Stage("together", 1.0, ("encoder", "location", "position", "classifier")),)

    def __init__(self, config: TnetConfig) -> None:
        super().__init__(config)
        self.encoder = Backbone(config.backbone, config.glimpse_size, config.channels)
        width, hidden = self.encoder.width, config.location_width
        self.location = nn.Sequential(
            *(nn.Conv2d(self.encoder.map_width, hidden, 3, padding=1), nn.ReLU()),
            nn.Conv2d(hidden, 1, 1),
        )
        self.position = nn.Linear(3, width)  # where, and at which scale, a look was taken
        self.classifier = nn.Linear(width, config.num_classes)

    def begin(self, images: Tensor) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch cells"]]:
        """Senses the whole scene; returns its features and the logits of every cell (the location module)."""
        features, places = self.encoder.with_map(shrunk(images, self.config.glimpse_size))
        cells = F.adaptive_avg_pool2d(places.float(), self.config.num_cells)
        return features, self.location(cells.detach()).flatten(1).float()

    def choose(
        self, logits: Float[Tensor, "batch cells"], count: int, way: str, random: RandomSource
    ) -> tuple[Int[Tensor, "batch chosen"], Float[Tensor, "batch chosen"]]:
        """Picks different cells; returns them and the log-probability of each."""
        chosen, scores = [logits.new_zeros(len(logits), 0, dtype=torch.long)], [logits[:, :0]]
        if way == RANDOM:
            logits = torch.zeros_like(logits)
        for _ in range(count):
            cell = logits.argmax(dim=1) if way == LEARNED else sample(logits.softmax(dim=1), random)
            scores.append(logits.log_softmax(dim=1).gather(1, cell[:, None]))
            chosen.append(cell[:, None])
            logits = logits.scatter(1, cell[:, None], -1e9)
        return torch.cat(chosen, dim=1), torch.cat(scores, dim=1)

    def classify(
        self, images: Tensor, whole: Tensor, cells: Int[Tensor, "batch chosen"]
    ) -> tuple[Float[Tensor, "batch looks classes"], Float[Tensor, "batch looks classes"]]:
        """Senses cells; returns the answers after each look, and those of each look alone.

        Feature extraction, positional encoding and classification modules.
        """
        size = self.config.glimpse_size
        places = inside(self._cells(images.device), size, self.facts.image_size)[cells]  # (B, k, 2)
        features = whole[:, None]
        if cells.shape[1]:
            features = torch.cat((features, self.encoder.each(crops(images, places, size))), dim=1)
        zoom = torch.cat((places, torch.ones_like(places[..., :1])), dim=2)
        where = self.position(
            torch.cat((torch.zeros_like(features[:, :1, :3]), zoom), dim=1).to(features.dtype)
        )
        placed = features + where
        counts = torch.arange(1, placed.shape[1] + 1, device=images.device)[:, None]
        return self.classifier(placed.cumsum(dim=1) / counts).float(), self.classifier(placed).float()

    def _cells(self, device: torch.device) -> Float[Tensor, "cells 2"]:
        return grid_places(self.config.num_cells, device)

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """The learning rule, with per-feature regularisation: of all looks together, and of each alone."""
        whole, logits = self.begin(images)
        cells, scores = self.choose(logits, self.config.num_glimpses - 1, "drawn", random)
        answers, alone = self.classify(images, whole, cells)
        each, share = labels[:, None].expand(-1, answers.shape[1]), self.config.joint_weight
        joint = is_right(answers[:, -1], labels)[:, None]
        own = is_right(alone[:, 1:], each[:, 1:])  # (B, cells)
        # all cells share the joint reward, and each has its own, by the mean over cells
        gain = share * (joint - joint.mean()) + (1 - share) * (own - own.mean()) / own.shape[1]
        flat = each.flatten()
        return {
            "classification": share * F.cross_entropy(answers.flatten(0, 1), flat),
            "features": (1 - share) * F.cross_entropy(alone.flatten(0, 1), flat),
            "policy": -self.config.policy_weight * (scores * gain).sum(dim=1).mean(),
        }

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Senses the whole scene, then the cells rated highest."""
        size, image_size = self.config.glimpse_size, self.facts.image_size
        whole, logits = self.begin(images)
        cells, _ = self.choose(logits, num_glimpses - 1, policy, random)
        answers, _ = self.classify(images, whole, cells)
        all_boxes = crop_boxes(inside(self._cells(images.device), size, image_size), size, image_size)
        boxes = [box[:, None] for box in all_boxes[cells].unbind(dim=1)]
        first = whole_boxes(len(images), images.device)
        return SceneTrace.of([first, *boxes], [[(size, size)]] * num_glimpses, list(answers.unbind(dim=1)))
