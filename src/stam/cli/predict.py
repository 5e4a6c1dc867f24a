"""`stam predict AGENT IMAGE...`: classify images glimpse by glimpse, and show how."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from stam.cli.agents import names_agent, open_looker
from stam.cli.batch import Score, find_images, open_rows
from stam.cli.parsing import next_command, parse
from stam.data import decode_image
from stam.errors import ConfigError, DataError, StamError, require
from stam.model.looker import SceneLooker
from stam.prediction import Looking, Prediction, look_at
from stam.scene.pixels import prepare_for_evaluation
from stam.show.animations import save_gif
from stam.show.pictures import Story, save_strip

_BATCH = 32
_MOST_LABELS = 5
_MOST_PICTURES = 24  # scenes in a strip or an animation


@dataclass(frozen=True)
class Arguments:
    """What to classify, and how to show it.

    Attributes:
        agent: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME; a run of a
            system of the zoo too.
        images: Image files, folders of them, and CSV files that list them: column path, and label if known.
        threshold: Confidence above which to stop; as the agent says by default.
        max_glimpses: When to stop though unsure; when everything has been seen by default.
        policy: Who picks the locations: learned, random, plus, spiral or centre-out; by default its own.
        first_location: Where to look first, as ROW,COL counted from 0; by default the agent's own.
        seed: Draws the first location instead, and what a random policy does; the same for every image.
        resize_size: The shorter side before the centre crop; by default as the agent was trained; the
            shipped ones take whole images, resized straight to their size.
        fast: Use packed weights; --no-fast runs the plain modules.
        strip: Draw what was looked at as a strip of frames, into this file.
        gif: Draw it as an animation, into this file.
        csv: Write a row for each image to this file, as it goes, instead of printing a table.
        resume: Go on with the file of --csv: images that have a row are left out.
        json: Print the result as JSON.
    """

    agent: tyro.conf.Positional[str]
    images: tyro.conf.Positional[tuple[Path, ...]]
    threshold: float | None = None
    max_glimpses: int | None = None
    policy: str | None = None
    first_location: str | None = None
    seed: int | None = None
    resize_size: int | None = None
    fast: bool = True
    strip: Path | None = None
    gif: Path | None = None
    csv: Path | None = None
    resume: bool = False
    json: bool = False


@dataclass(frozen=True)
class Answer:
    """What is printed of one image: a row of the table, an object of the JSON list.

    Attributes:
        image: Its path.
        label: The most probable label; none where the image could not be read.
        confidence: Its probability.
        num_glimpses: Glimpses used.
        seen: Share of the image seen.
        stopped_early: Whether the agent was sure before it had to stop.
        unsure: Whether it ended without being as confident as it has to be to stop.
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
    unsure: bool = False
    locations: tuple[tuple[int, int], ...] = ()
    boxes: tuple[tuple[tuple[float, ...], ...], ...] = ()
    probabilities: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "predict", arguments)
    require(len(given.images) >= 1, "name at least one image or folder: stam predict AGENT IMAGE...")
    for name, path in (("--strip", given.strip), ("--gif", given.gif), ("--csv", given.csv)):
        require(
            path is None or path.absolute().parent.is_dir(), f"{name} '{path}': its folder does not exist"
        )
    require(given.csv is not None or not given.resume, "--resume goes on with a file: name it with --csv")
    agent, named = agent_first(given.agent, given.images)
    images = find_images(named)
    looker, resize_size = open_looker(agent, given.resize_size, fast=given.fast)
    how = looking_of(given)
    stories: list[Story] = []
    answers: list[Answer] = []
    score, num_unreadable = Score(), 0
    with nullcontext() if given.csv is None else open_rows(given.csv, given.resume) as rows:
        if rows is not None and rows.done:
            for label, truth in rows.done.values():
                require(
                    label is None or label in looker.facts.labels,
                    f"'{given.csv}' has answers of another agent, such as '{label}': name another file",
                )
                score.add(label, truth)
                num_unreadable += label is None
            images = [image for image in images if str(image.path) not in rows.done]
            print(f"{len(rows.done):,} images are done, {len(images):,} are left", file=sys.stderr)
        found_of = predict(looker, [image.path for image in images], how, resize_size)
        with _bar(len(images)) as bar:
            for image, (path, found) in zip(images, found_of, strict=True):
                answer, truth = answer_of(path, found), image.truth(looker.facts.labels)
                if rows is not None:
                    rows.add(answer, truth)
                if rows is None or given.json:  # otherwise they are in the file, however many there are
                    answers.append(answer)
                score.add(answer.label, truth)
                num_unreadable += answer.error is not None
                if isinstance(found, Prediction) and len(stories) < _MOST_PICTURES:
                    stories.append(found.story)
                bar.update()
    report(answers, score, given)
    draw(stories, given)
    if num_unreadable:
        raise DataError(
            f"{num_unreadable} of {score.num_images} images could not be read: see {given.csv or 'above'}"
        )
    next_command(f"stam serve {agent}")


def _bar(total: int) -> tqdm:
    return tqdm(total=total, unit="image", disable=None if total > 1 else True, leave=False)


def report(answers: Sequence[Answer], score: Score, given: Arguments) -> None:
    """Prints the answers, or where they are, and how many are right."""
    if given.json:
        print(as_json(answers))
    elif given.csv is None:
        print(as_table(answers))
    else:
        print(f"{score.num_images:,} rows are in {given.csv}")
    if score.num_known:
        print(score, file=sys.stderr if given.json else sys.stdout)


def agent_first(agent: str, images: Sequence[Path]) -> tuple[str, Sequence[Path]]:
    """Returns the agent and the images, also where the agent was not named first."""
    if names_agent(agent):
        return agent, images
    agents = [path for path in images if names_agent(path)]
    if len(agents) != 1:
        return agent, images
    return str(agents[0]), [Path(agent), *(path for path in images if path != agents[0])]


def looking_of(given: Arguments) -> Looking:
    """Returns how the arguments say to look."""
    first = None
    if given.first_location is not None:
        match = re.fullmatch(r"(\d+),(\d+)", given.first_location.replace(" ", ""), re.ASCII)
        if match is None:
            raise ConfigError(f"--first-location must be ROW,COL, such as 3,3, got '{given.first_location}'")
        first = int(match[1]), int(match[2])
    return Looking(given.threshold, given.max_glimpses, given.policy, first, given.seed)


def predict(
    looker: SceneLooker, paths: Sequence[Path], how: Looking, resize_size: int | None
) -> Iterator[tuple[Path, Prediction | DataError]]:
    """Looks at the images in batches and yields what came of each, in order."""
    for start in range(0, len(paths), _BATCH):
        batch = [(path, _read(path, looker, resize_size)) for path in paths[start : start + _BATCH]]
        views = [(path.name, view) for path, view in batch if not isinstance(view, DataError)]
        found = iter(look_at(looker, views, how))
        for path, view in batch:
            yield path, view if isinstance(view, DataError) else next(found)


def _read(path: Path, looker: SceneLooker, resize_size: int | None) -> np.ndarray | DataError:
    try:
        return prepare_for_evaluation(decode_image(path), resize_size, looker.facts.image_size)
    except DataError as error:
        return error


def answer_of(path: Path, found: Prediction | DataError) -> Answer:
    """Returns what is printed of an image, whether it could be read or not."""
    if isinstance(found, DataError):
        return Answer(str(path), error=str(found))
    best = sorted(found.probabilities.items(), key=lambda pair: -pair[1])[:_MOST_LABELS]
    return Answer(
        image=str(path),
        label=found.label,
        confidence=found.confidence,
        num_glimpses=found.glimpses,
        seen=found.seen,
        stopped_early=found.stopped_early,
        unsure=found.unsure,
        locations=tuple(found.path),
        boxes=found.boxes,
        probabilities=dict(best),
    )


def as_json(answers: Sequence[Answer]) -> str:
    """Returns the answers as a JSON list, one object an image."""
    return json.dumps([dataclasses.asdict(answer) for answer in answers], indent=2)


def as_table(answers: Sequence[Answer]) -> str:
    """Returns the answers as a table for people."""
    header = ("image", "label", "confidence", "glimpses", "seen", "")
    rows = [
        (
            answer.image,
            answer.label or answer.error or "",
            "" if answer.confidence is None else f"{answer.confidence:.1%}",
            str(answer.num_glimpses) if answer.label else "",
            f"{answer.seen:.0%}" if answer.label else "",
            "unsure" if answer.unsure else "",
        )
        for answer in answers
    ]
    sound = [row for row, answer in zip(rows, answers, strict=True) if not answer.error]
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
