"""`stam train [RECIPE] [DATA] --out RUN`."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stam.cli import zoo
from stam.cli.logging import tensorboard_logger
from stam.cli.parsing import next_command, parse, require_out, split_positionals, wants_help
from stam.cli.processes import processes
from stam.cli.recipes import choose_recipe, recipes_and_data, refuse, require_as_begun
from stam.config import AgentConfig
from stam.learning import distributed, experiment
from stam.learning.recipes import get_recipe
from stam.settings import DataConfig, RunConfig, TeacherConfig, TrainingConfig

SHOWN = (
    *("out", "resume", "init", "teacher", "image_size", "glimpse_size", "num_glimpses", "core", "policy"),
    *("consistency", "epochs", "batch_size", "base_lr", "device", "fast", "seed", "tensorboard"),
)


@dataclass(frozen=True)
class Arguments:
    """What `stam train` takes beside RECIPE and DATA.

    Attributes:
        out: The run folder; everything goes there. Needed.
        resume: Go on with the run in --out, exactly where it stopped.
        init: Where the core starts: a weights file, a run, package:NAME, hub:NAME, or none.
        teacher: A whole-image teacher: the --out folder of `stam teacher`, or a weights file. Without one, a
            teacher is fine-tuned on the data first.
        class_indices: For each class, its row in the classifier of --init.
        start_from_teacher: Whether core and classifiers start as the teacher instead of --init.
        tensorboard: Log to TensorBoard too (extra `logging`).
        agent: What is trained.
        data: Loading and augmentation.
        training: How.
        teacher_training: How the teacher is fine-tuned, where none is given.
    """

    out: Path | None = None
    resume: bool = False
    init: str = "none"
    teacher: str | None = None
    class_indices: tuple[int, ...] | None = None
    start_from_teacher: bool = False
    tensorboard: bool = False
    agent: Annotated[AgentConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: AgentConfig(2)
    )
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=DataConfig)
    training: Annotated[TrainingConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TrainingConfig
    )
    teacher_training: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)


def run(arguments: list[str]) -> None:
    """Trains an agent or a system of the zoo, or goes on with a run."""
    positionals, options = split_positionals(arguments, most=2)
    if zoo.is_meant(positionals, options):
        zoo.train(positionals, options)
        return
    refuse(options, ("--num-classes", "--labels"), "the classes come from the data")
    refuse(options, ("--path",), "name the data after the recipe")
    recipe, path = choose_recipe(positionals, wants_help(options) or "--resume" in options)
    base = get_recipe(recipe)
    if path is not None:
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, path=path))
    default = Arguments(**{field.name: getattr(base, field.name) for field in dataclasses.fields(RunConfig)})
    about = recipes_and_data(in_full="--help-all" in options)
    parsed = parse(Arguments, "train", options, default, about, SHOWN)
    out = require_out(parsed.out, "stam train digits --out RUN")
    loggers = (tensorboard_logger(out),) if parsed.tensorboard else ()
    with processes(parsed.training.device):
        if parsed.resume:
            require_as_begun(out, "train", recipe if positionals else None, path, options)
            experiment.resume(out, loggers)
        else:
            experiment.begin(config_of(parsed), out, recipe, loggers)
        if distributed.rank() == 0:
            print(f"trained; the run is in {out}", file=sys.stderr)
            next_command(f"stam evaluate {out}")


def config_of(parsed: Arguments) -> RunConfig:
    """Returns the experiment that the arguments describe."""
    return RunConfig(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(RunConfig)})
