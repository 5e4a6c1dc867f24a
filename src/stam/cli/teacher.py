"""`stam teacher [RECIPE] DATA --out RUN`."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from stam.cli.logging import metric_loggers
from stam.cli.parsing import next_command, parse, require_out, split_positionals
from stam.cli.processes import processes
from stam.cli.recipes import (
    choose_base,
    extend_if_asked,
    recipe_first,
    recipes_and_data,
    refuse,
    require_as_begun,
)
from stam.config import AgentConfig
from stam.learning import distributed, experiment
from stam.learning.runs import RunFolder
from stam.settings import DataConfig, RunConfig, TeacherConfig
from stam.weights.locate import NOTHING

SHOWN = (
    *("out", "resume", "config", "init", "model", "epochs", "batch_size", "base_lr", "mixup", "cutmix"),
    *("resize_size", "device", "fast", "seed"),
)


@dataclass(frozen=True)
class Arguments:
    """What `stam teacher` takes beside RECIPE and DATA.

    Attributes:
        out: The run folder; the teacher will be in its `best`. Needed.
        resume: Go on with the run in --out, exactly where it stopped; with a larger --epochs, beyond its end.
        config: Take the settings of this file: the run of another teacher, or a TOML or JSON file of yours.
            Options go over it.
        init: Where it starts: a weights file, a run, package:NAME, hub:NAME, or none.
        class_indices: For each class, its row in the classifier of --init.
        tensorboard: Log to TensorBoard too (extra `logging`).
        wandb: Log to Weights & Biases too (extra `wandb`).
        mlflow: Log to MLflow too (extra `mlflow`).
        teacher: How it is fine-tuned.
        data: Loading and augmentation.
        agent: Image size and normalisation, and the architecture where --init is none.
    """

    out: Path | None = None
    resume: bool = False
    config: Path | None = None
    init: str = "none"
    class_indices: tuple[int, ...] | None = None
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
    teacher: Annotated[TeacherConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TeacherConfig
    )
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=DataConfig)
    agent: AgentConfig = dataclasses.field(default_factory=lambda: AgentConfig(2))


def run(arguments: list[str]) -> None:
    """Fine-tunes a teacher, or goes on with one."""
    positionals, options = split_positionals(arguments, most=2, cls=Arguments)
    positionals = recipe_first(positionals)
    refuse(options, ("--agent.num-classes", "--agent.labels"), "the classes come from the data")
    refuse(options, ("--agent.preprocess-size",), "it is --resize-size of the data")
    refuse(options, ("--path",), "name the data after the recipe")
    recipe, path, base = choose_base(positionals, options, "teacher")
    default = Arguments(
        init=base.init,
        class_indices=base.class_indices,
        teacher=base.teacher_training,
        data=base.data,
        agent=base.agent,
    )
    about = recipes_and_data("--help-all" in options, recipe)
    parsed = parse(Arguments, "teacher", options, default, about, SHOWN, "[RECIPE] DATA")
    if parsed.teacher.model != "deit":
        own = "--class-indices", "--drop-path", *(() if parsed.init == NOTHING else ("--init",))
        refuse(
            options,
            own,
            f"{parsed.teacher.model} starts from timm's weights, or with --init none from nothing",
        )
    out = require_out(parsed.out, "stam teacher tiny path/to/images --out RUN")
    loggers = metric_loggers(out, parsed.tensorboard, parsed.wandb, parsed.mlflow)
    with processes(parsed.teacher.device):
        if parsed.resume:
            require_as_begun(out, "teacher", recipe if positionals else None, path, options)
            extend_if_asked(out, "teacher", options)
            experiment.resume_teacher(out, loggers)
        else:
            experiment.begin_teacher(config_of(parsed, base), out, recipe, loggers)
        if distributed.rank() == 0:
            say_next(RunFolder(out))


def config_of(parsed: Arguments, base: RunConfig) -> RunConfig:
    """Returns the experiment that the arguments describe; an agent is not trained in it."""
    training = dataclasses.replace(
        base.training,
        num_glimpses=1,  # fits every grid; as the others, it asks nothing of teacher and data
        actor_objective="actor-critic",
        core_fraction=0.0,
        num_cores=1,
        feature_weight=0.0,
        large_crop_fraction=0.0,
    )
    return RunConfig(
        agent=parsed.agent,
        data=parsed.data,
        training=training,
        teacher_training=parsed.teacher,
        init=parsed.init,
        class_indices=parsed.class_indices,
    )


def say_next(folder: RunFolder) -> None:
    """Names the teacher and the next command."""
    recipe, data = experiment.recipe_of(folder), folder.config().data.path
    print(f"the teacher is in {folder.path / 'best'}", file=sys.stderr)
    next_command(f"stam train {recipe} {data} --teacher {folder.path} --out RUN")
