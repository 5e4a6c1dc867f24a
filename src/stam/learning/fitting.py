"""Fits a recipe to somebody's images, this machine and the time there is, before a run begins."""

import copy
import dataclasses
import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stam.data import Scenes, Splits
from stam.errors import StamError, WeightsError
from stam.learning import distributed
from stam.learning.choosing import Choice, choose, most_effort
from stam.learning.expected_time import ExpectedTime, Speed, expected_time, measure, num_looks
from stam.learning.experiment import open_data, with_classes, with_images_kept
from stam.learning.finetuning import build_student
from stam.learning.optimisation import choose_device
from stam.learning.survey import Survey, look_at
from stam.learning.timing import bf16_speedup
from stam.learning.training import FitToTime
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.settings import RunConfig
from stam.weights import copy_teacher, open_teacher, read_classifiers, start_agent
from stam.weights.locate import NOTHING, locate

CPU_MINUTES = 30.0  # on a CPU full accuracy takes hours, so this is the time where none is given
_KEPT_BACK = 0.03  # of the time, for saving and what cannot be measured
_LEAST_EFFORT = 1e-4
_POOR_EFFORT = 3e-3  # of 300 images of five classes, 9e-4 got 36% right and 9e-3 got 91%
_FOR_THE_TEACHER = 0.35  # the most of the time
_LEAST_BF16_SPEEDUP = 1.5  # of a matrix product: from there on training gains from it


@dataclass(frozen=True)
class Fit:
    """A recipe fitted to images and a machine.

    Attributes:
        choice: The settings and why.
        speed: What was measured.
        splits: The images, opened and checked.
        note: What to know of the time, for a person to read; may be empty.
        deadline: When everything must be done (`time.monotonic`); `None` where there is no such time.
        most_epochs: More than those are not trained, even if there is time.
    """

    choice: Choice
    speed: Speed
    splits: Splits
    note: str
    deadline: float | None = None
    most_epochs: int = 0

    def expected(self, config: RunConfig) -> ExpectedTime:
        """Returns how long a training takes, of these images on this machine."""
        return expected_time(config, self.speed, len(self.splits.train), len(self.splits.val))

    def fit_to_time(self, config: RunConfig) -> FitToTime | None:
        """Returns what changes the number of epochs of a training so that it ends in time.

        A speed that is measured on a few batches can be wrong, and a machine can get other work. So the
        speed of the first epochs is compared with it. A number of epochs other than the one that was chosen
        is somebody's wish, and stays.
        """
        deadline = self.deadline
        if deadline is None or config.training.epochs != self.choice.config.training.epochs:
            return None
        num_train, num_val = len(self.splits.train), len(self.splits.val)

        def expected_of(epochs: int, done: int) -> float:
            changed = dataclasses.replace(config, training=config.training.with_epochs(epochs))
            looks = num_looks(config, epochs, num_val, done)
            return self.speed.of_epochs(changed, num_train, done) + looks * self.speed.look

        def fitting_epochs(done: int, seconds: float) -> int:
            left = deadline - time.monotonic()
            an_epoch = self.speed.of_epochs(config, num_train, 0) - self.speed.of_epochs(config, num_train, 1)
            slower = seconds / an_epoch
            more = range(done + 1, self.most_epochs + 1)
            fitting = bisect_right(more, left, key=lambda epochs: slower * expected_of(epochs, done))
            return done + max(1, fitting)

        return fitting_epochs


def default_core(device: str) -> str:
    """Returns the core to train where none is named: the one of the paper, or on a CPU the one that can."""
    return "reencoding" if choose_device(device).type == "cuda" else "causal"


def with_core(
    config: RunConfig, core: str, actor: str | None = None, actor_objective: str | None = None
) -> RunConfig:
    """Returns a recipe with a core, and the actor and its objective that go with it if none are named.

    With a causal core one more glimpse costs little, so all locations can be tried: the actor learns from
    what each is worth, and rates all of them at once.
    """
    if actor_objective is None:
        actor_objective = "gains" if core == "causal" and config.agent.has_actor else "actor-critic"
    if actor is None:
        actor = "joint" if actor_objective == "gains" else "pairwise"
    return dataclasses.replace(
        config,
        agent=dataclasses.replace(config.agent, core=core, actor=actor),
        training=dataclasses.replace(config.training, actor_objective=actor_objective),
    )


def fit(config: RunConfig, minutes: float | None = None, may_skip_teacher: bool = True) -> Fit:
    """Looks at the images, times a few batches, and chooses the settings of a training.

    Args:
        config: A recipe for own images. Nothing in it depends on the data yet.
        minutes: Time for everything from now on; by default as much as pays on a GPU, and on a CPU
            `CPU_MINUTES`.
        may_skip_teacher: Whether the starting weights become the teacher as they are, where their own
            classifiers name the classes.

    Raises:
        StamError: The data or weights cannot be opened, or the time is too short for anything.
    """
    began = time.monotonic()
    device = choose_device(config.training.device)
    config, why_precision = with_fast_precision(config, device)
    splits = open_data(config.data)
    train, val = splits.train, splits.val
    config = with_classes(config, tuple(train.classes))
    torch.manual_seed(config.training.seed)
    agent = start_agent(config.init, config.agent, config.class_indices)
    teacher, model, is_like_agent = _find_teacher(config, agent, train)
    survey = Survey(len(train), len(train.classes))
    if config.init != NOTHING:
        survey = distributed.of_first(look_at(train, agent, config.data, device, _classifiers(config)))
    if may_skip_teacher and survey.is_named and config.teacher is None and config.class_indices is None:
        # what names the classes already is the teacher, and its classifiers are those the agent starts with
        config = dataclasses.replace(config, teacher=config.init, class_indices=survey.rows)
        agent = start_agent(config.init, config.agent, config.class_indices)
        teacher, model, is_like_agent = _find_teacher(config, agent, train)
    splits = with_images_kept(splits, config.data, config.training.device)
    feature_weight = 2.0 if is_like_agent else 0.0
    full = choose(config, survey, feature_weight=feature_weight)
    speed = distributed.of_first(measure(full.config, agent, teacher, model, splits.train, val))

    def expected(effort: float, teacher_effort: float) -> ExpectedTime:
        chosen = choose(config, survey, effort, teacher_effort, feature_weight).config
        return expected_time(chosen, speed, len(train), len(val))

    given = minutes is not None
    if minutes is None and device.type != "cuda":
        minutes = CPU_MINUTES
    effort, teacher_effort, note = 1.0, 1.0, ""
    most, deadline = 1.0, None
    if minutes is not None:
        deadline = began + 60 * minutes * (1 - _KEPT_BACK)
        left = distributed.of_first(60 * minutes * (1 - _KEPT_BACK) - (time.monotonic() - began))
        spent = time.monotonic() - began
        useful = expected(_POOR_EFFORT, 1.0)
        taught = min(useful.teacher, useful.agent * _FOR_THE_TEACHER / (1 - _FOR_THE_TEACHER))
        enough_minutes = math.ceil((spent + useful.agent + taught) / (1 - _KEPT_BACK) / 60)
        shortest = expected(_LEAST_EFFORT, _LEAST_EFFORT).total
        if shortest > left:
            raise StamError(
                f"--minutes {minutes:g} is too short: the shortest training takes "
                f"{(shortest + spent) / 60:.1f} minutes on this machine, and it learns next to nothing; "
                f"give it --minutes {enough_minutes} or more"
            )
        most = most_effort(config) if given else 1.0
        # the agent starts from the teacher, whose images cost less: it comes first where time is short
        teacher_effort = _largest(lambda e: expected(_LEAST_EFFORT, e).teacher, _FOR_THE_TEACHER * left, 1.0)
        effort = _largest(lambda e: expected(e, teacher_effort).total, left, most)
        if effort == most and expected(most, teacher_effort).total < 0.9 * left:
            note = "more time has not helped in our trials, so it takes less"
        elif effort < _POOR_EFFORT:
            note = f"this is too little time for a good agent: give it --minutes {enough_minutes} or more"
        elif not given:
            note = f"a CPU is given {minutes:g} minutes; --minutes N gives it more or less"
    choice = choose(config, survey, effort, teacher_effort, feature_weight)
    choice = Choice(choice.config, (*choice.reasons, *why_precision))
    most_epochs = round(choice.config.training.epochs * most / effort)
    return Fit(choice, speed, splits, note, deadline, most_epochs)


def with_fast_precision(config: RunConfig, device: torch.device) -> tuple[RunConfig, tuple[str, ...]]:
    """Chooses bfloat16 on a CPU that is much faster in it, and says so in a line.

    It is a setting from then on, so that a run that is resumed elsewhere goes on in the same precision.
    """
    training, how = config.training, config.teacher_training
    if device.type != "cpu" or training.precision != "auto":
        return config, ()
    times = distributed.of_first(bf16_speedup())
    if times < _LEAST_BF16_SPEEDUP:
        return config, ()
    precision = "bfloat16"
    if how.precision == "auto":
        how = dataclasses.replace(how, precision=precision)
    training = dataclasses.replace(training, precision=precision)
    why = f"precision {precision}: this CPU multiplies matrices {times:.1f} times as fast as in float32"
    return dataclasses.replace(config, training=training, teacher_training=how), (why,)


def _classifiers(config: RunConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the classifiers of the DeiT file that a training starts from; of a folder of ours none."""
    start = None if config.init == NOTHING else locate(config.init)
    return [] if start is None or start.is_dir() else read_classifiers(start)


def _find_teacher(
    config: RunConfig, agent: Agent, train: Scenes
) -> tuple[Teacher | None, torch.nn.Module | None, bool]:
    """Returns the teacher given or the model that becomes one, and whether the agent can start from it."""
    if config.teacher is None:
        how = config.teacher_training
        model, _ = build_student(how, agent.config, config.init, tuple(train.classes), config.class_indices)
        return None, model, how.model == "deit"
    teacher = open_teacher(
        config.teacher, tuple(train.classes), agent.config.image_size, agent.config, config.class_indices
    )
    try:
        copy_teacher(teacher, copy.deepcopy(agent))
    except WeightsError:
        return teacher, None, False
    return teacher, None, True


def _largest(seconds: Callable[[float], float], left: float, most: float) -> float:
    """Returns the largest effort that fits into the time."""
    if seconds(most) <= left:
        return most
    low, high = _LEAST_EFFORT, most
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) <= left else (low, middle)
    return low
