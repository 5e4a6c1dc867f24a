"""From a path or the name of an agent to what is needed to evaluate it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stam.data.checking import check_images
from stam.data.overlap import num_shared
from stam.data.randomness import random_order
from stam.data.remote import is_url
from stam.data.scenes import Scenes, Subset
from stam.data.sources import DIGITS, is_what_was_split, open_for_evaluation, open_scenes
from stam.data.splits import SplitRecord
from stam.errors import DataError, StamError, require
from stam.files import from_user
from stam.learning.runs import RunFolder, recorded_resize_size
from stam.model.agent import Agent
from stam.model.looker import SceneLooker
from stam.model.teacher import Teacher
from stam.settings import DataConfig, RunConfig
from stam.weights import FoundAgent, find_agent, find_teacher, load_agent, open_teacher, save_agent
from stam.zoo import System, load_looker

EVALUATION_FILE = "evaluation.json"
EXAMPLES_FILE = "examples.npz"
MISTAKES_FILE = "mistakes.npz"
REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Opened:
    """An agent with everything its evaluation needs.

    Attributes:
        path: Where the results go: the run folder or weights folder; see `FoundAgent.home`.
        agent_path: The folder of the agent itself.
        agent: The agent.
        scenes: What to evaluate it on.
        source: What that data is called.
        own_data: Whether it is the run's own test or validation part.
        resize_size: The shorter side before the centre crop.
        teacher: The whole-image teacher, if there is one.
        note: Why there is no teacher.
        settings: The run's settings.
        name: What to call it.
        is_borrowed: Whether it ships with the package or comes from the hub, so that it is not to be changed.
    """

    path: Path
    agent_path: Path
    agent: Agent | System
    scenes: Scenes
    source: str
    own_data: bool
    resize_size: int | None
    teacher: Teacher | None
    note: str
    settings: dict[str, Any]
    name: str
    is_borrowed: bool

    def store(
        self, threshold: float, temperature: float, policy: str, first_location: int | None = None
    ) -> None:
        """Keeps a fitted threshold and temperature with the weights, and the policy they hold for.

        Where looking begins is kept too, if it was measured.
        """
        self.require_keeps(policy)
        agent = load_agent(self.agent_path)
        agent.configure(threshold=threshold, temperature=temperature, policy=policy)
        if first_location is not None:
            agent.configure(first_location=agent.grid.row_column(first_location))
        save_agent(agent, self.agent_path)

    def require_keeps(self, policy: str) -> None:
        """Raises where the agent is not to be changed, or not for this policy."""
        own = self.agent.facts.policy
        if self.agent.episodic is None:
            raise StamError(
                f"--store keeps a threshold with an agent; {self.name} has none: leave out --store"
            )
        learned = own.startswith("learned") and policy.startswith("learned")
        require(
            policy == own or learned,
            f"--store keeps what is fitted for the agent's own policy, {own}: leave out --policy {policy}",
        )
        if self.is_borrowed:
            raise StamError(
                f"'{self.name}' is not changed, since it ships with the package or comes from the hub: leave "
                "out --store, or save it to a folder of yours first (stam.load, stam.weights.save_agent)"
            )


def open_run(
    path: str | Path,
    data: str | None = None,
    teacher: str | None = None,
    limit: int | None = None,
    resize_size: int | None = None,
) -> Opened:
    """Opens an agent for evaluation.

    Args:
        path: A run folder, a weights folder, the name of an agent that ships, or `hub:NAME`.
        data: `digits`, a folder of class folders, or tar shards; by default the run's own
            test part, or its validation part where it has none.
        teacher: A teacher's folder or DeiT file; by default the run's own, if it has one.
        limit: Use so many scenes only, drawn at random, always the same.
        resize_size: The shorter side before the centre crop; by default as the agent says, or its run.
    """
    require(limit is None or limit >= 1, f"limit must be at least 1, got {limit}")
    place = find_agent(path)
    agent = load_looker(place.folder)
    labels = agent.facts.labels
    run = RunFolder(place.run) if place.run is not None else None  # also for an agent's folder in a run
    settings: dict[str, Any] = {"agent_folder": place.folder.name}
    record, config, trained_on = None, None, None
    own_data, seed = False, 0
    if resize_size is None:
        resize_size = recorded_resize_size(place, agent.facts.resize_size)
    if run is not None:
        config = run.config() if agent.episodic is not None else None
        trained_on = run.data_config()
        settings |= {key: value for key, value in run.record().items() if key in ("recipe", "seed", "config")}
        seed = trained_on.split_seed
        data = trained_on.path if data is None else data
        record = run.split()
        own_data = is_same_data(data, trained_on.path, record)
        record = record if own_data else None
    if data is None:
        raise StamError(
            f"'{path}' is not a run folder, so say what to evaluate on: --data FOLDER, or --data digits"
        )
    found, note = _open_teacher(place, teacher, agent, config)
    is_lost = own_data and record is None
    scenes = open_for_evaluation(data, labels, seed=seed, record=record, was_trained_on=is_lost)
    if trained_on is not None and run is not None and not own_data:
        seen = num_trained_on(scenes, trained_on, run.split())
        if seen:
            shared = f"{seen} of the {len(scenes)} images in '{data}' are among those it was trained on"
            note = f"{shared}: the result is too good" + (f"; {note}" if note else "")
    if record is not None:
        part, num_then = ("test", record.num_test) if record.num_test else ("validation", record.num_val)
        settings["part"] = part
        if len(scenes) != num_then:
            changed = f"'{data}' has {len(scenes)} {part} images, it had {num_then} when the run began"
            note = f"{changed}; {note}" if note else changed
        elif part == "validation" and place.folder.name == "best":
            chose = f"these {num_then} images chose the checkpoint 'best' among those of the run"
            better = "a test part (stam train --test-fraction 0.1, or a folder test) chooses nothing"
            note = f"{chose}, which flatters it: {better}" + (f"; {note}" if note else "")
    if own_data and trained_on is not None and trained_on.skip_unreadable:
        scenes = Subset(scenes, check_images(scenes, skip_unreadable=True).readable)
    if limit is not None and limit < len(scenes):
        scenes = Subset(scenes, np.sort(random_order(len(scenes), "evaluation limit")[:limit]))
    return Opened(
        path=place.home,
        agent_path=place.folder,
        agent=agent,
        scenes=scenes,
        source=data if data == "digits" else Path(data).name,
        own_data=own_data or run is None,
        resize_size=resize_size,
        teacher=found,
        note=note,
        settings=settings,
        name=place.name,
        is_borrowed=place.is_borrowed,
    )


def is_same_data(data: str, trained_on: str, record: SplitRecord | None) -> bool:
    """Tells whether data is what a run was trained on, however its path is written.

    A folder is the same if its path leads there, or if it holds the same names: a copy, say.
    """
    if data == trained_on:
        return True
    if "digits" in (data, trained_on):
        return False
    if _resolved(data) == _resolved(trained_on):
        return True
    return record is not None and is_what_was_split(data, record)


def num_trained_on(scenes: Scenes, trained_on: DataConfig, record: SplitRecord | None) -> int:
    """Returns how many scenes a run was trained on, by their bytes; 0 where its data is not at hand."""
    if trained_on.path == DIGITS or is_url(trained_on.path):
        return 0
    try:
        trained = open_scenes(trained_on.path, seed=trained_on.split_seed, record=record)
    except DataError:
        return 0
    return num_shared(scenes, trained.train)


def _resolved(data: str) -> Path:
    return from_user(data).resolve()


def _open_teacher(
    place: FoundAgent, given: str | None, looker: SceneLooker, config: RunConfig | None
) -> tuple[Teacher | None, str]:
    """Opens the teacher asked for, or the run's own; why there is none is the second result."""
    own = None if place.is_borrowed else find_teacher(place.home)
    source = given or (None if own is None else str(own))
    labels, agent = looker.facts.labels, looker.episodic
    # what a file leaves open
    given_by = looker.facts.image_size, None if agent is None else agent.config
    indices = config.class_indices if config is not None else None
    if source is not None:
        return open_teacher(source, labels, *given_by, indices), ""
    if config is None or config.teacher is None:
        return None, "no teacher: name one with --teacher for the ceiling and the low-resolution baseline"
    try:
        return open_teacher(config.teacher, labels, *given_by, indices), ""
    except StamError as error:  # it may have been on another machine; the rest can be measured without it
        return None, f"without a teacher: {error}"
