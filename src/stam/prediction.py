"""From a picture to an answer: reads an image in any form, looks at it until confident, and keeps how.

`agent.predict` and `stam predict` both come here.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stam.data.images import decode_image, decode_opened
from stam.errors import DataError, require
from stam.files import from_user
from stam.live import LiveStep, look_through
from stam.model.agent import Looker
from stam.model.looker import SceneLooker, require_answers
from stam.model.randomness import RandomSource
from stam.scene.grid import Location
from stam.scene.pixels import normalise, prepare_for_evaluation
from stam.scene.sensor import ImageSensor
from stam.shapes import UInt8
from stam.show.animations import save_gif
from stam.show.pictures import Story, draw_strip, readable, save_strip, views_of

_BATCH = 32
_ACCEPTED = "a path, a PIL image, or uint8 pixels (height, width, 3) or (3, height, width)"


@dataclass(frozen=True)
class Looking:
    """How to look at each image; the same image is always looked at in the same way.

    Attributes:
        threshold: Confidence above which to stop; by default the agent's.
        max_glimpses: When to stop though unsure; by default when everything has been seen.
        policy: Who picks the locations; by default the agent's own.
        first_location: Where to look first, as (row, column) or a grid index; by default the agent's own.
        seed: Draws the first location, where none is given, and what a random policy does.
    """

    threshold: float | None = None
    max_glimpses: int | None = None
    policy: str | None = None
    first_location: Location | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Checks what does not depend on who looks."""
        require(
            self.threshold is None or 0 <= self.threshold <= 1,
            f"threshold must be in [0, 1], got {self.threshold}",
        )

    def generator(self) -> torch.Generator:
        """Returns a fresh source of randomness: every image begins with the same one."""
        return torch.Generator().manual_seed(self.seed or 0)


@dataclass(frozen=True)
class Prediction:
    """What came of looking at one image.

    Attributes:
        label: The most probable label.
        confidence: Its probability.
        glimpses: How many glimpses were used.
        probabilities: The probability of every label.
        path: Where the agent looked, as (row, column), in that order; empty for systems without a grid.
        seen: Share of the image that was seen.
        stopped_early: Whether it was confident before it had to stop.
        boxes: What each look of a system without a grid sensed: top, left, bottom and right of every part of
            it, as shares of the image.
        unsure: Whether it ended without being as confident as it has to be to stop.
        story: What is drawn: the image, and the answer after each glimpse.
    """

    label: str
    confidence: float
    glimpses: int
    probabilities: dict[str, float] = field(repr=False)
    path: list[tuple[int, int]]
    seen: float
    stopped_early: bool
    boxes: tuple[tuple[tuple[float, ...], ...], ...] = field(default=(), repr=False)
    unsure: bool = False
    story: Story = field(kw_only=True, repr=False)

    def picture(self) -> Image.Image:
        """Draws a strip of frames: what had been seen after each glimpse, and the answer then."""
        return draw_strip([self.story])

    def show(self) -> None:
        """Opens the picture in the system's image viewer."""
        self.picture().show()

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file; a `.gif` is an animation."""
        path = Path(path)
        save = save_gif if path.suffix.lower() == ".gif" else save_strip
        save([self.story], path)


def predict(looker: SceneLooker, images: Any, how: Looking) -> Prediction | list[Prediction]:
    """Looks at one image, or at each of a list; see `Looker.predict`."""
    facts, several = looker.facts, isinstance(images, list | tuple)
    found: list[Prediction] = []
    given = list(images) if several else [images]
    for start in range(0, len(given), _BATCH):
        read = [(_name(image), read_image(image)) for image in given[start : start + _BATCH]]
        views = [(name, prepare_for_evaluation(i, facts.resize_size, facts.image_size)) for name, i in read]
        found += look_at(looker, views, how)
    return found if several else found[0]


def read_image(image: Any) -> UInt8[np.ndarray, "height width 3"]:
    """Returns the RGB pixels of an image in any form that `predict` takes."""
    if isinstance(image, str | os.PathLike):
        path = from_user(image)
        if not path.exists():
            raise DataError(f"no image at '{image}': check the path")
        return decode_image(path)
    if isinstance(image, Image.Image):
        return decode_opened(image)
    if isinstance(image, Tensor | np.ndarray):
        return _as_rgb(image.numpy(force=True) if isinstance(image, Tensor) else image)
    raise DataError(f"predict takes {_ACCEPTED}, or a list of those; got a {type(image).__name__}")


def _as_rgb(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim == 3 and pixels.shape[-1] != 3 and pixels.shape[0] == 3:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != 3 or not pixels.size:
        batch = "; give a batch as a list" if pixels.ndim == 4 else ""
        got = f"{pixels.dtype} of shape {pixels.shape}"
        raise DataError(
            f"predict takes {_ACCEPTED}, got {got}{batch} (agent.look takes batches of normalised floats)"
        )
    return np.ascontiguousarray(pixels)


def _name(image: Any) -> str:
    """Returns what to call an image in a picture."""
    named = image if isinstance(image, str | os.PathLike) else getattr(image, "filename", "")
    return Path(named).name if named else "image"


def look_at(
    looker: SceneLooker, views: Sequence[tuple[str, np.ndarray]], how: Looking
) -> Iterator[Prediction]:
    """Looks at images that have the looker's size, each with its name, and yields what came of each."""
    if not views:
        return iter(())
    agent: Looker | None = looker.episodic
    return _look_whole(looker, views, how) if agent is None else _look_live(agent, views, how)


def _look_live(agent: Looker, views: Sequence[tuple[str, np.ndarray]], how: Looking) -> Iterator[Prediction]:
    """Lets an agent look through sensors, until it is confident."""
    first = how.first_location
    if first is None and how.seed is None:
        first = agent.first_location
    sessions = [agent.session(first, how.policy, how.generator(), how.threshold) for _ in views]
    steps: list[list[LiveStep]] = [[] for _ in views]
    mean, std = agent.config.mean, agent.config.std
    sensors = [ImageSensor(Image.fromarray(view), agent.grid, mean, std) for _, view in views]
    look_through(sensors, sessions, how.max_glimpses, lambda index, step: steps[index].append(step))
    for (name, view), session, said in zip(views, sessions, steps, strict=True):
        last, path = said[-1], list(session.seen)
        unsure = last.confidence <= (agent.threshold if how.threshold is None else how.threshold)
        yield Prediction(
            label=last.label,
            confidence=last.confidence,
            glimpses=last.num_glimpses,
            probabilities=dict(zip(agent.labels, last.probabilities.tolist(), strict=True)),
            path=path,
            seen=last.num_glimpses / agent.grid.num_locations,
            stopped_early=last.stop and last.num_glimpses < agent.grid.num_locations,
            unsure=unsure,
            story=Story(
                name=name,
                image=view,
                grid=agent.grid,
                locations=[agent.grid.index(location) for location in path],
                labels=[readable(step.label) for step in said],
                confidences=[step.confidence for step in said],
                unsure=unsure,
            ),
        )


def _look_whole(
    looker: SceneLooker, views: Sequence[tuple[str, np.ndarray]], how: Looking
) -> Iterator[Prediction]:
    """Lets another looker look at whole scenes; with a threshold, what comes after it is sure is left out."""
    require(how.first_location is None, "first_location is for agents: this system begins in its own way")
    facts = looker.facts
    pixels = torch.from_numpy(np.stack([view for _, view in views])).permute(0, 3, 1, 2)
    images = normalise(pixels, facts.mean, facts.std)
    most = facts.most_glimpses if how.max_glimpses is None else how.max_glimpses
    trace = looker.look(images, most, policy=how.policy, generator=_SameForAll(how.generator()))
    require_answers(trace)
    for row, (name, view) in enumerate(views):
        confidences = trace.confidences[row].tolist()
        sure = [
            n for n, value in enumerate(confidences, 1) if how.threshold is not None and value > how.threshold
        ]
        count = sure[0] if sure else most
        answer = trace.probabilities[row, count - 1].float()
        best = int(answer.argmax())
        shares = (trace.pixels[row, :count] / (view.shape[0] * view.shape[1])).tolist()
        boxes = trace.boxes[row, :count].cpu().numpy()
        yield Prediction(
            label=facts.labels[best],
            confidence=float(answer[best]),
            glimpses=count,
            probabilities=dict(zip(facts.labels, answer.tolist(), strict=True)),
            path=[],
            seen=shares[-1],
            stopped_early=count < most,
            boxes=tuple(tuple(map(tuple, look[look[:, 2] > look[:, 0]].tolist())) for look in boxes),
            story=Story(
                name=name,
                image=view,
                grid=None,
                locations=[],
                labels=[readable(facts.labels[index]) for index in trace.predictions[row, :count].tolist()],
                confidences=confidences[:count],
                views=views_of(boxes, trace.sizes[:count].cpu().numpy()),
                shares=shares,
            ),
        )


class _SameForAll(RandomSource):
    """Draws the same numbers for every sample of a batch, so that none depends on its place in it."""

    def uniform(self, shape: tuple[int, ...], device: torch.device, batch_dim: int = 0) -> Tensor:
        """Returns numbers in [0, 1)."""
        one = tuple(1 if dim == batch_dim else size for dim, size in enumerate(shape))
        return super().uniform(one, device, batch_dim).expand(shape).clone()

    def integers(self, high: int, batch_size: int, device: torch.device) -> Tensor:
        """Returns a number from 0 to high - 1, the same for each sample."""
        return super().integers(high, 1, device).expand(batch_size).clone()
