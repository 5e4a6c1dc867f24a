"""`stam train [RECIPE] [DATA] --out RUN`."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from stam.cli.data import open_data
from stam.cli.logging import tensorboard_logger
from stam.cli.parsing import (
    next_command,
    parse,
    require_out,
    split_positionals,
    wants_help,
)
from stam.cli.processes import processes
from stam.config import AgentConfig
from stam.data import Scenes, SplitRecord
from stam.errors import ConfigError, require
from stam.learning import distributed
from stam.learning.finetuning import Student, build_student, finetune
from stam.learning.loop import Plan
from stam.learning.optimisation import choose_device
from stam.learning.recipes import RECIPES, get_recipe
from stam.learning.runs import RunError, RunFolder
from stam.learning.training import train
from stam.model.agent import Agent
from stam.model.teacher import Teacher, require_features
from stam.settings import DataConfig, RunConfig, TeacherConfig, TrainingConfig
from stam.weights import open_teacher, start_agent

DEFAULT_RECIPE = "digits"
DEFAULT_FOR_IMAGES = "tiny"
RECIPES_AND_DATA = (
    f"RECIPE is one of: {', '.join(RECIPES)}.\n\n"
    "DATA is the word digits, a folder of class folders, or tar shards."
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
    tensorboard: bool = False
    agent: Annotated[AgentConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: AgentConfig(2)
    )
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=DataConfig)
    training: Annotated[TrainingConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TrainingConfig
    )
    teacher_training: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)


def run(arguments: list[str], quietly: bool = False) -> None:
    """Trains an agent, or goes on with a run; quietly for a command that has more to do."""
    positionals, options = split_positionals(arguments, most=2)
    refuse(options, ("--num-classes", "--labels"), "the classes come from the data")
    refuse(options, ("--path",), "name the data after the recipe")
    recipe, path = choose_recipe(positionals, wants_help(options) or "--resume" in options)
    base = get_recipe(recipe)
    if path is not None:
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, path=path))
    parsed = parse(
        Arguments,
        "train",
        options,
        default=Arguments(
            init=base.init,
            teacher=base.teacher,
            class_indices=base.class_indices,
            agent=base.agent,
            data=base.data,
            training=base.training,
            teacher_training=base.teacher_training,
        ),
        more_help=RECIPES_AND_DATA,
    )
    out = require_out(parsed.out, "stam train digits --out RUN")
    with processes(parsed.training.device):
        if parsed.resume:
            named = recipe if positionals else None
            resume(open_to_go_on(out, "train", named, path, options), parsed.tensorboard)
        else:
            begin(parsed, recipe, out)
        if not quietly and distributed.rank() == 0:
            say_next(out)


def begin(parsed: Arguments, recipe: str, out: Path) -> None:
    """Trains an agent from its start."""
    config = RunConfig(
        parsed.agent,
        parsed.data,
        parsed.training,
        parsed.teacher_training,
        parsed.init,
        parsed.teacher,
        parsed.class_indices,
    )
    check_machine(config)
    splits = open_data(config.data)
    config = dataclasses.replace(config, agent=with_classes(config.agent, splits.train.classes))
    require_batches(len(splits.train), config.training.batch_size, "--batch-size")
    torch.manual_seed(config.training.seed)
    agent = start_agent(config.init, config.agent, config.class_indices)
    config = dataclasses.replace(config, agent=agent.config)
    teacher = find_teacher(config, splits.train)
    folder = begin_folder(out, recipe, config, splits.record)
    finish(folder, config, agent, teacher, splits.train, splits.val, False, parsed.tensorboard)


def require_batches(num_scenes: int, batch_size: int, option: str) -> None:
    """Raises where the scenes do not make one batch, or processes cannot share it."""
    require(
        batch_size <= num_scenes,
        f"{option} {batch_size} is larger than the {num_scenes} training images: use at most {num_scenes}",
    )
    Plan(num_scenes, 1, batch_size, 1.0, 0).num_batches()  # refuses a batch that cannot be shared


def find_teacher(config: RunConfig, train_scenes: Scenes) -> Teacher | Student:
    """Opens the teacher that is named, or builds the one to be fine-tuned, so that nothing fails later."""
    classes = train_scenes.classes
    if config.teacher is not None:
        teacher = open_teacher(config.teacher, classes, config.agent, config.class_indices)
        require_features(teacher, config.agent.width, config.training.feature_weight)
        return teacher
    given = config.teacher_training
    require_batches(len(train_scenes), given.batch_size, "--teacher-training.batch-size")
    return build_student(given, config.agent, config.init, classes, config.class_indices)


def begin_folder(out: Path, recipe: str, config: RunConfig, split: SplitRecord) -> RunFolder:
    """Makes the run folder, once for all processes."""
    if distributed.rank() == 0:
        RunFolder.create(out).write_record(recipe, config, split)
    distributed.wait()
    return RunFolder(out)


def refuse(options: list[str], names: tuple[str, ...], why: str) -> None:
    """Raises where an option is given that would be overruled."""
    for option in options:
        if option.split("=")[0] in names:
            raise ConfigError(f"{option} cannot be set here: {why}")


def open_to_go_on(
    out: Path, command: str, recipe: str | None, path: str | None, options: list[str]
) -> RunFolder:
    """Opens a run to go on with; whatever it was not begun with is refused.

    Args:
        out: The run folder.
        command: The command that is to go on, train or teacher.
        recipe: The recipe named, if one was.
        path: The data named, if it was.
        options: All options given.
    """
    extra = [
        option
        for option in options
        if option.startswith("--") and option.split("=")[0] not in ("--resume", "--out", "--tensorboard")
    ]
    if extra:
        raise RunError(f"--resume goes on with the settings of the run: leave out {' '.join(extra)}")
    folder = RunFolder.open(out)
    begun, data = folder.record()["recipe"], folder.config().data.path
    kind = "teacher" if begun.startswith("teacher:") else "train"
    if kind != command:
        raise RunError(f"the run in '{out}' was begun with stam {kind}: stam {kind} --resume --out {out}")
    begun = begun.removeprefix("teacher:")
    if recipe not in (None, begun):
        raise RunError(f"the run in '{out}' was begun with the recipe '{begun}': leave out {recipe}")
    if path is not None and Path(path).resolve() != Path(data).resolve():
        raise RunError(f"the run in '{out}' was begun with the data '{data}': leave out {path}")
    return folder


def resume(folder: RunFolder, tensorboard: bool) -> None:
    """Goes on with a run, with the settings it was begun with."""
    config = folder.config()
    check_machine(config)
    splits = open_data(config.data, folder.split())
    torch.manual_seed(config.training.seed)
    agent = start_agent(config.init, config.agent, config.class_indices)
    teacher = find_teacher(config, splits.train)
    finish(folder, config, agent, teacher, splits.train, splits.val, True, tensorboard)


def finish(
    folder: RunFolder,
    config: RunConfig,
    agent: Agent,
    teacher: Teacher | Student,
    train_scenes: Scenes,
    val_scenes: Scenes,
    resumed: bool,
    tensorboard: bool,
) -> None:
    """Fine-tunes a teacher where there is none, then trains the agent."""
    loggers = (tensorboard_logger(folder.path),) if tensorboard and distributed.rank() == 0 else ()
    if not isinstance(teacher, Teacher):
        teacher = own_teacher(folder, config, teacher, train_scenes, val_scenes)
    train(folder, config, agent, teacher, train_scenes, val_scenes, resumed, loggers)


def say_next(out: Path) -> None:
    """Names the run and the next command."""
    print(f"trained; the run is in {out}", file=sys.stderr)
    next_command(f"stam evaluate {out}")


def own_teacher(
    folder: RunFolder, config: RunConfig, student: Student, train_scenes: Scenes, val_scenes: Scenes
) -> Teacher:
    """Fine-tunes the run's own teacher in `RUN/teacher`, or goes on with it."""
    inner = RunFolder(folder.path / "teacher")
    inner.path.mkdir(exist_ok=True)
    if distributed.rank() == 0:
        print("no teacher given: fine-tuning one on the data first", file=sys.stderr)
    return finetune(
        inner,
        config.teacher_training,
        config.data,
        config.agent,
        *student,
        train_scenes,
        val_scenes,
        resume=inner.state_file.exists(),
        how_to_resume=f"{distributed.launcher()} train --resume --out {folder.path}",
    )


def choose_recipe(positionals: list[str], without_data: bool = False) -> tuple[str, str | None]:
    """Returns the recipe and the data that the words before the options name.

    Args:
        positionals: Those words.
        without_data: Whether data may be missing, as when only help is asked for.
    """
    if not positionals:
        return DEFAULT_RECIPE, None
    first, *rest = positionals
    if first not in RECIPES and not rest and Path(first).exists():
        return DEFAULT_FOR_IMAGES, first
    get_recipe(first)
    needs_data = not first.startswith("digits") and not without_data
    require(
        bool(rest) or not needs_data,
        f"the recipe '{first}' needs data: stam train {first} path/to/images --out RUN",
    )
    return first, rest[0] if rest else None


def with_classes(agent: AgentConfig, classes: tuple[str, ...]) -> AgentConfig:
    """Returns the agent's configuration for the data's classes."""
    return dataclasses.replace(agent, num_classes=len(classes), labels=classes)


def check_machine(config: RunConfig) -> None:
    """Raises where the run cannot begin on this machine."""
    choose_device(config.training.device)
    choose_device(config.teacher_training.device)
