"""RAM: Mnih, Heess, Graves, Kavukcuoglu, "Recurrent Models of Visual Attention", NIPS 2014.

A retina senses squares of growing extent at a continuous place, the finest sharp, the others ever coarser.
A recurrent network joins the glimpses; a Gaussian policy says where to look next (section 3.1). Nothing
sees the whole scene. The policy is trained by REINFORCE from one reward: whether the answer after the last
glimpse is right. All else is trained by the cross-entropy of that answer (section 3.2).

Departs from the paper:
- the mean of the policy goes through tanh, so that it stays in the scene;
- a second classifier answers after each glimpse but the last, so that each can be evaluated. It reads states
  without changing them: the paper's loss is as it was;
- initial weights are scaled for ReLU (He et al.), recurrent ones orthogonal: far fewer updates at first;
- Adam with a cosine, instead of momentum with an annealed rate.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.looker import SceneTrace
from stam.model.randomness import RandomSource
from stam.shapes import Float, Int
from stam.zoo.sensing import pyramid, retina, retina_boxes
from stam.zoo.system import (
    RANDOM,
    Stage,
    System,
    SystemConfig,
    gaussian_log_probability,
    is_right,
    normal,
)


@dataclass(frozen=True)
class RamConfig(SystemConfig):
    """RAM's settings; the values for cluttered MNIST are those of section 4.1.

    Attributes:
        glimpse_size: Pixels of each of the retina's squares.
        num_scales: Squares of a glimpse; each spans twice the one before.
        glimpse_width: Width of the glimpse network's first layers; its result is twice as wide.
        hidden_width: Width of the recurrent state.
        location_std: Standard deviation of the policy in training.
    """

    glimpse_size: int = 32
    num_scales: int = 3
    glimpse_width: int = 128
    hidden_width: int = 256
    location_std: float = 0.1
    num_glimpses: int = 8

    # of 0.15 and 0.22 the smaller standard deviation had the lower training loss
    clutter: ClassVar[dict[str, Any]] = {"glimpse_size": 12, "num_glimpses": 6, "location_std": 0.15}
    least_glimpses: ClassVar[int] = 2  # where to look is learned from the second on


class Ram(System):
    """The recurrent attention model."""

    name, paper, settings = "ram", "Mnih et al. 2014", RamConfig
    whole_to_attend = whole_to_classify = False
    stages = (Stage("together", 1.0, ("glimpse", "core", "classifier", "early", "locator", "baseline")),)

    def __init__(self, config: RamConfig) -> None:
        super().__init__(config)
        pixels = config.channels * config.num_scales * config.glimpse_size**2
        first, second, hidden = config.glimpse_width, 2 * config.glimpse_width, config.hidden_width
        self.glimpse = nn.ModuleDict(  # f_g: "what" and "where", joined (section 4.1)
            {
                "what": for_relu(pixels, first),
                "where": for_relu(2, first),
                "from_what": for_relu(first, second),
                "from_where": for_relu(first, second),
            }
        )
        state = nn.Linear(hidden, hidden)
        nn.init.orthogonal_(state.weight)
        self.core = nn.ModuleDict({"state": state, "input": for_relu(second, hidden)})  # f_h
        self.classifier = nn.Linear(hidden, config.num_classes)  # f_a
        self.early = nn.Linear(hidden, config.num_classes)  # the same before the last glimpse
        self.locator = nn.Linear(hidden, 2)  # f_l
        self.baseline = nn.Linear(hidden, 1)  # b_t, section 3.2

    def step(self, levels: list[Tensor], places: Float[Tensor, "batch 2"], state: Tensor) -> Tensor:
        """Senses at some places and returns the next recurrent state h_t (section 3.1)."""
        pixels = retina(levels, places, self.config.glimpse_size).flatten(1)
        what, where = F.relu(self.glimpse["what"](pixels)), F.relu(self.glimpse["where"](places))
        glimpse = F.relu(self.glimpse["from_what"](what) + self.glimpse["from_where"](where))
        return F.relu(self.core["state"](state) + self.core["input"](glimpse))

    def _first(self, images: Tensor, random: RandomSource) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns the levels of the scenes, random first places, and the empty state."""
        levels = pyramid(images, self.config.num_scales)
        places = 2 * random.uniform((len(images), 2), images.device) - 1
        return levels, places, images.new_zeros(len(images), self.config.hidden_width)

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """The hybrid loss of section 3.2: cross-entropy for all but the locator, REINFORCE for that."""
        count, std, batch = self.config.num_glimpses, self.config.location_std, len(images)
        levels, places, state = self._first(images, random)
        noise = std * normal(random, (batch, count - 1, 2), images.device)
        states, means, draws = [], [], []
        for number in range(count - 1):
            state = self.step(levels, places, state)
            states.append(state.detach())  # locator and baseline do not change what they read
            means.append(torch.tanh(self.locator(states[-1])))
            draws.append((means[-1] + noise[:, number]).detach())
            places = draws[-1].clamp(-1, 1)  # sensed at the edge, but scored as drawn
        answer = self.classifier(self.step(levels, places, state))
        seen = torch.stack(states, dim=1)  # (B, n - 1, D)
        early, each = self.early(seen), labels[:, None].expand(-1, count - 1)
        reward = is_right(answer, labels)[:, None]  # R = 1 or 0, after the last glimpse
        baseline = self.baseline(seen).squeeze(2)  # b_t
        score = gaussian_log_probability(torch.stack(draws, dim=1), torch.stack(means, dim=1), std)
        return {
            "classification": F.cross_entropy(answer, labels),
            "early": F.cross_entropy(early.flatten(0, 1), each.flatten()),
            # equation 2 with a baseline; scaled so that a few large scores do not shorten all gradients,
            # which Adam does not see
            "policy": -(std**2) * (score * (reward - baseline.detach())).sum(dim=1).mean(),
            "baseline": F.mse_loss(baseline, reward.expand_as(baseline)),
        }

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Looks where the policy's mean says, from a random place on."""
        config = self.config
        levels, places, state = self._first(images, random)
        boxes, answers = [], []
        for number in range(1, num_glimpses + 1):
            boxes.append(retina_boxes(places, config.glimpse_size, config.num_scales, self.facts.image_size))
            state = self.step(levels, places, state)
            answers.append((self.classifier if number == config.num_glimpses else self.early)(state))
            places = torch.tanh(self.locator(state))
            if policy == RANDOM:
                places = 2 * random.uniform((len(images), 2), images.device) - 1
        size = [(config.glimpse_size, config.glimpse_size)] * config.num_scales
        return SceneTrace.of(boxes, [size] * num_glimpses, answers)


def for_relu(inputs: int, outputs: int) -> nn.Linear:
    """Returns a layer whose result, after ReLU, is about as large as what went in (He et al. 2015)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer
