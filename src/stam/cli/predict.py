"""`stam predict AGENT IMAGE...`: classify images glimpse by glimpse, and show how."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from tqdm import tqdm

from stam.cli.agents import open_looker
from stam.cli.parsing import next_command, parse
from stam.data import decode_image
from stam.data.folder import image_files
from stam.errors import DataError, StamError, require
from stam.live import LiveStep, Session, look_through
from stam.model.agent import Looker
from stam.model.looker import SceneLooker
from stam.scene.pixels import normalise, prepare_for_evaluation
from stam.scene.sensor import ImageSensor
from stam.show.animations import save_gif
from stam.show.pictures import Story, save_strip, views_of

_BATCH = 32
_MOST_PICTURES = 24  # scenes in a strip or an animation


@dataclass(frozen=True)
class Arguments:
    """What to classify, and how to show it.

    Attributes:
        agent: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME; a run of a
            system of the zoo too.
        images: Image files, and folders of them.
        threshold: Confidence above which to stop; as the agent says by default.
        max_glimpses: When to stop though unsure; when everything has been seen by default.
        policy: Who picks the locations: learned, random, plus, spiral or centre-out; by default its own.
        seed: Seed of the first location, and of a random policy.
        resize_size: The shorter side before the centre crop; by default as the agent was trained; the
            shipped ones take whole images, resized straight to their size.
        fast: Use packed weights; --no-fast runs the plain modules.
        strip: Draw what was looked at as a strip of frames, into this file.
        gif: Draw it as an animation, into this file.
        json: Print the result as JSON.
    """

    agent: tyro.conf.Positional[str]
    images: tyro.conf.Positional[tuple[Path, ...]]
    threshold: float | None = None
    max_glimpses: int | None = None
    policy: str | None = None
    seed: int = 0
    resize_size: int | None = None
    fast: bool = True
    strip: Path | None = None
    gif: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class Prediction:
    """What came of one image.

    Attributes:
        image: Its path.
        label: The most probable label; none where the image could not be read.
        confidence: Its probability.
        num_glimpses: Glimpses used.
        seen: Share of the image seen.
        stopped_early: Whether the agent was sure before it had to stop.
        locations: Where an agent looked, as (row, column).
        boxes: What each look of another system sensed: top, left, bottom and right of every part of it, as
            shares of the scene.
        probabilities: The most probable labels, at most five, with their probabilities.
        error: Why the image could not be read.
    """

    image: str
    label: str | None = None
    confidence: float | None = None
    num_glimpses: int = 0
    seen: float = 0.0
    stopped_early: bool = False
    locations: tuple[tuple[int, int], ...] = ()
    boxes: tuple[tuple[tuple[float, ...], ...], ...] = ()
    probabilities: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "predict", arguments)
    require(len(given.images) >= 1, "name at least one image or folder: stam predict AGENT IMAGE...")
    for name, path in (("--strip", given.strip), ("--gif", given.gif)):
        require(
            path is None or path.absolute().parent.is_dir(), f"{name} '{path}': its folder does not exist"
        )
    paths = find_images(given.images)
    looker, resize_size = open_looker(given.agent, given.resize_size, fast=given.fast)
    stories: list[Story] = []
    predictions: list[Prediction] = []
    with tqdm(total=len(paths), unit="image", disable=None if len(paths) > 1 else True, leave=False) as bar:
        for prediction, story in predict(looker, paths, given, resize_size):
            predictions.append(prediction)
            if story is not None and len(stories) < _MOST_PICTURES:
                stories.append(story)
            bar.update()
    print(as_json(predictions) if given.json else as_table(predictions))
    draw(stories, given)
    unreadable = [prediction for prediction in predictions if prediction.error]
    if unreadable:
        raise DataError(f"{len(unreadable)} of {len(predictions)} images could not be read: see above")
    next_command(f"stam serve {given.agent}")


def find_images(given: Sequence[Path]) -> list[Path]:
    """Returns the files named, and all images anywhere under the folders named."""
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = [path / name for name in image_files(path)]
            require(bool(inside), f"no images in the folder '{path}'")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"no image or folder at '{path}': check the path")
    return found


def predict(
    looker: SceneLooker, paths: Sequence[Path], given: Arguments, resize_size: int | None
) -> Iterator[tuple[Prediction, Story | None]]:
    """Looks at the images in batches and yields what came of each, in order."""
    agent: Looker | None = looker.episodic
    generator = torch.Generator().manual_seed(given.seed)
    for start in range(0, len(paths), _BATCH):
        batch = paths[start : start + _BATCH]
        read = [_read(path, looker, resize_size) for path in batch]
        sound = [(str(path), view) for path, view in zip(batch, read, strict=True) if _is_view(view)]
        found = (
            _with_sessions(agent, sound, given, generator)
            if agent is not None
            else _whole_scenes(looker, sound, given, generator)
        )
        for path, view in zip(batch, read, strict=True):
            if isinstance(view, DataError):
                yield Prediction(str(path), error=str(view)), None
            else:
                yield next(found)


def _is_view(read: np.ndarray | DataError) -> bool:
    return not isinstance(read, DataError)


def _with_sessions(
    agent: Looker, views: Sequence[tuple[str, Any]], given: Arguments, generator: torch.Generator
) -> Iterator[tuple[Prediction, Story]]:
    """Lets an agent look through sensors, until it is sure."""
    sessions = [_open(agent, given, generator) for _ in views]
    looks = _look(agent, [view for _, view in views], sessions, given.max_glimpses)
    for (name, view), look in zip(views, looks, strict=True):
        yield _outcome(name, view, *look)


def _whole_scenes(
    looker: SceneLooker, views: Sequence[tuple[str, Any]], given: Arguments, generator: torch.Generator
) -> Iterator[tuple[Prediction, Story]]:
    """Lets another looker look at whole scenes; with a threshold, what comes after it is sure is left out."""
    if not views:
        return
    facts = looker.facts
    pixels = torch.from_numpy(np.stack([view for _, view in views])).permute(0, 3, 1, 2)
    images = normalise(pixels, facts.mean, facts.std)
    most = facts.most_glimpses if given.max_glimpses is None else given.max_glimpses
    trace = looker.look(images, most, policy=given.policy, generator=generator)
    for row, (name, view) in enumerate(views):
        confidences = trace.confidences[row].tolist()
        sure = [n for n, value in enumerate(confidences, 1) if value > (given.threshold or 1)]
        count = sure[0] if sure else most
        answer = trace.probabilities[row, count - 1].float()
        best = answer.topk(min(5, len(answer)))
        share = float(trace.pixels[row, count - 1]) / (view.shape[0] * view.shape[1])
        boxes = trace.boxes[row, :count].cpu().numpy()
        yield (
            Prediction(
                image=name,
                label=facts.labels[int(best.indices[0])],
                confidence=float(best.values[0]),
                num_glimpses=count,
                seen=share,
                stopped_early=count < most,
                boxes=tuple(tuple(map(tuple, look[look[:, 2] > look[:, 0]].tolist())) for look in boxes),
                probabilities={
                    facts.labels[index]: value
                    for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                },
            ),
            Story(
                name=Path(name).name,
                image=view,
                grid=None,
                locations=[],
                labels=[facts.labels[index] for index in trace.predictions[row, :count].tolist()],
                confidences=confidences[:count],
                views=views_of(boxes, trace.sizes[:count].cpu().numpy()),
                shares=(trace.pixels[row, :count] / (view.shape[0] * view.shape[1])).tolist(),
            ),
        )


def _look(
    agent: Looker, views: Sequence[np.ndarray], sessions: Sequence[Session], max_glimpses: int | None
) -> list[tuple[Session, list[LiveStep]]]:
    steps: list[list[LiveStep]] = [[] for _ in views]
    mean, std = agent.config.mean, agent.config.std
    sensors = [ImageSensor(Image.fromarray(view), agent.grid, mean, std) for view in views]
    look_through(sensors, sessions, max_glimpses, lambda index, step: steps[index].append(step))
    return list(zip(sessions, steps, strict=True))


def _read(path: Path, looker: SceneLooker, resize_size: int | None) -> np.ndarray | DataError:
    try:
        return prepare_for_evaluation(decode_image(path), resize_size, looker.facts.image_size)
    except DataError as error:
        return error


def _open(agent: Looker, given: Arguments, generator: torch.Generator) -> Session:
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    return agent.session(policy=given.policy, generator=own, threshold=given.threshold)


def _outcome(
    name: str, view: np.ndarray, session: Session, steps: Sequence[LiveStep]
) -> tuple[Prediction, Story]:
    agent, last = session.agent, steps[-1]
    best = last.probabilities.topk(min(5, len(last.probabilities)))
    locations = session.seen
    prediction = Prediction(
        image=name,
        label=last.label,
        confidence=last.confidence,
        num_glimpses=last.num_glimpses,
        seen=last.num_glimpses / agent.grid.num_locations,
        stopped_early=last.stop and last.num_glimpses < agent.grid.num_locations,
        locations=locations,
        probabilities={
            agent.labels[index]: value
            for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        },
    )
    story = Story(
        name=Path(name).name,
        image=view,
        grid=agent.grid,
        locations=[agent.grid.index(location) for location in locations],
        labels=[step.label for step in steps],
        confidences=[step.confidence for step in steps],
    )
    return prediction, story


def as_json(predictions: Sequence[Prediction]) -> str:
    """Returns the predictions as a JSON list, one object an image."""
    return json.dumps([dataclasses.asdict(prediction) for prediction in predictions], indent=2)


def as_table(predictions: Sequence[Prediction]) -> str:
    """Returns the predictions as a table for people."""
    header = ("image", "label", "confidence", "glimpses", "seen")
    rows = [
        (
            prediction.image,
            prediction.label or prediction.error or "",
            "" if prediction.confidence is None else f"{prediction.confidence:.1%}",
            str(prediction.num_glimpses) if prediction.label else "",
            f"{prediction.seen:.0%}" if prediction.label else "",
        )
        for prediction in predictions
    ]
    sound = [row for row, prediction in zip(rows, predictions, strict=True) if not prediction.error]
    widths = [max(len(row[column]) for row in (header, *sound)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        texts = row[0].ljust(widths[0]), row[1].ljust(widths[1])
        numbers = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        lines.append("  ".join((*texts, *numbers)).rstrip())
    return "\n".join(lines)


def draw(stories: Sequence[Story], given: Arguments) -> None:
    """Writes the pictures asked for."""
    if (given.strip or given.gif) and not stories:
        raise StamError("no image could be read, so there is nothing to draw")
    for path, save in ((given.strip, save_strip), (given.gif, save_gif)):
        if path is not None:
            save(stories, path)
            print(f"wrote {path}", file=sys.stderr)
