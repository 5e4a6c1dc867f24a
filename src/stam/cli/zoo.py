"""`stam train SYSTEM DATA --out RUN`: what `stam train` does for a system of the zoo."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from stam.cli.logging import OPTIONS, metric_loggers
from stam.cli.parsing import next_command, parse, require_out, value_of, wants_help
from stam.cli.recipes import epochs_asked, refuse
from stam.cli.settings_file import SettingsFile, read_settings
from stam.errors import require
from stam.learning.recipes import RECIPES
from stam.learning.runs import RunError, RunFolder
from stam.settings import DataConfig
from stam.weights.locate import NOTHING
from stam.zoo import SYSTEMS, require_system
from stam.zoo.training import (
    ZooConfig,
    ZooTraining,
    begin,
    config_from,
    default_config,
    extend,
    is_zoo_run,
    read_config,
    resume,
)


def is_meant(positionals: list[str], options: list[str]) -> bool:
    """Tells whether a system of the zoo is named, by its name or by a run of it."""
    if positionals and positionals[0] in SYSTEMS:
        return True
    file = _settings(options)
    if file is not None:
        return file.system in SYSTEMS
    out = value_of(options, "--out")
    return "--resume" in options and out is not None and is_zoo_run(out)


def _settings(options: list[str]) -> SettingsFile | None:
    given = value_of(options, "--config")
    return None if given is None or wants_help(options) else read_settings(given, "train")


def train(positionals: list[str], options: list[str]) -> None:
    """Trains a system, or goes on with its run."""
    if "--resume" in options and not wants_help(options):
        _go_on(positionals, options)
        return
    refuse(options, ("--num-classes", "--labels"), "the classes come from the data")
    refuse(options, ("--preprocess-size",), "it is --resize-size of the data")
    refuse(options, ("--path",), "name the data after the system")
    default = _base(positionals, options)
    name = default.name
    cls = _arguments(name)
    given: Any = cls(init=default.init, system=default.system, data=default.data, training=default.training)
    about = f"The system {name}: {require_system(name).paper}."
    parsed: Any = parse(cls, "train", options, given, about, words=f"{name} DATA")
    out = require_out(parsed.out, f"stam train {name} path/to/images --out RUN")
    loggers = metric_loggers(out, parsed.tensorboard, parsed.wandb, parsed.mlflow)
    begin(ZooConfig(name, parsed.system, parsed.data, parsed.training, parsed.init), out, loggers)
    _say_done(out)


def _base(positionals: list[str], options: list[str]) -> ZooConfig:
    """Returns the experiment over which the options go: the system's own, or that of another run of it."""
    named = positionals[0] if positionals and positionals[0] in SYSTEMS else None
    data = positionals[1:] if named else positionals
    file = _settings(options)
    if file is None or file.system is None:
        require(
            bool(data) or wants_help(options),
            f"the system '{named}' needs data: stam train {named} path/to/images --out RUN",
        )
        require(file is None, f"--config of a system takes a run of it: give the folder of one of {named}")
        return default_config(str(named), data[0] if data else "images")
    require(named in (None, file.system), f"'{file.path}' is of a run of {file.system}, not of {named}")
    config = config_from(file.values)
    path = data[0] if data else config.data.path
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))


def _go_on(positionals: list[str], options: list[str]) -> None:
    allowed = ("--resume", "--out", "--epochs", *OPTIONS)
    extra = [each for each in options if each.startswith("--") and each.split("=")[0] not in allowed]
    if extra:
        raise RunError(f"--resume goes on with the settings of the run: leave out {' '.join(extra)}")
    out = Path(value_of(options, "--out") or "")
    require(bool(value_of(options, "--out")), "name the run to go on with: stam train --resume --out RUN")
    config = read_config(RunFolder.open(out))
    words = positionals[1:] if positionals[:1] == [config.name] else positionals
    if words and (words[0] in SYSTEMS or words[0] in RECIPES):
        raise RunError(f"the run in '{out}' was begun with '{config.name}': leave out {words[0]}")
    if words and Path(words[0]).resolve() != Path(config.data.path).resolve():
        raise RunError(f"the run in '{out}' was begun with '{config.data.path}': leave out {words[0]}")
    epochs = epochs_asked(options)
    if epochs is not None:
        print(extend(out, epochs), file=sys.stderr)
    resume(out, metric_loggers(out, *(name in options for name in OPTIONS)))
    _say_done(out)


def _say_done(out: Path) -> None:
    print(f"trained; the run is in {out}", file=sys.stderr)
    next_command(f"stam evaluate {out}")


def _arguments(name: str) -> type:
    """Returns the options of a system: those all have, and its own settings beside them."""
    flat = tyro.conf.arg(name="")
    own = require_system(name).settings
    fields: list[Any] = [
        ("system", Annotated[own, flat], dataclasses.field(default_factory=own)),
        ("data", Annotated[DataConfig, flat], dataclasses.field(default_factory=DataConfig)),
        ("training", Annotated[ZooTraining, flat], dataclasses.field(default_factory=ZooTraining)),
    ]
    return dataclasses.make_dataclass("Arguments", fields, bases=(_Shared,), frozen=True)


@dataclass(frozen=True)
class _Shared:
    """What every system takes.

    Attributes:
        out: The run folder; everything goes there. Needed.
        resume: Go on with the run in --out, exactly where it stopped; with a larger --epochs, beyond its end.
        config: Take the settings of another run of this system: its folder, or its run.json.
        init: Where its DeiT starts, if it has one: a weights file, a run, package:NAME, hub:NAME, or none.
        tensorboard: Log to TensorBoard too (extra `logging`).
        wandb: Log to Weights & Biases too (extra `wandb`).
        mlflow: Log to MLflow too (extra `mlflow`).
    """

    out: Path | None = None
    resume: bool = False
    config: Path | None = None
    init: str = NOTHING
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
