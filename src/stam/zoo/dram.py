"""DRAM: Ba, Mnih, Kavukcuoglu, "Multiple Object Recognition with Visual Attention", ICLR 2015.

The whole scene at low resolution (the paper's context network) starts the second of two recurrent networks,
which says where to look (its emission network); the first one, which never sees that context, joins what
the glimpse network makes of each glimpse, and the classification network reads it. Training is the paper's
"Learning where and what". Table 1 of the STAM paper has it with eight glimpses of 77 pixels, as later
authors ran it.

Departs from the paper:
- the classifier is trained after every glimpse, so that each can be evaluated (the paper: once an object);
- the policy's gradient ends at the second network, so that it does not disturb the classifier;
- the mean of the policy goes through tanh; Adam with a cosine, instead of momentum;
- on photographs the glimpse network is a DeiT at one scale, where the paper has three convolutions at two.
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
from stam.zoo.sensing import pyramid, retina, retina_boxes, shrunk
from stam.zoo.system import RANDOM, Stage, System, SystemConfig, draw_places, is_right

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DramConfig(SystemConfig):
    """DRAM's settings.

    Attributes:
        glimpse_size: Pixels of each square of a glimpse.
        num_scales: Squares of a glimpse; each spans twice the one before.
        context_size: Pixels of the whole scene that the context network sees.
        hidden_width: Width of both recurrent networks.
        location_std: Standard deviation of the policy in training.
        backbone: The glimpse network: conv or deit-tiny.
    """

    glimpse_size: int = 77
    num_scales: int = 1
    context_size: int = 28
    hidden_width: int = 512
    location_std: float = 0.1
    num_glimpses: int = 8
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {
        "glimpse_size": 12,
        "num_scales": 3,
        "context_size": 15,
        "location_std": 0.15,
        "hidden_width": 256,
        "num_glimpses": 6,
        "backbone": "conv",
    }

    def __post_init__(self) -> None:
        """Checks what the backbone can take."""
        super().__post_init__()
        one = self.backbone == "conv" or self.num_scales == 1
        require(one, f"num_scales {self.num_scales} needs the backbone conv: a DeiT takes one scale")


class Dram(System):
    """The deep recurrent attention model."""

    name, paper, settings = "dram", "Ba et al. 2015", DramConfig
    whole_to_attend, whole_to_classify = True, False
    _looks = ("what", "from_what", "from_where", "first", "classifier")
    _places = ("context", "from_context", "second", "locator", "baseline")
    stages = (Stage("together", 1.0, (*_looks, *_places)),)

    def __init__(self, config: DramConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_width
        self.what = Backbone(config.backbone, config.glimpse_size, config.channels * config.num_scales)
        self.from_what = nn.Linear(self.what.width, hidden)  # G_image of the glimpse network
        self.from_where = nn.Linear(2, hidden)  # G_loc
        self.first = nn.LSTMCell(hidden, hidden)  # r(1), which the classifier reads
        self.classifier = nn.Linear(hidden, config.num_classes)  # O
        self.context = Backbone("conv", config.context_size, config.channels)  # C
        self.from_context = nn.Linear(self.context.width, hidden)
        self.second = nn.LSTMCell(hidden, hidden)  # r(2), which the emission network reads
        self.locator = nn.Linear(hidden, 2)  # E
        self.baseline = nn.Linear(hidden, 1)

    def begin(self, images: Tensor) -> tuple[State, State]:
        """Returns the empty r(1), and r(2) as the context starts it: it alone sees the whole scene."""
        nothing = images.new_zeros(len(images), self.config.hidden_width)
        context = self.from_context(self.context(shrunk(images, self.config.context_size)))
        return (nothing, nothing), (torch.tanh(context).float(), nothing)

    def step(self, levels: list[Tensor], places: Float[Tensor, "batch 2"], first: State) -> State:
        """Senses at some places; g = G_image(x) * G_loc(l) goes into r(1) (the glimpse network)."""
        what = F.relu(self.from_what(self.what(retina(levels, places, self.config.glimpse_size))))
        return self.first(what * F.relu(self.from_where(places)), first)

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Cross-entropy, and REINFORCE with a learned baseline ("Learning where and what")."""
        levels = pyramid(images, self.config.num_scales)
        first, second = self.begin(images)
        answers, scores, baselines = [], [], []
        for number in range(self.config.num_glimpses):
            means = torch.tanh(self.locator(second[0]).float())
            places, score = draw_places(means, self.config.location_std, random)
            scores.append(score)
            baselines.append(self.baseline(second[0].detach()).squeeze(1))
            first = self.step(levels, places, first)
            answers.append(self.classifier(first[0]))
            if number + 1 < self.config.num_glimpses:
                second = self.second(first[0].detach(), second)
        scale = self.config.location_std**2
        reward = is_right(answers[-1], labels)[:, None]
        baseline = torch.stack(baselines, dim=1).float()
        return {
            "classification": torch.stack([F.cross_entropy(each.float(), labels) for each in answers]).mean(),
            # scaled so that a few large scores do not shorten all gradients; Adam does not see the scale
            "policy": -scale * (torch.stack(scores, dim=1) * (reward - baseline.detach())).sum(dim=1).mean(),
            "baseline": F.mse_loss(baseline, reward.expand_as(baseline)),
        }

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Looks where the policy's mean says, the first time by the context alone."""
        config = self.config
        levels = pyramid(images, config.num_scales)
        first, second = self.begin(images)
        boxes, answers = [], []
        for _ in range(num_glimpses):
            places = torch.tanh(self.locator(second[0]).float())
            if policy == RANDOM:
                places = 2 * random.uniform((len(images), 2), images.device) - 1
            boxes.append(retina_boxes(places, config.glimpse_size, config.num_scales, self.facts.image_size))
            first = self.step(levels, places, first)
            answers.append(self.classifier(first[0]))
            second = self.second(first[0], second)
        size = [(config.glimpse_size, config.glimpse_size)] * config.num_scales
        return SceneTrace.of(boxes, [size] * num_glimpses, answers)
