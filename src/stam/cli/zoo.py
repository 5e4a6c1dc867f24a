"""`stam train SYSTEM DATA --out RUN`: what `stam train` does for a system of the zoo."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from stam.cli.logging import tensorboard_logger
from stam.cli.parsing import next_command, parse, require_out, wants_help
from stam.cli.recipes import refuse
from stam.errors import require
from stam.learning.runs import RunError, RunFolder
from stam.settings import DataConfig
from stam.weights.locate import NOTHING
from stam.zoo import SYSTEMS, require_system
from stam.zoo.training import ZooConfig, ZooTraining, begin, default_config, is_zoo_run, read_config, resume


def is_meant(positionals: list[str], options: list[str]) -> bool:
    """Tells whether a system of the zoo is named, or a run of one is to be resumed."""
    if positionals:
        return positionals[0] in SYSTEMS
    out = _value(options, "--out")
    return "--resume" in options and out is not None and is_zoo_run(out)


def _value(options: list[str], name: str) -> str | None:
    for position, option in enumerate(options):
        if option.startswith(f"{name}="):
            return option.partition("=")[2]
        if option == name and position + 1 < len(options):
            return options[position + 1]
    return None


def train(positionals: list[str], options: list[str]) -> None:
    """Trains a system, or goes on with its run."""
    if "--resume" in options and not wants_help(options):
        _go_on(positionals, options)
        return
    name, *data = positionals
    refuse(options, ("--num-classes", "--labels"), "the classes come from the data")
    refuse(options, ("--path",), "name the data after the system")
    require(
        bool(data) or wants_help(options),
        f"the system '{name}' needs data: stam train {name} path/to/images --out RUN",
    )
    default = default_config(name, data[0] if data else "images")
    cls = _arguments(name)
    given: Any = cls(init=default.init, system=default.system, data=default.data, training=default.training)
    parsed: Any = parse(cls, "train", options, given, f"The system {name}: {require_system(name).paper}.")
    out = require_out(parsed.out, f"stam train {name} path/to/images --out RUN")
    loggers = (tensorboard_logger(out),) if parsed.tensorboard else ()
    begin(ZooConfig(name, parsed.system, parsed.data, parsed.training, parsed.init), out, loggers)
    _say_done(out)


def _go_on(positionals: list[str], options: list[str]) -> None:
    allowed = ("--resume", "--out", "--tensorboard")
    extra = [each for each in options if each.startswith("--") and each.split("=")[0] not in allowed]
    if extra:
        raise RunError(f"--resume goes on with the settings of the run: leave out {' '.join(extra)}")
    out = Path(_value(options, "--out") or "")
    require(bool(_value(options, "--out")), "name the run to go on with: stam train --resume --out RUN")
    config = read_config(RunFolder.open(out))
    if positionals and positionals[0] != config.name:
        raise RunError(f"the run in '{out}' was begun with '{config.name}': leave out {positionals[0]}")
    if positionals[1:] and Path(positionals[1]).resolve() != Path(config.data.path).resolve():
        raise RunError(f"the run in '{out}' was begun with '{config.data.path}': leave out {positionals[1]}")
    resume(out, (tensorboard_logger(out),) if "--tensorboard" in options else ())
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
        resume: Go on with the run in --out, exactly where it stopped.
        init: Where its DeiT starts, if it has one: a weights file, a run, package:NAME, hub:NAME, or none.
        tensorboard: Log to TensorBoard too (extra `logging`).
    """

    out: Path | None = None
    resume: bool = False
    init: str = NOTHING
    tensorboard: bool = False
