"""What evaluation, pictures and predictions ask of anything that looks at scenes, an agent or another system.

A *look* is one or more rectangles of the scene (`boxes`), each sensed at some resolution (`sizes`): a glimpse
on a grid, a retina of several scales, or the whole scene at low resolution. `pixels` counts what was used to
classify, as the paper's Table 1 does: a whole view that only decides where to look is not counted.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stam.errors import StamError, require_choice
from stam.model.randomness import Randomness
from stam.scene.grid import Grid
from stam.scene.pixels import IMAGENET_MEAN, IMAGENET_STD
from stam.shapes import Float, Int

OWN = "own"  # the policy of a looker that has one way of looking only


@dataclass(frozen=True)
class Facts:
    """What a comparison must know of a looker.

    Attributes:
        labels: Class names.
        image_size: Height and width of the scenes it takes.
        most_glimpses: The most looks it can take in a scene.
        whole_to_attend: Whether the complete image is used to choose where to look.
        whole_to_classify: Whether the complete image is used to classify.
        policy: Its own way to choose where to look.
        policies: All ways it knows; empty where it checks their names itself.
        mean: Channel means of the normalisation.
        std: Channel standard deviations.
        grid: Where its glimpses lie, if they lie on a grid.
        resize_size: What the shorter side of an image becomes before its centre is cropped, if it knows.
    """

    labels: tuple[str, ...]
    image_size: tuple[int, int]
    most_glimpses: int
    whole_to_attend: bool
    whole_to_classify: bool
    policy: str = OWN
    policies: tuple[str, ...] = (OWN,)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    grid: Grid | None = None
    resize_size: int | None = None

    def require_num_glimpses(self, num_glimpses: int) -> None:
        """Raises unless that many looks can be taken."""
        if not 1 <= num_glimpses <= self.most_glimpses:
            where = f" on a {self.grid.rows}x{self.grid.columns} grid" if self.grid is not None else ""
            raise StamError(f"num_glimpses must be 1 to {self.most_glimpses}{where}, got {num_glimpses}")

    def require_policy(self, policy: str) -> None:
        """Raises unless the looker knows that way to choose where to look."""
        if self.policies:
            require_choice("policy", policy, self.policies)


@runtime_checkable
class LookTrace(Protocol):
    """What came of looking at a batch of scenes; `stam.model.episode.Trace` and `SceneTrace` are two."""

    @property
    def boxes(self) -> Float[Tensor, "batch glimpses parts 4"]:
        """Top, left, bottom and right of what each look sensed, as shares of the scene; all 0 for no part."""
        ...

    @property
    def sizes(self) -> Int[Tensor, "glimpses parts 2"]:
        """Height and width in pixels that each part was sensed at."""
        ...

    @property
    def pixels(self) -> Int[Tensor, "batch glimpses"]:
        """Pixels used to classify, after each look."""
        ...

    @property
    def readouts(self) -> tuple[Float[Tensor, "batch glimpses classes"], ...]:
        """Logits of each classifier; the mean of their probabilities is the answer."""
        ...

    @property
    def probabilities(self) -> Float[Tensor, "batch glimpses classes"]:
        """The answer after each look."""
        ...

    @property
    def predictions(self) -> Int[Tensor, "batch glimpses"]:
        """The most probable class after each look."""
        ...

    @property
    def confidences(self) -> Float[Tensor, "batch glimpses"]:
        """The probability of that class."""
        ...


@dataclass(frozen=True)
class SceneTrace:
    """What a looker without a grid saw, and what it made of it after each look.

    Attributes:
        boxes: Top, left, bottom and right of every part of every look, as shares of the scene. A part that
            one scene has and another has not is all 0 there.
        sizes: Height and width in pixels that each part is sensed at.
        pixels: Pixels used to classify, after each look.
        logits: The classifier's logits after each look.
    """

    boxes: Float[Tensor, "batch glimpses parts 4"]
    sizes: Int[Tensor, "glimpses parts 2"]
    pixels: Int[Tensor, "batch glimpses"]
    logits: Float[Tensor, "batch glimpses classes"]

    @property
    def readouts(self) -> tuple[Float[Tensor, "batch glimpses classes"], ...]:
        """The one classifier."""
        return (self.logits,)

    @property
    def probabilities(self) -> Float[Tensor, "batch glimpses classes"]:
        """The answer after each look."""
        return self.logits.float().softmax(dim=-1)

    @property
    def predictions(self) -> Int[Tensor, "batch glimpses"]:
        """The most probable class after each look."""
        return self.logits.argmax(dim=-1)

    @property
    def confidences(self) -> Float[Tensor, "batch glimpses"]:
        """The probability of that class."""
        return self.probabilities.amax(dim=-1)

    @classmethod
    def of(
        cls, boxes: list[Tensor], sizes: list[list[tuple[int, int]]], logits: list[Tensor]
    ) -> "SceneTrace":
        """Puts looks together, and counts the pixels of every part that has an area.

        Args:
            boxes: For each look its parts, (batch, parts, 4); looks may have different numbers of parts.
            sizes: For each look the size each of its parts is sensed at.
            logits: For each look the logits after it, (batch, classes).
        """
        most = max(len(parts) for parts in sizes)
        padded = [torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1])) for part in boxes]
        each = torch.tensor([[*parts, *[(0, 0)] * (most - len(parts))] for parts in sizes])  # (n, k, 2)
        stacked = torch.stack(padded, dim=1).float()  # (B, n, k, 4)
        areas = each.prod(dim=-1).to(stacked.device) * (stacked[..., 2:] > stacked[..., :2]).all(dim=-1)
        return cls(stacked, each, areas.sum(dim=-1).cumsum(dim=1), torch.stack(logits, dim=1))


def require_answers(trace: LookTrace) -> None:
    """Raises where answers are not numbers, so that none of them is scored, shown or sent."""
    if not bool(trace.probabilities.isfinite().all()):
        raise StamError("the answers are not numbers (NaN): the weights are damaged, take others")


@runtime_checkable
class SceneLooker(Protocol):
    """Anything that looks at whole scenes; `stam.zoo.check_looker` tests somebody else's.

    An agent of ours has an episode that can be run step by step, `episodic`, and more is measured of it: the
    time that early exit saves, its cost, its policy maps. Others return `None` there.
    """

    @property
    def facts(self) -> Facts:
        """What a comparison must know."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def episodic(self) -> Any:
        """The agent whose episode can be run step by step (`stam.model.agent.Looker`), or `None`."""
        ...

    def ready(self, fast: bool = True) -> "SceneLooker":
        """Returns the looker ready to look often; `fast` allows other code that computes the same."""
        ...

    def look(
        self, images: Tensor, num_glimpses: int, *, policy: Any = None, generator: Randomness = None
    ) -> LookTrace:
        """Looks at normalised scenes (batch, channels, height, width).

        Args:
            images: The scenes, as large as `facts.image_size`.
            num_glimpses: Looks to take.
            policy: One of `facts.policies`; by default its own.
            generator: Source of randomness, where it begins or chooses at random.
        """
        ...
