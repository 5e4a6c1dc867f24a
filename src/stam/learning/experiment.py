"""From a configuration to a trained agent or teacher in one call: begin a run, or resume one.

What can be wrong is found before the run folder is made: the device, the data, the batch, the weights.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stam.data import Scenes, SplitRecord, Splits, Subset, check_images, open_scenes
from stam.data.on_device import keep_on_device
from stam.errors import DataError, require
from stam.learning import distributed
from stam.learning.finetuning import Student, build_student, finetune
from stam.learning.loop import MetricLogger, Plan, num_workers
from stam.learning.optimisation import choose_device
from stam.learning.runs import RunError, RunFolder, read_metrics
from stam.learning.training import FitToTime, train
from stam.model.agent import Agent
from stam.model.teacher import Teacher, require_features
from stam.settings import REMOVED, DataConfig, RunConfig, TeacherConfig, TrainingConfig
from stam.weights import copy_teacher, open_teacher, start_agent

TEACHER = "teacher:"  # before the recipe in the record of a teacher's run

Loggers = tuple[MetricLogger, ...]


def begin(
    config: RunConfig,
    out: str | Path,
    recipe: str = "custom",
    loggers: Loggers = (),
    splits: Splits | None = None,
    fit_to_time: FitToTime | None = None,
) -> Agent:
    """Trains an agent in a new run folder, fine-tuning a teacher first where none is named.

    Where `torchrun` has started the job again after a failure, it goes on with its own run.

    Args:
        config: The whole experiment, such as `stam.learning.recipes.get_recipe` returns; its classes are
            replaced by those of the data.
        out: The run folder; it must be empty or absent.
        recipe: What the record of the run calls the configuration.
        loggers: Called with every epoch's metrics, beside `metrics.jsonl`.
        splits: The data, where `open_data` has opened it already.
        fit_to_time: Changes the number of epochs once the speed is known, as in `training.train`.

    Raises:
        StamError: The run cannot begin as asked; no folder was made.
        Interrupted: Ctrl-C; the state was saved and `resume` goes on from it.
    """
    _require_free(out)
    choose_device(config.training.device)
    choose_device(config.teacher_training.device)
    splits = splits or open_data(config.data)
    config = with_classes(config, splits.train.classes)
    config = with_fitting_batches(config, len(splits.train))
    agent, teacher = _start(config, splits)
    config = dataclasses.replace(config, agent=agent.config)
    folder, restarted = _make_folder(out, recipe, config, splits.record)
    return _train(folder, config, agent, teacher, splits, restarted, loggers, fit_to_time)


def resume(out: str | Path, loggers: Loggers = ()) -> Agent:
    """Goes on with a run of `begin`, exactly where it stopped and with the settings it was begun with."""
    folder = reopen(out, "train")
    config = folder.config()
    choose_device(config.training.device)
    choose_device(config.teacher_training.device)
    splits = open_data(config.data, folder.require_split())
    agent, teacher = _start(config, splits)
    return _train(folder, config, agent, teacher, splits, True, loggers)


def begin_teacher(
    config: RunConfig, out: str | Path, recipe: str = "custom", loggers: Loggers = ()
) -> Teacher:
    """Fine-tunes a whole-image teacher in a new run folder; the arguments are those of `begin`."""
    _require_free(out)
    splits = open_data(config.data)
    config = dataclasses.replace(with_classes(config, splits.train.classes), teacher=None)
    batch = fitting_batch(len(splits.train), config.teacher_training.batch_size, "--batch-size")
    how = dataclasses.replace(config.teacher_training, batch_size=batch)
    config = dataclasses.replace(config, teacher_training=how)
    student = _start_student(config, splits)
    folder, restarted = _make_folder(out, f"{TEACHER}{recipe}", config, splits.record)
    return _finetune(folder, config, student, splits, restarted, loggers)


def resume_teacher(out: str | Path, loggers: Loggers = ()) -> Teacher:
    """Goes on with a run of `begin_teacher`, as `resume` does with a run of `begin`."""
    folder = reopen(out, "teacher")
    config = folder.config()
    splits = open_data(config.data, folder.require_split())
    return _finetune(folder, config, _start_student(config, splits), splits, True, loggers)


def reopen(out: str | Path, command: str) -> RunFolder:
    """Opens a run to go on with.

    Args:
        out: The run folder.
        command: What the run must have been begun with: `train` or `teacher`.

    Raises:
        RunError: There is no run, it was begun with the other command, or with a setting that this version
            does not have and that made a difference.
    """
    folder = RunFolder.open(out)
    record = folder.record()
    kind = "teacher" if record["recipe"].startswith(TEACHER) else "train"
    if kind != command:
        raise RunError(f"the run in '{out}' was begun with stam {kind}: stam {kind} --resume --out {out}")
    gone = removed_settings(record["config"]) if kind == "train" else []
    if gone:
        raise RunError(
            f"the run in '{out}' was begun with {', '.join(gone)}, which this version does not have: "
            "resume it with the version that began it, or begin another run"
        )
    return folder


def removed_settings(recorded: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a recorded configuration that made a difference and that are gone since."""
    training = recorded.get("training", {})
    return [
        f"{name} {training[name]}"
        for name, neutral in REMOVED.items()
        if training.get(name, neutral) != neutral
    ]


def extend(out: str | Path, command: str, epochs: int) -> str:
    """Gives a run more epochs, with which resuming it then goes on; returns what that means, in a sentence.

    Args:
        out: The run folder.
        command: What the run was begun with, `train` or `teacher`.
        epochs: Epochs in all.

    Raises:
        RunError: It has more.
    """
    folder = reopen(out, command)
    part = "training" if command == "train" else "teacher_training"
    before = getattr(folder.config(), part)
    in_stages = command == "train" and len(before.stages) > 1
    after = before.extended(epochs) if in_stages else dataclasses.replace(before, epochs=epochs)
    also = {"core_fraction": after.core_fraction} if in_stages else {}
    done = lengthen(folder, part, before.epochs, epochs, also)
    if done is None:
        return already_has(epochs)
    if in_stages:
        return (
            f"extended from {before.epochs} to {epochs} epochs, of which {done} are done. The last stage "
            "becomes longer, and the learning rate in it follows the longer cosine; the stages before it "
            "stay as they were"
        )
    rates = [_peak_rate(each, epoch) for each, epoch in ((before, max(done - 1, 0)), (after, done))]
    return (
        f"extended from {before.epochs} to {epochs} epochs, of which {done} are done. The learning rate "
        f"follows the cosine of {epochs} epochs from here on: it was {rates[0]:.1e} and is {rates[1]:.1e} "
        f"next, so this is not the run that {epochs} epochs from the start would have been"
    )


def already_has(epochs: int) -> str:
    """Says that a run is as long as asked for: a command which extends a run can be started again."""
    return f"the run has {epochs} epochs already"


def lengthen(
    folder: RunFolder, part: str, before: int, epochs: int, also: Mapping[str, Any] | None = None
) -> int | None:
    """Writes down that a run has more epochs.

    Args:
        folder: The run.
        part: The part of its settings that holds its epochs.
        before: Epochs it has.
        epochs: Epochs it is to have.
        also: Other settings of that part which change with them.

    Returns:
        How many of them are done; nothing where it has as many already.

    Raises:
        RunError: It has more.
    """
    if epochs < before:
        raise RunError(
            f"the run in '{folder.path}' has {before} epochs: give more with --epochs, or leave it out"
        )
    if epochs == before:
        return None
    with folder.locked():
        folder.extend({part: {"epochs": epochs, **(also or {})}}, before)
    metrics = read_metrics(folder.metrics_file)
    return metrics[-1]["epoch"] + 1 if metrics else 0


def _peak_rate(settings: TrainingConfig | TeacherConfig, epoch: int) -> float:
    """Returns the learning rate of the core, or of a teacher, in an epoch."""
    return settings.learning_rate(settings.base_lr, epoch)


def recipe_of(folder: RunFolder) -> str:
    """Returns the name of the recipe a run was begun with."""
    return folder.record()["recipe"].removeprefix(TEACHER)


def open_data(data: DataConfig, record: SplitRecord | None = None) -> Splits:
    """Opens and checks the data; with a record, that of the run which is resumed.

    Raises:
        DataError: There is no such data, it is laid out otherwise, an image cannot be read, or the images are
            not those the run began with.
    """
    splits = open_scenes(
        data.path,
        val_fraction=data.val_fraction,
        test_fraction=data.test_fraction,
        seed=data.split_seed,
        record=record,
    )
    if record is not None and splits.record != record:
        raise DataError(f"the images in {data.path} are not those the run began with: bring them back")
    if not data.check:
        return splits
    parts = []
    named = [("training", splits.train), ("validation", splits.val)]
    named += [("test", splits.test)] if splits.test is not None else []
    for name, scenes in named:
        report = check_images(
            scenes, skip_unreadable=data.skip_unreadable, description=f"checking {name} images"
        )
        for problem in report.unreadable:
            print(f"stam: skipped: {problem}", file=sys.stderr)
        if report.unreadable:
            print(f"stam: skipped {len(report.unreadable)} unreadable {name} images", file=sys.stderr)
        parts.append(Subset(scenes, report.readable) if report.unreadable else scenes)
    return Splits(parts[0], parts[1], splits.record, parts[2] if splits.test is not None else None)


def with_images_kept(splits: Splits, data: DataConfig, device: str) -> Splits:
    """Returns the data with its training images in the memory of the GPU that trains, where they fit."""
    if data.cache is not None:
        return splits
    kept = keep_on_device(
        splits.train, choose_device(device), data.decode_size, num_workers(data), distributed.rank() == 0
    )
    return dataclasses.replace(splits, train=kept)


def with_classes(config: RunConfig, classes: tuple[str, ...]) -> RunConfig:
    """Returns the configuration for the data's classes, with the data's preprocessing in the agent's."""
    agent = dataclasses.replace(
        config.agent, num_classes=len(classes), labels=classes, preprocess_size=config.data.resize_size
    )
    return dataclasses.replace(config, agent=agent)


def fitting_batch(num_scenes: int, batch_size: int, option: str) -> int:
    """Returns the batch to use: as asked, or less where there are fewer scenes, which is said.

    Args:
        num_scenes: Training scenes.
        batch_size: What was asked for.
        option: The option that asks for it.

    Raises:
        ConfigError: Processes cannot share such a batch, or there is not one scene for each of them.
    """
    processes = distributed.world_size()
    fitting = batch_size if batch_size <= num_scenes else num_scenes // processes * processes
    require(fitting > 0, f"{num_scenes} training images are too few for {processes} processes: start fewer")
    Plan(num_scenes, 1, fitting, 1.0, 0).num_batches()  # refuses a batch that cannot be shared
    if fitting < batch_size and distributed.rank() == 0:
        why = f"there are {num_scenes} training images"
        print(f"stam: {option} is {fitting} instead of {batch_size}: {why}", file=sys.stderr)
    return fitting


def with_fitting_batches(config: RunConfig, num_scenes: int) -> RunConfig:
    """Returns the configuration with batches that the scenes can fill, those of a teacher of its own too."""
    training, teacher = config.training, config.teacher_training
    batch = fitting_batch(num_scenes, training.batch_size, "--batch-size")
    training = dataclasses.replace(training, batch_size=batch)
    if config.teacher is None:
        batch = fitting_batch(num_scenes, teacher.batch_size, "--teacher-training.batch-size")
        teacher = dataclasses.replace(teacher, batch_size=batch)
    return dataclasses.replace(config, training=training, teacher_training=teacher)


def _start(config: RunConfig, splits: Splits) -> tuple[Agent, Teacher | Student]:
    """Builds the agent, and its teacher or the model to be fine-tuned into one."""
    torch.manual_seed(config.training.seed)
    agent = start_agent(config.init, config.agent, config.class_indices)
    teacher = _find_teacher(dataclasses.replace(config, agent=agent.config), splits.train)
    if config.start_from_teacher and isinstance(teacher, Teacher):
        copy_teacher(teacher, agent)
    return agent, teacher


def _find_teacher(config: RunConfig, train_scenes: Scenes) -> Teacher | Student:
    """Opens the teacher that is named, or builds the one to be fine-tuned, so that nothing fails later."""
    classes = train_scenes.classes
    if config.teacher is not None:
        teacher = open_teacher(
            config.teacher, classes, config.agent.image_size, config.agent, config.class_indices
        )
        require_features(teacher, config.agent.width, config.training.feature_weight)
        return teacher
    given = config.teacher_training
    return build_student(given, config.agent, config.init, classes, config.class_indices)


def _start_student(config: RunConfig, splits: Splits) -> Student:
    choose_device(config.teacher_training.device)
    torch.manual_seed(config.teacher_training.seed)
    return build_student(
        config.teacher_training, config.agent, config.init, splits.train.classes, config.class_indices
    )


def _require_free(out: str | Path) -> None:
    """Raises where no run may begin in a folder: before the data is read, which can take long."""
    if distributed.rank() == 0 and not RunFolder(out).is_of_this_job():
        RunFolder.require_free(out)


def _make_folder(
    out: str | Path, recipe: str, config: RunConfig, split: SplitRecord
) -> tuple[RunFolder, bool]:
    """Makes the run folder, once for all processes.

    Returns:
        The folder, and whether the run in it is this job's own: `torchrun` has started the job again that
        began it, with exactly what is asked for now.
    """
    folder, restarted = RunFolder(out), False
    if distributed.rank() == 0:
        restarted = folder.is_of_this_job() and folder.was_begun_with(recipe, config, split)
        if not restarted:
            RunFolder.begin(out, recipe, config, split)
    (restarted,) = distributed.any_process(restarted)  # nobody goes on before the folder is there
    return folder, restarted


def _train(
    folder: RunFolder,
    config: RunConfig,
    agent: Agent,
    teacher: Teacher | Student,
    splits: Splits,
    resumed: bool,
    loggers: Loggers,
    fit_to_time: FitToTime | None = None,
) -> Agent:
    """Fine-tunes a teacher where there is none, then trains the agent."""
    splits = with_images_kept(splits, config.data, config.training.device)
    if not isinstance(teacher, Teacher):
        teacher = _own_teacher(folder, config, teacher, splits)
        if config.start_from_teacher:
            copy_teacher(teacher, agent)
    return train(folder, config, agent, teacher, splits.train, splits.val, resumed, loggers, fit_to_time)


def _own_teacher(folder: RunFolder, config: RunConfig, student: Student, splits: Splits) -> Teacher:
    """Fine-tunes the run's own teacher in `RUN/teacher`, or goes on with it."""
    inner = RunFolder(folder.path / "teacher")
    inner.path.mkdir(exist_ok=True)
    if distributed.rank() == 0:
        print(_about_own_teacher(inner, config.teacher_training.epochs), file=sys.stderr)
    how_to_resume = distributed.how_to_resume("train", folder.path)
    # resumed in any case: what was logged before the first state was saved is taken back then
    return _finetune(inner, config, student, splits, True, (), how_to_resume)


def _about_own_teacher(folder: RunFolder, epochs: int) -> str:
    """Says what is done about a run's own teacher."""
    metrics = read_metrics(folder.metrics_file) if folder.state_file.is_file() else []
    done = metrics[-1]["epoch"] + 1 if metrics else 0
    if done >= epochs:
        return f"its teacher is in {folder.path / 'best'}"
    if done:
        return f"no teacher given: going on with the one being fine-tuned, {done} of {epochs} epochs are done"
    return "no teacher given: fine-tuning one on the data first"


def _finetune(
    folder: RunFolder,
    config: RunConfig,
    student: Student,
    splits: Splits,
    resumed: bool,
    loggers: Loggers,
    how_to_resume: str = "",
) -> Teacher:
    splits = with_images_kept(splits, config.data, config.teacher_training.device)
    return finetune(
        folder,
        config.teacher_training,
        config.data,
        config.agent,
        *student,
        splits.train,
        splits.val,
        resumed,
        how_to_resume or distributed.how_to_resume("teacher", folder.path),
        loggers,
        config.training.save_minutes,
    )
