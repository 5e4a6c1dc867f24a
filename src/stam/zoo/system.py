"""What every system of the zoo is: a module with settings that looks at scenes and says its losses.

A file of the zoo holds one system: its settings with the paper's values, its sensor, its model, the losses
of each stage of its training. What systems share is here and in `sensing`, `backbone` and `training`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stam.config import require_sensible_numbers
from stam.errors import StamError, require
from stam.model.looker import Facts, SceneTrace
from stam.model.randomness import Randomness, RandomSource, random_source
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD
from stam.shapes import Float, Int
from stam.zoo.backbone import Backbone

LEARNED, RANDOM = "learned", "random"


@dataclass(frozen=True)
class Stage:
    """A part of a training.

    Attributes:
        name: What it is called in the metrics.
        share: Its share of all batches.
        trains: Modules of the system whose parameters are updated; nothing else changes.
        rate: Its learning rate over that of the run.
    """

    name: str
    share: float
    trains: tuple[str, ...]
    rate: float = 1.0


@dataclass(frozen=True)
class SystemConfig:
    """What every system needs to be built.

    Attributes:
        num_classes: Classes to tell apart; they come from the data.
        labels: Class names.
        image_size: Side of a scene in pixels.
        grey: Whether a scene is reduced to one channel.
        num_glimpses: Looks in a scene.
        mean: Channel means of the normalisation.
        std: Channel standard deviations.
        preprocess_size: What the shorter side of an image becomes before its centre is cropped to
            `image_size`; none resizes straight to it. It comes from the data.
    """

    num_classes: int = 10
    labels: tuple[str, ...] = ()
    image_size: int = 224
    grey: bool = False
    num_glimpses: int = 6
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    preprocess_size: int | None = None

    def __post_init__(self) -> None:
        """Checks every setting before anything is built from it."""
        require_sensible_numbers(self)
        for name, value in vars(self).items():
            if value is not None and (name.startswith("num_") or name.endswith(("_size", "width"))):
                require(value >= 1, f"{name} must be at least 1, got {value}")
        least = self.least_glimpses
        require(self.num_glimpses >= least, f"num_glimpses must be at least {least}, got {self.num_glimpses}")
        require(
            len(self.labels) in (0, self.num_classes),
            f"labels must name all {self.num_classes} classes or none, got {len(self.labels)}",
        )

    @property
    def channels(self) -> int:
        """Channels that the system senses."""
        return 1 if self.grey else 3

    @classmethod
    def for_clutter(cls) -> "SystemConfig":
        """Returns the settings for cluttered translated MNIST: grey scenes of 60 pixels, a small network."""
        return cls(**(GREY_60 | cls.clutter))

    clutter: ClassVar[dict[str, Any]] = {}
    least_glimpses: ClassVar[int] = 1


GREY_60: dict[str, Any] = {"image_size": 60, "grey": True, "mean": (0.0,) * 3, "std": (1.0,) * 3}


class System(nn.Module, ABC):
    """A hard-attention system that can be trained and evaluated beside STAM.

    Attributes:
        name: What the zoo calls it.
        paper: Authors and year.
        whole_to_attend: Whether the complete image is used to choose where to look.
        whole_to_classify: Whether the complete image is used to classify.
        stages: Its training.
        settings: The class of its settings.
        policies: Ways to choose where to look: its own, and a random one to compare with.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    whole_to_attend: ClassVar[bool]
    whole_to_classify: ClassVar[bool]
    stages: ClassVar[tuple[Stage, ...]]
    settings: ClassVar[type[SystemConfig]]
    policies: ClassVar[tuple[str, ...]] = (LEARNED, RANDOM)
    episodic: ClassVar[None] = None

    def __init__(self, config: SystemConfig) -> None:
        super().__init__()
        self.config: Any = config
        # how far its stage is, 0 to 1: a tensor, so that a CUDA graph reads what it is now
        self.register_buffer("progress", torch.zeros(()), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.get_buffer("progress").device

    @property
    def most_glimpses(self) -> int:
        """The most looks it can take."""
        return self.config.num_glimpses

    @property
    def facts(self) -> Facts:
        """What a comparison must know."""
        config = self.config
        return Facts(
            labels=config.labels or tuple(str(number) for number in range(config.num_classes)),
            image_size=(config.image_size, config.image_size),
            most_glimpses=self.most_glimpses,
            whole_to_attend=self.whole_to_attend,
            whole_to_classify=self.whole_to_classify,
            policy=LEARNED,
            policies=self.policies,
            mean=config.mean,
            std=config.std,
            resize_size=config.preprocess_size,
        )

    def ready(self, fast: bool = True) -> "System":
        """Returns the system, ready to look: here itself."""
        return self

    @torch.no_grad()
    def look(
        self,
        images: Float[Tensor, "batch 3 height width"],
        num_glimpses: int,
        *,
        policy: str | None = None,
        generator: Randomness = None,
    ) -> SceneTrace:
        """Looks at normalised scenes and returns what was sensed and thought after each look."""
        facts = self.facts
        facts.require_num_glimpses(num_glimpses)
        facts.require_policy(policy or LEARNED)
        if tuple(images.shape[2:]) != facts.image_size:
            raise StamError(
                f"expected scenes of {facts.image_size[0]}x{facts.image_size[1]} pixels, "
                f"got {tuple(images.shape)}: resize and crop them"
            )
        scenes = self.prepared(images.to(self.device))
        return self.rollout(scenes, num_glimpses, policy or LEARNED, random_source(generator))

    def prepared(self, images: Float[Tensor, "batch 3 height width"]) -> Tensor:
        """Returns normalised scenes as the system senses them: in grey, if it says so."""
        return images.mean(dim=1, keepdim=True) if self.config.grey else images

    @abstractmethod
    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Looks without gradient; see `look`, which has checked the arguments."""

    @abstractmethod
    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Returns the losses of a batch in a stage, by name; their sum is minimised."""

    def backbones(self) -> list[Backbone]:
        """Returns the parts that can start from a pretrained DeiT."""
        return [part for part in self.modules() if isinstance(part, Backbone)]


def normal(random: RandomSource, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draws from a standard normal distribution, by Box and Muller from uniform numbers."""
    first = random.uniform(shape, device).clamp_min(1e-12)
    second = random.uniform(shape, device)
    return (-2 * first.log()).sqrt() * torch.cos(2 * torch.pi * second)


def gaussian_log_probability(actions: Tensor, means: Tensor, std: float) -> Tensor:
    """Returns log N(action; mean, std) of points, up to a constant that no gradient sees."""
    return -((actions - means) ** 2).sum(dim=-1) / (2 * std**2)


def draw_places(
    means: Float[Tensor, "batch 2"], std: float, random: RandomSource
) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, " batch"]]:
    """Draws places around the policy's means; returns them without gradient and the score of the draw.

    A draw beyond the scene is sensed at its edge, but scored as drawn: REINFORCE would be biased otherwise.
    """
    drawn = (means + std * normal(random, tuple(means.shape), means.device)).detach()
    return drawn.clamp(-1, 1), gaussian_log_probability(drawn, means, std)


def is_right(
    logits: Float[Tensor, "*batch classes"], labels: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Returns 1 where the most likely class is the true one, and 0 elsewhere."""
    return (logits.argmax(dim=-1) == labels).float()


def sample(probabilities: Float[Tensor, "batch choices"], random: RandomSource) -> Int[Tensor, " batch"]:
    """Draws one choice for each sample, by the Gumbel-max trick: no synchronisation with a GPU."""
    noise = random.uniform(tuple(probabilities.shape), probabilities.device).clamp_min(1e-20)
    return (probabilities.clamp_min(1e-20).log() - (-noise.log()).log()).argmax(dim=1)
