"""Our own format: a folder of `model.safetensors` and `config.json`, of an agent or of a teacher."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from stam.config import AgentConfig, from_plain, require, to_plain
from stam.errors import ConfigError, StamError, WeightsError, require_package
from stam.files import save_folder
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.scene.grid import Grid, Size
from stam.weights.state_dict import load_strictly, read_state_dict

FORMAT = "stam-agent"
TEACHER_FORMAT = "stam-teacher"
FORMAT_VERSION = "1.0"
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def is_agent_folder(folder: Path) -> bool:
    """Tells whether a folder holds a saved model: an agent, or a teacher."""
    return (folder / CONFIG_FILE).is_file() and (folder / MODEL_FILE).is_file()


def is_teacher_folder(folder: Path) -> bool:
    """Tells whether a folder holds a saved teacher."""
    return is_agent_folder(folder) and _format_of(folder) == TEACHER_FORMAT


def save_agent(agent: Agent, folder: str | Path, half: bool = False) -> None:
    """Writes an agent, without its critic, as a folder of `model.safetensors` and `config.json`.

    Args:
        agent: The agent to save.
        folder: Where to; an agent that lies there already is replaced once the new one is written.
        half: Whether to store floats in half precision.
    """
    folder = Path(folder)
    if folder.is_dir() and not is_agent_folder(folder) and any(folder.iterdir()):
        raise StamError(f"'{folder}' is not empty and holds no agent: choose another folder")
    _write(folder, agent, FORMAT, {"agent": to_plain(agent.config)}, half)


def load_agent(folder: str | Path) -> Agent:
    """Reads an agent that `save_agent` wrote, in evaluation mode."""
    folder = Path(folder)
    agent = Agent(from_plain(AgentConfig, _read_record(folder, FORMAT, "agent")))
    load_strictly(agent, read_state_dict(folder / MODEL_FILE), f"'{folder / MODEL_FILE}'")
    return agent.eval()


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


@dataclass(frozen=True)
class _TeacherRecord:
    """All that is read of a teacher's record: nothing else in it reaches a model."""

    labels: tuple[str, ...]
    image_size: Size
    vit: _VitRecord | None = None
    timm: str | None = None


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
    values = _read_record(folder, TEACHER_FORMAT, "teacher")
    try:
        _check_teacher(values)
        record = from_plain(_TeacherRecord, values)
        model = _build_teacher(record)
    except ConfigError as error:
        raise WeightsError(f"'{folder / CONFIG_FILE}' does not describe a teacher: {error}") from error
    load_strictly(model, read_state_dict(folder / MODEL_FILE), f"'{folder / MODEL_FILE}'")
    return Teacher(model, len(record.labels)), record.labels


def _check_teacher(values: Mapping[str, Any]) -> None:
    """Raises where a value of a teacher's record is not of its kind."""
    labels, vit, timm = (values.get(name) for name in ("labels", "vit", "timm"))
    named = isinstance(labels, list) and all(isinstance(name, str) for name in labels)
    require(named, "labels must be a list of class names")
    one = (isinstance(vit, dict) and timm is None) or (isinstance(timm, str) and vit is None)
    require(one, "it needs either the settings 'vit' or the model name 'timm'")
    numbers = {field.name: (vit or {}).get(field.name, 1) for field in fields(_VitRecord)}
    for name, value in {"image_size": values.get("image_size"), **numbers}.items():
        sizes = value if isinstance(value, list) and len(value) == 2 else [value]
        kind = float if name == "mlp_ratio" else int
        sound = all(isinstance(size, (int, kind)) for size in sizes)
        require(sound, f"{name} must be a {'' if kind is float else 'whole '}number, got {value!r}")


def _build_teacher(record: _TeacherRecord) -> nn.Module:
    if record.vit is None:
        timm = require_package("timm", extra="timm")
        return timm.create_model(record.timm, num_classes=len(record.labels))
    grid = Grid(record.image_size, record.vit.patch_size, record.vit.patch_size)
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


def _format_of(folder: Path) -> str | None:
    """Returns which format a folder says it has; none where its record cannot be read."""
    try:
        return json.loads((folder / CONFIG_FILE).read_text())["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_record(folder: Path, kind: str, part: str) -> dict[str, Any]:
    """Returns what a saved model's configuration says of the `part`, after checking its format."""
    if not is_agent_folder(folder):
        raise WeightsError(f"'{folder}' is not a saved model: it needs {MODEL_FILE} and {CONFIG_FILE}")
    file = folder / CONFIG_FILE
    try:
        record = json.loads(file.read_text())
        found, version = record["format"], str(record["format_version"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise WeightsError(f"'{file}' is not a configuration of ours: {error!r}") from error
    if found == "stam-zoo":
        raise WeightsError(
            f"'{folder}' is a system of the zoo, not an agent: stam.zoo.load opens it, and stam evaluate, "
            "compare, figures and predict take it"
        )
    if found != kind:
        raise WeightsError(f"'{folder}' is a {found}, not a {kind}")
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise WeightsError(
            f"'{folder}' has format {version}, this version reads {FORMAT_VERSION}: upgrade stam-vision"
        )
    if not isinstance(record.get(part), dict):
        raise WeightsError(f"'{file}' is not a configuration of ours: it lacks '{part}'")
    return record[part]
