"""Our own format: a folder of `model.safetensors` and `config.json`, of an agent or of a teacher."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from stam.config import AgentConfig, from_plain, require_timm_name, to_plain
from stam.errors import ConfigError, FileError, StamError, WeightsError, require, require_package
from stam.files import WRITING, from_user, read_json, recover, save_folder
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.scene.grid import Grid, Size
from stam.weights.state_dict import (
    Source,
    load_strictly,
    outline,
    read_shapes,
    read_state_dict,
    require_shapes,
)

FORMAT = "stam-agent"
TEACHER_FORMAT = "stam-teacher"
ZOO_FORMAT = "stam-zoo"  # a system of the zoo, see stam.zoo.saving
FORMAT_VERSION = "1.0"
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def is_agent_folder(folder: Path) -> bool:
    """Tells whether a folder holds a saved model: an agent, or a teacher."""
    recover(folder)  # a process may have been killed while it saved one
    return (folder / CONFIG_FILE).is_file() and (folder / MODEL_FILE).is_file()


def is_teacher_folder(folder: Path) -> bool:
    """Tells whether a folder holds a saved teacher."""
    return is_agent_folder(folder) and format_of(folder) == TEACHER_FORMAT


def save_agent(agent: Agent, folder: str | Path, half: bool = False, own: bool = False) -> None:
    """Writes an agent, without its critic, as a folder of `model.safetensors` and `config.json`.

    Args:
        agent: The agent to save.
        folder: Where to; an agent that lies there already is replaced once the new one is written.
        half: Whether to store floats in half precision.
        own: Whether the folder is the caller's own, such as `last` of a run. What else lies there, half of
            an agent say, is then no reason to refuse.
    """
    path = from_user(folder)
    others = {file.name for file in path.iterdir()} - {WRITING} if path.is_dir() else set()
    if others and not own and not is_agent_folder(path):
        raise StamError(f"'{path}' is not empty and holds no agent: choose another folder")
    _write(path, agent, FORMAT, {"agent": to_plain(agent.config)}, half)


def load_agent(folder: str | Path) -> Agent:
    """Reads an agent that `save_agent` wrote, in evaluation mode."""
    folder = Path(folder)
    file, weights = folder / CONFIG_FILE, folder / MODEL_FILE
    values = read_record(folder, FORMAT, "agent")["agent"]
    try:
        config = from_plain(AgentConfig, values)
        require_outline(lambda: _Outline(config), config.depth, weights)
        agent = Agent(config)
    except ConfigError as error:
        raise WeightsError(f"'{file}' does not describe an agent: {error}") from error
    load_strictly(agent, read_state_dict(weights), f"'{weights}'")
    return agent.eval()


def read_agent_config(folder: str | Path) -> AgentConfig:
    """Reads what an agent that `save_agent` wrote is, and none of its weights."""
    try:
        return from_plain(AgentConfig, read_record(Path(folder), FORMAT, "agent")["agent"])
    except ConfigError as error:
        raise WeightsError(f"'{Path(folder) / CONFIG_FILE}' does not describe an agent: {error}") from error


class _Outline(Agent):
    """An agent whose parameters have no values, only shapes."""

    def reset_location_embedding(self) -> None:
        """There is nothing to start from."""


def require_outline(build: Callable[[], nn.Module], depth: int, weights: Path) -> None:
    """Raises unless a model has the shapes that its file says: before memory is taken for it."""
    found = read_shapes(weights)
    require(depth <= len(found), f"depth is {depth}, with {len(found)} tensors in '{weights}'")
    require_shapes(outline(build, f"the configuration of '{weights}'"), found, f"'{weights}'")


@dataclass(frozen=True)
class _VitRecord:
    """The architecture of a teacher of ours; what an older record lacks has its default."""

    patch_size: Size
    channels: int = 3
    width: int = 384
    depth: int = 12
    num_heads: int = 6
    mlp_ratio: float = 4.0
    distilled: bool = True

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("channels", "width", "depth", "num_heads", "mlp_ratio"):
            require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        require(self.width % self.num_heads == 0, f"num_heads {self.num_heads} does not divide {self.width}")


@dataclass(frozen=True)
class _TeacherRecord:
    """All that is read of a teacher's record: nothing else in it reaches a model."""

    labels: tuple[str, ...]
    image_size: Size
    vit: _VitRecord | None = None
    timm: str | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked before anything is built."""
        require(
            (self.vit is None) != (self.timm is None),
            "it needs either the settings 'vit' or the model name 'timm'",
        )
        if self.timm is not None:
            require_timm_name(self.timm)


def save_teacher(model: nn.Module, folder: str | Path, record: Mapping[str, Any], half: bool = False) -> None:
    """Writes a teacher's model as a folder of `model.safetensors` and `config.json`.

    Args:
        model: The model to save.
        folder: Where to.
        record: How to build its model again: `labels`, `image_size`, and `vit` settings or a `timm` name.
        half: Whether to store floats in half precision.
    """
    _write(Path(folder), model, TEACHER_FORMAT, {"teacher": dict(record)}, half)


def load_teacher_folder(folder: str | Path) -> tuple[Teacher, tuple[str, ...]]:
    """Reads a teacher that `save_teacher` wrote; returns it with its class names."""
    folder = Path(folder)
    weights = folder / MODEL_FILE
    try:
        record = _read_teacher_record(folder)
        if record.vit is not None:
            require_outline(lambda: _build_teacher(record), record.vit.depth, weights)
        model = _build_teacher(record)
    except ConfigError as error:
        raise WeightsError(f"'{folder / CONFIG_FILE}' does not describe a teacher: {error}") from error
    load_strictly(model, read_state_dict(weights), f"'{weights}'")
    return Teacher(model, len(record.labels)), record.labels


def recorded_patch_grid(source: Source) -> tuple[int, int] | None:
    """Returns the rows and columns of patches that weights have positions for, where a model of ours says so.

    Args:
        source: Weights; the configuration of `model.safetensors` lies beside it. Nothing is returned for
            others, whose grid is square.
    """
    if isinstance(source, Mapping) or Path(source).name != MODEL_FILE:
        return None
    folder = Path(source).parent
    kind = format_of(folder) if is_agent_folder(folder) else None
    if kind == FORMAT:
        return read_agent_config(folder).grid.image_patches
    if kind != TEACHER_FORMAT:
        return None
    try:
        record = _read_teacher_record(folder)
        return None if record.vit is None else _grid_of(record, record.vit).image_patches
    except ConfigError as error:
        raise WeightsError(f"'{folder / CONFIG_FILE}' does not describe a teacher: {error}") from error


def _read_teacher_record(folder: Path) -> _TeacherRecord:
    return from_plain(_TeacherRecord, read_record(folder, TEACHER_FORMAT, "teacher")["teacher"])


def _grid_of(record: _TeacherRecord, vit: _VitRecord) -> Grid:
    return Grid(record.image_size, vit.patch_size, vit.patch_size)


def _build_teacher(record: _TeacherRecord) -> nn.Module:
    if record.vit is None:
        timm = require_package("timm", extra="timm")
        try:
            return timm.create_model(record.timm, num_classes=len(record.labels))
        except RuntimeError as error:
            raise ConfigError(f"timm has no model '{record.timm}'") from error
    grid = _grid_of(record, record.vit)
    settings = {**vars(record.vit), "patch_size": grid.patch_size, "image_patches": grid.image_patches}
    return VisionTransformer(num_classes=len(record.labels), **settings)


def _write(folder: Path, module: nn.Module, kind: str, record: dict[str, Any], half: bool) -> None:
    state = {
        name: (value.half() if half and value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in module.state_dict().items()
        if not name.startswith("critic.")
    }
    record = {"format": kind, "format_version": FORMAT_VERSION, **record}
    save_folder(folder, {MODEL_FILE: save(state), CONFIG_FILE: json.dumps(record, indent=2) + "\n"})


def format_of(folder: Path) -> str | None:
    """Returns which format a folder says it has; none where its record cannot be read."""
    try:
        record = read_json(folder / CONFIG_FILE)
    except FileError:
        return None
    found = record.get("format") if isinstance(record, dict) else None
    return found if isinstance(found, str) else None


def read_record(folder: Path, kind: str, *parts: str) -> dict[str, Any]:
    """Returns the configuration of a saved model, after checking its format.

    Args:
        folder: Where the model lies.
        kind: The format it must have.
        parts: What its configuration must hold beside the format, and nothing else.

    Raises:
        WeightsError: It is not such a model, of another version, or damaged.
    """
    if not is_agent_folder(folder):
        raise WeightsError(f"'{folder}' is not a saved model: it needs {MODEL_FILE} and {CONFIG_FILE}")
    file = folder / CONFIG_FILE
    try:
        record = read_json(file)
    except FileError as error:
        raise WeightsError(f"'{file}' is not a configuration of ours: {error}") from error
    if not isinstance(record, dict) or "format" not in record:
        raise WeightsError(f"'{file}' is not a configuration of ours: it lacks 'format'")
    found, version = record["format"], str(record.get("format_version"))
    if found == ZOO_FORMAT != kind:
        raise WeightsError(
            f"'{folder}' is a system of the zoo, not an agent: stam.zoo.load opens it, and stam evaluate, "
            "compare, figures and predict take it"
        )
    if found != kind:
        raise WeightsError(f"'{folder}' is a {found!s:.40}, not a {kind}")
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise WeightsError(
            f"'{folder}' has format {version:.40}, this version reads {FORMAT_VERSION}: upgrade stam-vision"
        )
    for name in record.keys() ^ {"format", "format_version", *parts}:
        what = f"it has '{name:.40}' too" if name in record else f"it lacks '{name}'"
        raise WeightsError(f"'{file}' is not a configuration of ours: {what}")
    return record
