"""From a path or a name to a model: an agent to use, one to train, a teacher."""

from pathlib import Path
from typing import Any

from stam.config import AgentConfig
from stam.errors import WeightsError, require
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.scene.grid import Size
from stam.weights.deit import heads_like, load_deit, load_teacher
from stam.weights.folder import load_agent, load_teacher_folder
from stam.weights.locate import find_agent, find_core, find_teacher, locate
from stam.weights.state_dict import Source, load_strictly


def load(path: str | Path) -> Agent:
    """Loads an agent in evaluation mode.

    Args:
        path: A run folder (its best checkpoint is taken), a weights folder, the name of an agent that ships
            with the package, such as `digits` or `package:digits`, or `hub:NAME`.
    """
    return load_agent(find_agent(path).folder)


def start_agent(source: str, config: AgentConfig, class_indices: tuple[int, ...] | None = None) -> Agent:
    """Builds an agent whose core starts where `source` says: `none` at random.

    The actor is always fresh, except from a run or weights folder of an agent that has one of the same shape.
    """
    start = find_core(source)
    if start is None:
        require(class_indices is None, "class_indices are rows of a classifier of --init: leave them out")
        return Agent(config)
    if start.is_dir():
        return _start_from_agent(load_agent(start), config, source, class_indices)
    agent = _with_core(start, config.num_heads, config, class_indices)
    _require_same_core(agent.config, config, source)
    return agent


# what a core brings with it, whatever the configuration says
_OF_THE_CORE = ("num_heads", "channels", "width", "depth", "patch_size", "mlp_ratio")


def _require_same_core(found: AgentConfig, wanted: AgentConfig, source: str) -> None:
    """Raises where a core is otherwise than asked for, and says how to ask for it."""
    own = [(name, _plain(getattr(found, name)), _plain(getattr(wanted, name))) for name in _OF_THE_CORE]
    other = [(name, value, given) for name, value, given in own if value != given]
    said = ", ".join(f"{name} {value} instead of {given}" for name, value, given in other)
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value, _ in other)
    require(not other, f"'{source}' has a core of {said}: set {options}")


def _plain(size: Any) -> Any:
    """Returns a size as one number where both of its sides are alike."""
    return size[0] if isinstance(size, tuple) and size[0] == size[1] else size


def _with_core(
    core: Source,
    num_heads: int,
    config: AgentConfig,
    class_indices: tuple[int, ...] | None,
    patch_grid: tuple[int, int] | None = None,
) -> Agent:
    """Returns the agent of a configuration around a core that lies in a file or a state dict."""
    settings = {name: value for name, value in vars(config).items() if name not in _OF_THE_CORE}
    num_classes = settings.pop("num_classes")
    return load_deit(core, num_classes, class_indices, num_heads=num_heads, patch_grid=patch_grid, **settings)


def _start_from_agent(
    start: Agent, config: AgentConfig, source: str, class_indices: tuple[int, ...] | None
) -> Agent:
    """Takes the core of another agent, and its actor where both have one of the same shape."""
    core = {name: value.clone() for name, value in start.core.state_dict().items()}
    agent = _with_core(core, start.config.num_heads, config, class_indices, start.grid.image_patches)
    _require_same_core(agent.config, config, source)
    if agent.actor is not None and start.actor is not None:
        theirs = start.actor.state_dict()
        if {n: v.shape for n, v in theirs.items()} == {
            n: v.shape for n, v in agent.actor.state_dict().items()
        }:
            load_strictly(agent.actor, theirs, source)
    return agent


def open_teacher(
    source: str,
    classes: tuple[str, ...],
    image_size: Size,
    like: AgentConfig | None = None,
    class_indices: tuple[int, ...] | None = None,
) -> Teacher:
    """Opens a teacher and checks that it tells the data's classes apart.

    Args:
        source: A teacher's folder, or a DeiT file.
        classes: The classes of the data.
        image_size: Size of the images that it shall see.
        like: An agent. A DeiT file of the same width has as many attention heads; of any other, and without
            an agent, they are taken to be 64 wide.
        class_indices: For each class, its row in the classifier of the file.
    """
    path = locate(source)
    folder = find_teacher(path)
    if folder is not None:
        teacher, labels = load_teacher_folder(folder)
        if labels != classes:
            raise WeightsError(
                f"the teacher '{source}' tells {len(labels)} classes apart ({', '.join(labels[:3])}...), "
                f"the data has {len(classes)} ({', '.join(classes[:3])}...): "
                "fine-tune one on this data (stam teacher)"
            )
        return teacher
    if path.is_dir():
        raise WeightsError(
            f"'{source}' holds no teacher: give the --out folder of stam teacher, or a weights file"
        )
    num_heads = None if like is None else heads_like(path, like.width, like.num_heads)
    return load_teacher(path, len(classes), class_indices, image_size=image_size, num_heads=num_heads)
