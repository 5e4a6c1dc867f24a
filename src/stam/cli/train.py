"""`stam train [RECIPE] [DATA] --out RUN`."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from stam.cli import zoo
from stam.cli.logging import metric_loggers
from stam.cli.parsing import names_of, next_command, parse, require_out, split_positionals, was_given
from stam.cli.processes import processes
from stam.cli.recipes import (
    choose_base,
    extend_if_asked,
    recipe_first,
    recipes_and_data,
    refuse,
    require_as_begun,
)
from stam.config import CORE_SIZES, AgentConfig
from stam.errors import require
from stam.learning import distributed, experiment
from stam.learning.fitting import Fit, default_core, fit, with_core
from stam.learning.optimisation import choose_device
from stam.learning.progress import duration
from stam.learning.runs import RunFolder
from stam.model.agent import Agent
from stam.settings import DataConfig, RunConfig, TeacherConfig, TrainingConfig

SHOWN = (
    *("out", "minutes", "test_fraction", "resume", "config", "init", "teacher"),
    *("num_glimpses", "core", "epochs", "batch_size", "device", "seed"),
)
CHOSEN = ("core", "epochs", "batch_size")  # of these, what `fit` chooses where it is not given


@dataclass(frozen=True)
class Arguments:
    """What `stam train` takes beside RECIPE and DATA.

    Attributes:
        out: The run folder; everything goes there. Needed.
        resume: Go on with the run in --out, exactly where it stopped; with a larger --epochs, beyond its end.
        config: Take the settings of this file: a run folder, its run.json, or a TOML or JSON file of yours.
            Options go over it, and nothing is fitted.
        fit: Choose settings by the images, the machine and the time. Otherwise the recipe's own are taken.
            Only for recipes for own images (tiny, small, base).
        minutes: Time for everything, the teacher included: settings are chosen to make the best of it.
            Without it, a training takes as long as pays on a GPU, and 30 minutes on a CPU.
        init: Where the core starts: a weights file, a run, package:NAME, hub:NAME, or none.
        teacher: A whole-image teacher: the --out folder of `stam teacher`, or a weights file. Without one, a
            teacher is fine-tuned on the data first.
        class_indices: For each class, its row in the classifier of --init.
        start_from_teacher: Whether core and classifiers start as the teacher instead of --init.
        tensorboard: Log to TensorBoard too (extra `logging`).
        wandb: Log to Weights & Biases too (extra `wandb`).
        mlflow: Log to MLflow too (extra `mlflow`).
        agent: What is trained.
        data: Loading and augmentation.
        training: How.
        teacher_training: How the teacher is fine-tuned, where none is given.
    """

    out: Path | None = None
    resume: bool = False
    config: Path | None = None
    fit: bool = True
    minutes: float | None = None
    init: str = "none"
    teacher: str | None = None
    class_indices: tuple[int, ...] | None = None
    start_from_teacher: bool = False
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
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
    positionals, options = split_positionals(arguments, most=2, cls=Arguments)
    positionals = recipe_first(positionals)
    if zoo.is_meant(positionals, options):
        zoo.train(positionals, options)
        return
    refuse(options, ("--num-classes", "--labels"), "the classes come from the data")
    refuse(options, ("--preprocess-size",), "it is --resize-size of the data")
    refuse(options, ("--path",), "name the data after the recipe")
    refuse(options, ("--sharpness",), "it follows from --actor-objective")
    recipe, path, base = choose_base(positionals, options, "train")
    is_fitted = recipe in CORE_SIZES
    about = recipes_and_data("--help-all" in options, recipe, is_fitted)
    chosen = CHOSEN if is_fitted else ()
    parsed = parse(Arguments, "train", options, arguments_of(base), about, SHOWN, "[RECIPE] [DATA]", chosen)
    out = require_out(parsed.out, "stam train path/to/images --out RUN")
    fits = parsed.fit and recipe in CORE_SIZES and parsed.config is None  # a file says what to take
    require(parsed.minutes is None or parsed.config is None, "--minutes chooses settings: leave out --config")
    require(
        parsed.minutes is None or fits,
        f"--minutes is for recipes that are fitted to your images: {', '.join(CORE_SIZES)}, not {recipe}",
    )
    loggers = metric_loggers(out, parsed.tensorboard, parsed.wandb, parsed.mlflow)
    with processes(parsed.training.device):
        if parsed.resume:
            require_as_begun(out, "train", recipe if positionals else None, path, options)
            extend_if_asked(out, "train", options)
            agent = experiment.resume(out, loggers)
        elif fits and distributed.any_process(is_own_run(out, recipe, path, options))[0]:
            agent = experiment.resume(out, loggers)
        elif fits:
            RunFolder.require_free(out)
            fitted = fit_recipe(parsed, options)
            parsed = parse(Arguments, "train", options, arguments_of(fitted.choice.config, parsed))
            in_time = with_epochs(fitted.choice.config, parsed.training.epochs)
            parsed = parse(Arguments, "train", options, arguments_of(in_time, parsed))
            given = experiment.with_fitting_batches(config_of(parsed), len(fitted.splits.train))
            if distributed.rank() == 0:
                explain(fitted, given)
            agent = experiment.begin(given, out, recipe, loggers, fitted.splits, fitted.fit_to_time(given))
        else:
            agent = experiment.begin(config_of(parsed), out, recipe, loggers)
        if distributed.rank() == 0:
            print(f"trained; the run is in {out}{_handover(agent, RunFolder(out).config())}", file=sys.stderr)
            next_command(f"stam evaluate {out}")


def with_epochs(chosen: RunConfig, epochs: int) -> RunConfig:
    """Returns what was chosen, its schedules in proportion to the epochs that somebody wants instead."""
    return dataclasses.replace(chosen, training=chosen.training.with_epochs(epochs))


def _handover(agent: Agent, config: RunConfig) -> str:
    """Says when an order takes over from the actor, where the last validation chose so."""
    if agent.config.policy == config.agent.policy:
        return ""
    count = agent.config.policy.partition(":")[2]
    until = "the first glimpse" if count == "1" else f"{count} glimpses"
    return f"; after {until} it looks in a fixed order, which was better on the validation images"


def is_own_run(out: Path, recipe: str, path: str | None, options: list[str]) -> bool:
    """Tells whether `torchrun` has started the job again that began the run in a folder.

    What was fitted then would be fitted otherwise now: only what is given can be compared with the run, and
    it must agree.
    """
    folder = RunFolder(out)
    if not folder.is_of_this_job():
        return False
    begun = folder.config()
    if experiment.recipe_of(folder) != recipe or path not in (None, begun.data.path):
        return False
    return config_of(parse(Arguments, "train", options, arguments_of(begun))) == begun


def arguments_of(config: RunConfig, given: Arguments | None = None) -> Arguments:
    """Returns an experiment as arguments; what is no part of it is as given."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)}
    return dataclasses.replace(given or Arguments(), **values)


def fit_recipe(parsed: Arguments, options: list[str]) -> Fit:
    """Fits a recipe to the images and the machine."""
    if distributed.rank() == 0:
        print("looking at the images and timing a few batches", file=sys.stderr)
    require(
        parsed.minutes is None or not was_given(options, "--epochs"),
        "--minutes chooses the number of epochs: leave out --epochs",
    )
    if parsed.teacher_training.model != "deit" and not was_given(options, "--feature-weight"):
        # features are followed where they are like the agent's, which the fit finds out
        training = dataclasses.replace(parsed.training, feature_weight=0.0)
        parsed = dataclasses.replace(parsed, training=training, start_from_teacher=False)
    asked, parsed = parsed.training, _with_core(parsed, options)
    # whoever says how a teacher is trained wants one trained
    may_skip = not any(name.startswith("--teacher-training") for name in names_of(options))
    on_cpu, training = choose_device(parsed.training.device).type == "cpu", parsed.training
    if on_cpu and training.precision == "auto" and was_given(options, "--precision"):
        training = dataclasses.replace(training, precision="float32")  # what it means: nothing else is chosen
        parsed = dataclasses.replace(parsed, training=training)
    fitted = fit(config_of(parsed), parsed.minutes, may_skip)
    if was_given(options, "--core-fraction") and asked.core_fraction == 0:  # so there is one core
        found = fitted.choice.config
        found = dataclasses.replace(found, training=dataclasses.replace(found.training, num_cores=1))
        fitted = dataclasses.replace(fitted, choice=dataclasses.replace(fitted.choice, config=found))
    return fitted


def _with_core(parsed: Arguments, options: list[str]) -> Arguments:
    """Returns arguments with core, actor and objective that go with each other and with what is given."""
    agent, training = parsed.agent, parsed.training
    core = agent.core
    if not was_given(options, "--core"):
        needs_causal = training.core_fraction > 0 or training.actor_objective == "gains"
        core = "causal" if needs_causal else default_core(training.device)
    actor = agent.actor if was_given(options, "--actor") else None
    objective = training.actor_objective if was_given(options, "--actor-objective") else None
    together = dataclasses.replace(training, core_fraction=0.0, num_cores=1)
    causal = dataclasses.replace(parsed, training=together, agent=dataclasses.replace(agent, core="causal"))
    found = with_core(config_of(causal), core, actor, objective)
    stages = dataclasses.replace(found.training, core_fraction=training.core_fraction)
    dataclasses.replace(found, training=stages)  # what does not go together is refused before the fit
    return arguments_of(found, parsed)


def explain(fitted: Fit, config: RunConfig) -> None:
    """Says what was chosen and why, and how long it will take."""
    chosen, device = fitted.choice.config, choose_device(config.training.device)
    scaled = with_epochs(chosen, config.training.epochs)  # what follows from the epochs is nobody's wish
    scaled = dataclasses.replace(
        scaled, training=dataclasses.replace(scaled.training, epochs=chosen.training.epochs)
    )
    name = f"the GPU {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "the CPU"
    expected = fitted.expected(config)
    parts = [f"{duration(expected.agent)} for the agent"]
    parts += [f"{duration(expected.teacher)} for its teacher"] if expected.teacher else []
    train, val = fitted.splits.train, fitted.splits.val
    images = f"{len(train):,} training and {len(val):,} validation images"
    lines = [
        f"{images} of {len(train.classes)} classes; chosen for them:",
        *(f"  {reason}" for reason in fitted.choice.reasons),
        f"  core {config.agent.core}, on {name}",
        *(f"  but {setting}, as you say" for setting in _overridden(scaled, config)),
        f"expected time: {duration(expected.total)} ({', '.join(parts)})",
    ]
    lines += [f"  {fitted.note}"] if fitted.note else []
    print("\n".join(lines), file=sys.stderr)


def _overridden(chosen: Any, config: Any) -> Iterator[str]:
    """Yields the settings in which a configuration differs from what was chosen."""
    for field in dataclasses.fields(config):
        ours, theirs = getattr(chosen, field.name), getattr(config, field.name)
        if dataclasses.is_dataclass(theirs):
            yield from _overridden(ours, theirs)
        elif ours != theirs:
            yield f"{field.name.replace('_', '-')} {theirs}"


def config_of(parsed: Arguments) -> RunConfig:
    """Returns the experiment that the arguments describe."""
    return RunConfig(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(RunConfig)})
