"""From a run folder or a weights folder to what is needed to evaluate it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stam.config import require
from stam.data.checking import check_images
from stam.data.randomness import random_order
from stam.data.scenes import Scenes, Subset
from stam.data.sources import open_for_evaluation
from stam.errors import StamError, WeightsError
from stam.learning.runs import RunFolder, recorded_resize_size
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.settings import RunConfig
from stam.weights import is_agent_folder, load_agent, save_agent
from stam.weights.locate import open_teacher

EVALUATION_FILE = "evaluation.json"
EXAMPLES_FILE = "examples.npz"
REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Opened:
    """An agent with everything its evaluation needs.

    Attributes:
        path: The run folder or weights folder.
        agent_path: The folder of the agent itself.
        agent: The agent.
        scenes: What to evaluate it on.
        source: What that data is called.
        own_data: Whether it is the run's own validation part.
        resize_size: The shorter side before the centre crop.
        teacher: The whole-image teacher, if there is one.
        note: Why there is no teacher.
        settings: The run's settings.
    """

    path: Path
    agent_path: Path
    agent: Agent
    scenes: Scenes
    source: str
    own_data: bool
    resize_size: int | None
    teacher: Teacher | None
    note: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """What to call it: the folder's name."""
        return self.path.resolve().name

    def store(self, threshold: float, temperature: float) -> None:
        """Keeps a fitted threshold and temperature with the weights, for `predict` and live use."""
        save_agent(self.agent.configure(threshold=threshold, temperature=temperature), self.agent_path)


def find_agent(path: Path) -> Path:
    """Returns the folder of the agent in a run folder (its best) or weights folder."""
    if not path.exists():
        raise WeightsError(f"no run at '{path}': give a run folder or a weights folder")
    for candidate in (path, path / "best", path / "last"):
        if is_agent_folder(candidate):
            return candidate
    raise WeightsError(f"'{path}' holds no agent in it, in best/ or in last/: stam train makes one")


def open_run(
    path: str | Path,
    data: str | None = None,
    teacher: str | None = None,
    limit: int | None = None,
    resize_size: int | None = None,
) -> Opened:
    """Opens a run folder or a weights folder for evaluation.

    Args:
        path: The folder.
        data: `digits`, a folder of class folders, or tar shards; by default the run's own validation part.
        teacher: A teacher's folder or DeiT file; by default the run's own, if it has one.
        limit: Use so many scenes only, drawn at random, always the same.
        resize_size: The shorter side before the centre crop; by default as the run says.
    """
    folder = Path(path)
    require(limit is None or limit >= 1, f"limit must be at least 1, got {limit}")
    agent_path = find_agent(folder)
    agent = load_agent(agent_path)
    run = RunFolder(folder) if (folder / "run.json").is_file() else None
    settings: dict[str, Any] = {"agent_folder": agent_path.name}
    record, config = None, None
    own_data, seed = False, 0
    if resize_size is None:
        resize_size = recorded_resize_size(folder)
    if run is not None:
        config = run.config()
        settings |= {key: value for key, value in run.record().items() if key in ("recipe", "seed", "config")}
        seed = config.data.split_seed
        own_data = data is None or data == config.data.path
        record = run.split() if own_data else None
        data = config.data.path if data is None else data
    if data is None:
        raise StamError(
            f"'{folder}' is not a run folder, so say what to evaluate on: --data FOLDER, or --data digits"
        )
    found, note = _open_teacher(folder, teacher, agent, config)
    scenes = open_for_evaluation(data, agent.labels, seed=seed, record=record)
    if record is not None and len(scenes) != record.num_val:
        changed = f"'{data}' has {len(scenes)} validation images, it had {record.num_val} when the run began"
        note = f"{changed}; {note}" if note else changed
    if own_data and config is not None and config.data.skip_unreadable:
        scenes = Subset(scenes, check_images(scenes, skip_unreadable=True).readable)
    if limit is not None and limit < len(scenes):
        scenes = Subset(scenes, np.sort(random_order(len(scenes), "evaluation limit")[:limit]))
    return Opened(
        path=folder,
        agent_path=agent_path,
        agent=agent,
        scenes=scenes,
        source=data if data == "digits" else Path(data).name,
        own_data=own_data or run is None,
        resize_size=resize_size,
        teacher=found,
        note=note,
        settings=settings,
    )


def _open_teacher(
    folder: Path, given: str | None, agent: Agent, config: RunConfig | None
) -> tuple[Teacher | None, str]:
    """Opens the teacher asked for, or the run's own; why there is none is the second result."""
    own = folder / "teacher"
    source = given or (str(own) if own.is_dir() else None)
    indices = config.class_indices if config is not None else None
    if source is not None:
        return open_teacher(source, agent.labels, agent.config, indices), ""
    if config is None or config.teacher is None:
        return None, "no teacher: name one with --teacher for the ceiling and the low-resolution baseline"
    try:
        return open_teacher(config.teacher, agent.labels, agent.config, indices), ""
    except StamError as error:  # it may have been on another machine; the rest can be measured without it
        return None, f"without a teacher: {error}"
