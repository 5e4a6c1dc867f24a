"""GFNet: Wang, Lv, Huang, Song, Yang, Huang, "Glance and Focus", NeurIPS 2020.

The whole scene at low resolution first (glance), then crops of the same size at full resolution (focus),
each where a policy says. A recurrent classifier answers after every look. Three stages, the paper's I to
III: encoders and classifier with random crops; the policy by PPO, all else fixed; encoders and classifier
again, with the policy's crops.

Departs from the paper:
- one update a batch (the authors' K = 1): the ratio of PPO is 1 then, and its clipping never acts;
- the policy reads the encoders' feature vectors, not their maps;
- without the auxiliary losses that keep each encoder a classifier of its own.
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
from stam.zoo.sensing import crop, crop_boxes, inside, shrunk, whole_boxes
from stam.zoo.system import LEARNED, RANDOM, Stage, System, SystemConfig, gaussian_log_probability, normal


@dataclass(frozen=True)
class GfnetConfig(SystemConfig):
    """GFNet's settings, as in its appendix.

    Attributes:
        glimpse_size: Pixels of the glance, and of a crop.
        hidden_width: Width of the recurrent classifier and of the policy.
        action_std: Standard deviation of the policy in training.
        discount: Of later rewards (gamma).
        clip: How far the ratio of PPO may be from 1.
        value_weight: Weight of the critic's loss.
        backbone: Of both encoders: conv or deit-tiny.
    """

    glimpse_size: int = 96
    hidden_width: int = 512
    action_std: float = 0.25
    discount: float = 0.7
    clip: float = 0.2
    value_weight: float = 0.5
    num_glimpses: int = 5
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {"glimpse_size": 20, "hidden_width": 256, "backbone": "conv"}


class Gfnet(System):
    """Glance and focus."""

    name, paper, settings = "gfnet", "Wang et al. 2020", GfnetConfig
    whole_to_attend = whole_to_classify = True
    stages = (
        Stage("encoders", 0.5, ("glance", "focus", "recurrent", "classifier")),
        Stage("policy", 0.25, ("policy", "actor", "critic")),
        Stage("again", 0.25, ("glance", "focus", "recurrent", "classifier"), rate=0.3),
    )

    def __init__(self, config: GfnetConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_width
        self.glance = Backbone(config.backbone, config.glimpse_size, config.channels)  # f_G
        self.focus = Backbone(config.backbone, config.glimpse_size, config.channels)  # f_L
        self.recurrent = nn.GRUCell(self.focus.width, hidden)  # f_C
        self.classifier = nn.Linear(hidden, config.num_classes)
        self.policy = nn.GRUCell(self.focus.width, hidden)  # pi
        self.actor = nn.Linear(hidden, 2)
        self.critic = nn.Linear(hidden, 1)

    def encode(self, images: Tensor, places: Float[Tensor, "batch 2"] | None) -> Tensor:
        """Returns the features of the glance, or of crops at places."""
        size = self.config.glimpse_size
        if places is None:
            return self.glance(shrunk(images, size))
        return self.focus(crop(images, inside(places, size, self.facts.image_size), size))

    def episode(
        self, images: Tensor, num_glimpses: int, way: str, random: RandomSource
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Returns answers and values after each look, then the policy's means and the places taken.

        Args:
            images: Scenes.
            num_glimpses: Looks to take.
            way: `random` places, the policy's `learned` means, or `drawn` around them.
            random: Source of randomness.
        """
        answers, values, means, taken = [], [], [], []
        memory = state = images.new_zeros(len(images), self.config.hidden_width)
        places = None
        for number in range(num_glimpses):
            features = self.encode(images, places)
            memory = self.recurrent(features, memory)
            answers.append(self.classifier(memory).float())
            state = self.policy(features.detach(), state)
            values.append(self.critic(state).squeeze(1).float())
            if number + 1 == num_glimpses:
                break
            means.append(torch.tanh(self.actor(state).float()))
            action = means[-1].detach()
            if way == RANDOM:
                action = 2 * random.uniform((len(images), 2), images.device) - 1
            elif way != LEARNED:
                noise = normal(random, tuple(action.shape), action.device)
                action = (action + self.config.action_std * noise).clamp(-1, 1)
            taken.append(action)
            places = action
        return answers, values, means, taken

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Cross-entropy after every look; in stage II, PPO for the gain in the true class's probability."""
        count = self.config.num_glimpses
        if stage != "policy":
            way = RANDOM if stage == "encoders" else LEARNED
            answers = self.episode(images, count, way, random)[0]
            return {"classification": torch.stack([F.cross_entropy(each, labels) for each in answers]).mean()}
        answers, values, means, taken = self.episode(images, count, "drawn", random)
        each = torch.stack(answers, dim=1).detach().softmax(dim=-1)  # (B, n, C)
        right = each.gather(2, labels.view(-1, 1, 1).expand(-1, count, 1)).squeeze(2)
        rewards = right[:, 1:] - right[:, :-1]  # of each place: what its crop added
        value, returns = torch.stack(values[:-1], dim=1), torch.zeros_like(rewards)
        following = torch.zeros_like(rewards[:, 0])
        for step in reversed(range(count - 1)):
            following = rewards[:, step] + self.config.discount * following
            returns[:, step] = following
        advantage = returns - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-5)
        score = gaussian_log_probability(
            torch.stack(taken, dim=1), torch.stack(means, dim=1), self.config.action_std
        )
        ratio = (score - score.detach()).exp()
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        return {
            "policy": -torch.minimum(ratio * advantage, clipped * advantage).mean(),
            "value": self.config.value_weight * F.mse_loss(value, returns),
        }

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Glances, then focuses where the policy's mean says."""
        size = self.config.glimpse_size
        answers, _, _, places = self.episode(images, num_glimpses, policy, random)
        image_size = self.facts.image_size
        boxes = [crop_boxes(inside(place, size, image_size), size, image_size)[:, None] for place in places]
        whole = whole_boxes(len(images), images.device)
        return SceneTrace.of([whole, *boxes], [[(size, size)]] * num_glimpses, answers)
