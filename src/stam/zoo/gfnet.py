"""GFNet: Wang, Lv, Huang, Song, Yang, Huang, "Glance and Focus", NeurIPS 2020.

The whole scene at low resolution first (the paper's Glance Step), then crops of the same size at full
resolution (its Focus Stage), each where a policy says. A recurrent classifier answers after every look.
Training has the paper's Stages I to III: encoders and classifier with random crops; the policy by PPO, all
else fixed; encoders and classifier again, with the policy's crops.

Departs from the paper:
- one update a batch, as the authors' code has it: the ratio of PPO is 1 then, and its clipping never acts;
- the policy's mean goes through tanh to -1..1, where the paper has a sigmoid to 0..1: its standard deviation
  is twice as large for that;
- AdamW in all stages, where the paper has SGD for the encoders.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.looker import SceneTrace
from stam.model.randomness import RandomSource
from stam.shapes import Float, Int
from stam.zoo.backbone import Backbone
from stam.zoo.sensing import crop, crop_boxes, inside, shrunk, whole_boxes
from stam.zoo.system import LEARNED, RANDOM, Stage, System, SystemConfig, draw_places

_DRAWN = "drawn"
_MAP_CHANNELS = 32  # of the policy's 1x1 convolution (appendix A, "Implementation Details")


@dataclass(frozen=True)
class GfnetConfig(SystemConfig):
    """GFNet's settings, as in its appendix A, "Implementation Details".

    Attributes:
        glimpse_size: Pixels of the glance, and of a crop.
        hidden_width: Width of the recurrent classifier.
        policy_width: Width of the recurrent policy.
        action_std: Standard deviation of the policy in training, for places in -1..1.
        discount: Of later rewards (gamma).
        clip: How far the ratio of PPO may be from 1.
        value_weight: Weight of the critic's loss.
        alone_weight: Weight of the answers of each look alone (the paper's regularisation, lambda).
        backbone: Of both encoders: conv or deit-tiny.
    """

    glimpse_size: int = 96
    hidden_width: int = 1024
    policy_width: int = 256
    action_std: float = 0.2
    discount: float = 0.7
    clip: float = 0.2
    value_weight: float = 0.5
    alone_weight: float = 1.0
    num_glimpses: int = 5
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {"glimpse_size": 20, "hidden_width": 256, "backbone": "conv"}
    least_glimpses: ClassVar[int] = 2  # where to look is learned from the second on


class Looks(NamedTuple):
    """What an episode leaves: lists with an entry for each look; places and scores begin with the second.

    Attributes:
        answers: Logits of the recurrent classifier.
        alone: Logits of each look alone.
        values: What the critic expects.
        places: Where crops were taken.
        scores: Log-probabilities of drawn places.
    """

    answers: list[Tensor]
    alone: list[Tensor]
    values: list[Tensor]
    places: list[Tensor]
    scores: list[Tensor]


class Gfnet(System):
    """Glance and focus."""

    name, paper, settings = "gfnet", "Wang et al. 2020", GfnetConfig
    whole_to_attend = whole_to_classify = True
    _classify = ("glance", "focus", "recurrent", "classifier", "alone")
    stages = (
        Stage("encoders", 0.5, _classify),  # I
        Stage("policy", 0.25, ("state", "policy", "actor", "critic")),  # II
        Stage("again", 0.25, _classify, rate=0.3),  # III
    )

    def __init__(self, config: GfnetConfig) -> None:
        super().__init__(config)
        hidden, width = config.hidden_width, config.policy_width
        self.glance = Backbone(config.backbone, config.glimpse_size, config.channels)  # f_G
        self.focus = Backbone(config.backbone, config.glimpse_size, config.channels)  # f_L
        self.recurrent = nn.GRUCell(self.focus.width, hidden)  # f_C
        self.classifier = nn.Linear(hidden, config.num_classes)
        self.alone = nn.ModuleList(  # of the glance, of a crop
            [nn.Linear(self.focus.width, config.num_classes) for _ in range(2)]
        )
        self.state = nn.Sequential(
            *(nn.Conv2d(self.focus.map_width, _MAP_CHANNELS, 1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(_MAP_CHANNELS * self.focus.map_side**2, width), nn.ReLU()),
        )
        self.policy = nn.GRUCell(width, width)  # pi
        self.actor = nn.Linear(width, 2)
        self.critic = nn.Linear(width, 1)

    def encode(self, images: Tensor, places: Float[Tensor, "batch 2"] | None) -> tuple[Tensor, Tensor]:
        """Returns the features e_1 = f_G(x_1) of the glance, or e_t = f_L(x_t) of crops, and their map."""
        size = self.config.glimpse_size
        if places is None:
            return self.glance.with_map(shrunk(images, size))
        return self.focus.with_map(crop(images, inside(places, size, self.facts.image_size), size))

    def episode(self, images: Tensor, num_glimpses: int, way: str, random: RandomSource) -> Looks:
        """Looks at scenes.

        Args:
            images: Scenes.
            num_glimpses: Looks to take.
            way: `random` places, the policy's `learned` means, or `drawn` around them.
            random: Source of randomness.
        """
        looks = Looks([], [], [], [], [])
        memory = images.new_zeros(len(images), self.config.hidden_width)
        state = images.new_zeros(len(images), self.config.policy_width)
        places = None
        for number in range(num_glimpses):
            features, places_map = self.encode(images, places)
            memory = self.recurrent(features, memory)  # p_t = f_C(e_1, ..., e_t)
            looks.answers.append(self.classifier(memory).float())
            looks.alone.append(self.alone[min(number, 1)](features).float())
            if number + 1 == num_glimpses:
                break
            if way == RANDOM:
                places = 2 * random.uniform((len(images), 2), images.device) - 1
            else:
                state = self.policy(self.state(places_map.detach()), state)  # l_t ~ pi(. | e_1, ..., e_t)
                looks.values.append(self.critic(state).squeeze(1).float())
                places = torch.tanh(self.actor(state).float())
            if way == _DRAWN:
                places, score = draw_places(places, self.config.action_std, random)
                looks.scores.append(score)
            looks.places.append(places.detach())
        return looks

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Cross-entropy after every look; in stage II, PPO for the gain in the true class's probability."""
        count = self.config.num_glimpses
        if stage != "policy":
            looks = self.episode(images, count, RANDOM if stage == "encoders" else LEARNED, random)
            answers, alone = (
                torch.stack([F.cross_entropy(each, labels) for each in part]).mean()
                for part in (looks.answers, looks.alone)
            )
            return {"classification": answers, "alone": self.config.alone_weight * alone}
        looks = self.episode(images, count, _DRAWN, random)
        each = torch.stack(looks.answers, dim=1).detach().softmax(dim=-1)  # (B, n, C)
        right = each.gather(2, labels.view(-1, 1, 1).expand(-1, count, 1)).squeeze(2)
        rewards = right[:, 1:] - right[:, :-1]  # r_t of a place: what its crop added
        value, following = torch.stack(looks.values, dim=1), torch.zeros_like(rewards[:, 0])
        returns = []
        for reward in reversed(rewards.unbind(dim=1)):
            following = reward + self.config.discount * following
            returns.append(following)
        target = torch.stack(returns[::-1], dim=1)
        advantage = target - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-5)
        score = torch.stack(looks.scores, dim=1)
        ratio = (score - score.detach()).exp()
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        return {
            "policy": -torch.minimum(ratio * advantage, clipped * advantage).mean(),
            "value": self.config.value_weight * F.mse_loss(value, target),
        }

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Glances, then focuses where the policy's mean says."""
        size, image_size = self.config.glimpse_size, self.facts.image_size
        looks = self.episode(images, num_glimpses, policy, random)
        boxes = [
            crop_boxes(inside(place, size, image_size), size, image_size)[:, None] for place in looks.places
        ]
        whole = whole_boxes(len(images), images.device)
        return SceneTrace.of([whole, *boxes], [[(size, size)]] * num_glimpses, looks.answers)
