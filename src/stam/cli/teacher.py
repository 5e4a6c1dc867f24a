"""`stam teacher [RECIPE] DATA --out RUN`."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from stam.cli.data import open_data
from stam.cli.logging import tensorboard_logger
from stam.cli.parsing import next_command, parse, require_out, split_positionals, wants_help
from stam.cli.processes import processes
from stam.cli.train import (
    RECIPES_AND_DATA,
    begin_folder,
    choose_recipe,
    open_to_go_on,
    refuse,
    require_batches,
    with_classes,
)
from stam.config import AgentConfig
from stam.learning import distributed
from stam.learning.finetuning import build_student, finetune
from stam.learning.optimisation import choose_device
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder
from stam.settings import DataConfig, RunConfig, TeacherConfig, TrainingConfig


@dataclass(frozen=True)
class Arguments:
    """What `stam teacher` takes beside RECIPE and DATA.

    Attributes:
        out: The run folder; the teacher will be in its `best`. Needed.
        resume: Go on with the run in --out, exactly where it stopped.
        init: Where it starts: a weights file, a run, package:NAME, hub:NAME, or none.
        class_indices: For each class, its row in the classifier of --init.
        tensorboard: Log to TensorBoard too (extra `logging`).
        teacher: How it is fine-tuned.
        data: Loading and augmentation.
        agent: Image size and normalisation, and the architecture where --init is none.
    """

    out: Path | None = None
    resume: bool = False
    init: str = "none"
    class_indices: tuple[int, ...] | None = None
    tensorboard: bool = False
    teacher: Annotated[TeacherConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TeacherConfig
    )
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=DataConfig)
    agent: AgentConfig = dataclasses.field(default_factory=lambda: AgentConfig(2))


def run(arguments: list[str]) -> None:
    """Fine-tunes a teacher, or goes on with one."""
    positionals, options = split_positionals(arguments, most=2)
    refuse(options, ("--agent.num-classes", "--agent.labels"), "the classes come from the data")
    refuse(options, ("--path",), "name the data after the recipe")
    recipe, path = choose_recipe(positionals, wants_help(options) or "--resume" in options)
    base = get_recipe(recipe)
    data = base.data if path is None else dataclasses.replace(base.data, path=path)
    parsed = parse(
        Arguments,
        "teacher",
        options,
        default=Arguments(
            init=base.init,
            class_indices=base.class_indices,
            teacher=base.teacher_training,
            data=data,
            agent=base.agent,
        ),
        more_help=RECIPES_AND_DATA,
    )
    out = require_out(parsed.out, "stam teacher tiny path/to/images --out RUN")
    with processes(parsed.teacher.device):
        begun = None
        if parsed.resume:
            begun = open_to_go_on(out, "teacher", recipe if positionals else None, path, options)
        work(parsed, recipe, base.training, out, begun)


def work(
    parsed: Arguments, recipe: str, training: TrainingConfig, out: Path, begun: RunFolder | None
) -> None:
    """Does what the arguments say; goes on with a run that was begun."""
    if begun is not None:
        config = begun.config()
        recipe = begun.record()["recipe"].removeprefix("teacher:")
        splits = open_data(config.data, begun.split())
    else:
        splits = open_data(parsed.data)
        agent = with_classes(parsed.agent, splits.train.classes)
        training = dataclasses.replace(training, num_glimpses=1)
        config = RunConfig(
            agent, parsed.data, training, parsed.teacher, parsed.init, None, parsed.class_indices
        )
        require_batches(len(splits.train), config.teacher_training.batch_size, "--batch-size")
    choose_device(config.teacher_training.device)
    torch.manual_seed(config.teacher_training.seed)
    model, record = build_student(
        config.teacher_training, config.agent, config.init, splits.train.classes, config.class_indices
    )
    folder = begun or begin_folder(out, f"teacher:{recipe}", config, splits.record)
    loggers = (tensorboard_logger(folder.path),) if parsed.tensorboard and distributed.rank() == 0 else ()
    finetune(
        folder,
        config.teacher_training,
        config.data,
        config.agent,
        model,
        record,
        splits.train,
        splits.val,
        parsed.resume,
        f"{distributed.launcher()} teacher --resume --out {folder.path}",
        loggers,
    )
    if distributed.rank() > 0:
        return
    print(f"the teacher is in {folder.path / 'best'}", file=sys.stderr)
    next_command(f"stam train {recipe} {config.data.path} --teacher {folder.path} --out RUN")
