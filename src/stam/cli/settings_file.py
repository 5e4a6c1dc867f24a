"""`--config FILE`: settings from a file, over which the options of the command line go.

A file is what a run recorded (its `run.json`, or its folder), or some settings of one's own as TOML or JSON,
named as in docs/settings.md:

    recipe = "tiny"

    [data]
    path = "path/to/images"

    [training]
    epochs = 10
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stam.config import from_plain, to_plain
from stam.errors import ConfigError, FileError, require
from stam.files import from_user, read_content, read_json
from stam.learning.experiment import TEACHER, removed_settings
from stam.learning.recipes import get_recipe
from stam.settings import RunConfig
from stam.weights.locate import RUN_FILE


@dataclass(frozen=True)
class SettingsFile:
    """What a file says.

    Attributes:
        path: The file.
        recipe: The recipe it names, or that the run was begun with.
        is_record: Whether it is what a run recorded, with all settings.
        values: The settings, as JSON has them.
    """

    path: Path
    recipe: str | None
    is_record: bool
    values: dict[str, Any]

    @property
    def system(self) -> str | None:
        """The system of the zoo whose run it is."""
        return self.values.get("name") if self.is_record else None

    @property
    def data(self) -> str | None:
        """The data it names."""
        data = self.values.get("data")
        return data.get("path") if isinstance(data, Mapping) else None

    def over(self, recipe: str) -> RunConfig:
        """Returns the settings of a recipe with those of the file over them.

        Raises:
            ConfigError: The file has a setting that is unknown or not of its kind.
        """
        values = self.values if self.is_record else _merged(to_plain(get_recipe(recipe)), self.values)
        try:
            return from_plain(RunConfig, values)
        except ConfigError as error:
            raise ConfigError(f"'{self.path}': {error}") from error


def read_settings(given: str | Path, command: str) -> SettingsFile:
    """Reads a file of settings.

    Args:
        given: A run folder, its `run.json`, or a TOML or JSON file.
        command: The command that asks, `train` or `teacher`: a record of the other's run is refused.
    """
    path = from_user(given)
    path = path / RUN_FILE if path.is_dir() else path
    require(path.is_file(), f"--config '{given}': no such file; give a run folder, a .toml or a .json")
    values = _read_toml(path) if path.suffix == ".toml" else read_json(path)
    require(isinstance(values, dict), f"'{path}' must hold settings by name, such as training.epochs")
    recipe = values.get("recipe")
    require(recipe is None or isinstance(recipe, str), f"'{path}': recipe must be a name, got {recipe!r:.40}")
    if "config" not in values:
        own = {name: value for name, value in values.items() if name != "recipe"}
        return SettingsFile(path, recipe, False, own)
    config, recipe = values["config"], recipe or ""
    require(isinstance(config, dict), f"'{path}' is damaged: config must be an object")
    kind = "teacher" if recipe.startswith(TEACHER) else "train"
    require(kind == command, f"'{path}' is of a run of stam {kind}: stam {kind} --config takes it")
    gone = removed_settings(config)
    require(not gone, f"'{path}' has {', '.join(gone)}, which this version does not have: take them out")
    return SettingsFile(path, recipe.removeprefix(TEACHER), True, config)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_content(path, most_bytes=2**24).decode())
    except ValueError as error:  # of UTF-8 and of TOML
        raise FileError(f"cannot read '{path}': {error}") from error


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with others over them, part by part."""
    both = dict(base)
    for name, value in over.items():
        inner = both.get(name)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            value = _merged(inner, value)
        both[name] = value
    return both
