"""How long a training will take on this machine, measured on a few batches before it begins."""

import copy
import dataclasses
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from stam.data import BatchLoader, EvaluationView, PaintedScenes, RawBatch, Scenes, TrainingView
from stam.data.randomness import random_order
from stam.fast import prepare
from stam.learning import distributed
from stam.learning.finetuning import TeacherLearner
from stam.learning.finetuning import plan as teacher_plan
from stam.learning.loop import Place, num_workers
from stam.learning.optimisation import autocast, choose_device
from stam.learning.timing import seconds
from stam.learning.training import AgentLearner, glimpses_of_batch
from stam.learning.training import plan as training_plan
from stam.learning.validation import num_rounds, policies_to_try, validation_batch
from stam.model.agent import Agent, evaluating
from stam.model.teacher import Teacher
from stam.scene.pixels import normalise
from stam.settings import RunConfig

_PLACE = Place(epoch=0, batch=0, last_of_epoch=False)
_FEW, _MORE = 4, 12  # images of the batches that are timed on a CPU
_IN_A_ROW = 4  # whole batches that are timed on a GPU
FORWARD_SHARE = 1 / 3  # what a whole image forward costs, of learning from it
_FIT_SECONDS = 2e-8  # of fitting a classifier, for each image, feature and class
_ONCE_IS_ENOUGH = 6.0  # seconds of the first ones, beyond which they are not repeated: people wait


@dataclass(frozen=True)
class Cost:
    """Seconds of one kind of batch: a part for each batch and a part for each of its images.

    Attributes:
        first: The first batch, beyond what every batch takes: kernels are compiled, a graph is captured.
        batch: Each batch.
        image: Each image of it.
    """

    first: float
    batch: float
    image: float

    def of(self, num_batches: int, batch_size: int) -> float:
        """Returns the seconds of some batches."""
        return self.first + num_batches * (self.batch + batch_size * self.image)


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        agent: Training the agent: all of it, or in a training in stages its core alone.
        teacher: Fine-tuning its teacher; `None` where one is given.
        look: Seconds of looking at a validation image.
        glimpses: How many glimpses each batch learned from when the agent was timed (`glimpses_of_batch`).
        actor: Training the actor alone, where a stage is for that.
        actor_steps: How many updates of the actor each batch made when it was timed.
    """

    agent: Cost
    teacher: Cost | None
    look: float
    glimpses: int
    actor: Cost | None = None
    actor_steps: int = 1

    def of_agent(self, config: RunConfig, num_train: int) -> float:
        """Returns the seconds of all batches of a training, which may have other episodes than were timed."""
        first = sum(cost.first for cost in (self.agent, self.actor) if cost is not None)
        return first + self.of_epochs(config, num_train, 0)

    def of_epochs(self, config: RunConfig, num_train: int, done: int) -> float:
        """Returns the seconds of the epochs that are not done, but for what only the first batches take."""
        training = config.training
        batches_of_epoch = training_plan(num_train, config).num_batches() / training.epochs
        share = glimpses_of_batch(training, config.agent.core) / self.glimpses
        found = 0.0
        for stage in training.stages:
            num_batches = batches_of_epoch * max(0, stage.end - max(done, stage.begin))
            size = training.batch_size
            if self.actor is None or stage.learns != "actor":
                found += share * num_batches * (self.agent.batch + size * self.agent.image)
            if self.actor is not None and stage.learns != "core":  # it never has short episodes
                updates = training.actor_steps / self.actor_steps  # they take most of the time of any batch
                found += num_batches * (updates * self.actor.batch + size * self.actor.image)
        return found


@dataclass(frozen=True)
class ExpectedTime:
    """Seconds a training will take."""

    teacher: float
    agent: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.teacher + self.agent


def measure(
    config: RunConfig,
    agent: Agent,
    teacher: Teacher | None,
    model: nn.Module | None,
    train: Scenes,
    val: Scenes,
) -> Speed:
    """Times a few batches of a training on copies of its models.

    Args:
        config: The training.
        agent: The agent, as it starts.
        teacher: Its teacher, where one is given.
        model: Otherwise the model that is fine-tuned into one.
        train: Training images.
        val: Validation images.
    """
    cost_of_teacher = None
    if model is not None:
        record = {"labels": list(train.classes)}
        # all of it learns while it is timed: what learns less is a share of that
        data, how = config.data, dataclasses.replace(config.teacher_training, base_lr=1e-6)
        learner = TeacherLearner(how, data, agent.config, copy.deepcopy(model), record, val)
        learn = partial(learner.train_batch, _PLACE)
        cost_of_teacher = _time(learn, config, train, how.batch_size, learner.device)
        teacher = Teacher(learner.model, len(train.classes))
    assert teacher is not None
    student = AgentLearner(config, copy.deepcopy(agent), copy.deepcopy(teacher), val)
    costs = {
        stage.learns: _time(
            partial(student.train_batch, Place(stage.begin, 0, last_of_epoch=False)),
            config,
            train,
            config.training.batch_size,
            student.device,
        )
        for stage in {stage.learns: stage for stage in config.training.stages}.values()
    }
    look = _time_look(student.agent, config, val)
    del student, teacher
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    (whole, *actor), glimpses = costs.values(), glimpses_of_batch(config.training, config.agent.core)
    steps = config.training.actor_steps
    return Speed(whole, cost_of_teacher, look, glimpses, actor[0] if actor else None, steps)


def expected_time(config: RunConfig, speed: Speed, num_train: int, num_val: int) -> ExpectedTime:
    """Returns how long a training takes at a measured speed."""
    training, how = config.training, config.teacher_training
    num_val_looks = num_looks(config, training.epochs, num_val)
    agent = speed.of_agent(config, num_train) + num_val_looks * speed.look
    if speed.teacher is None:
        return ExpectedTime(0.0, agent)
    num_batches = teacher_plan(num_train, how).num_batches()
    seen = _validations(how.epochs, how.validate_every) * num_val * speed.teacher.image * FORWARD_SHARE
    forward_only = how.epochs if how.base_lr == 0 else int(how.fit_classifier)  # epochs
    share = 1 - forward_only / how.epochs * (1 - FORWARD_SHARE)
    learned = speed.teacher.of(num_batches, how.batch_size) * share
    if how.fit_classifier:
        fitted = forward_only * (num_batches / how.epochs) * how.batch_size
        learned += _FIT_SECONDS * fitted * config.agent.width * config.agent.num_classes
    return ExpectedTime(learned + seen, agent)


def num_looks(config: RunConfig, epochs: int, num_val: int, done: int = 0) -> int:
    """Returns how many looks the validations take of those epochs that are not done yet.

    The last validation compares policies.
    """
    training = config.training
    count = min(num_val, training.validation_images)
    tried = len(policies_to_try(config.agent, training))
    last = tried * num_rounds(tried, count)
    to_come = _validations(epochs, training.validate_every) - done // training.validate_every
    return count * (to_come - 1 + last)


def _validations(epochs: int, every: int) -> int:
    return math.ceil(epochs / every)


def _time(
    learn: Callable[[RawBatch], None],
    config: RunConfig,
    scenes: Scenes,
    batch_size: int,
    device: torch.device,
) -> Cost:
    """Times learning from batches: whole ones on a GPU, small ones of two sizes on a CPU.

    Of several processes each learns from its part, at the same time.
    """
    shared_by = distributed.world_size()

    def load(count: int) -> tuple[RawBatch, float]:
        began = time.perf_counter()
        chosen = random_order(len(scenes), "speed")[:count]
        if isinstance(scenes, PaintedScenes):
            return scenes.paint(chosen), (time.perf_counter() - began) / count
        loader = BatchLoader(scenes, [np.sort(chosen)], TrainingView(config.data.decode_size), 0)
        return next(iter(loader)), (time.perf_counter() - began) / count

    def timed(batch: RawBatch) -> float:
        return seconds(lambda: learn(batch), device)

    def learn_in_a_row(batch: RawBatch) -> None:
        for _ in range(_IN_A_ROW):
            learn(batch)

    workers = num_workers(config.data)
    if device.type == "cuda":
        batch, loading = load(min(batch_size, len(scenes)) // shared_by)
        first = timed(batch)
        timed(batch)
        # several in a row: the next is augmented while one is learned from
        each = seconds(lambda: learn_in_a_row(batch), device) / _IN_A_ROW
        image = max(each / len(batch), loading / max(1, workers))
        return Cost(max(0.0, first - each), 0.0, image / shared_by)
    few, more = min(_FEW, batch_size // shared_by), min(_MORE, batch_size // shared_by)
    (small, _), (large, loading) = load(few), load(more)
    first = timed(small)
    short, long = first, timed(large)
    if first + long < _ONCE_IS_ENOUGH:  # whatever a size needs is made the first time
        short, long = min(timed(small) for _ in range(2)), min(timed(large) for _ in range(2))
    image = (long - short) / (more - few) if more > few else long / more
    image = min(max(image, 0.5 * long / more), long / more)
    rest, image = max(0.0, long - more * image), image + loading / max(1, workers)
    return Cost(max(0.0, first - short), rest, image / shared_by)


def _time_look(agent: Agent, config: RunConfig, val: Scenes) -> float:
    """Returns the seconds of looking at one image of a whole validation.

    On a GPU its batches are decoded by several processes at once, one batch by each.
    """
    training, device = config.training, choose_device(config.training.device)
    size, count = validation_batch(training), min(len(val), training.validation_images)
    decoders = max(1, min(num_workers(config.data), math.ceil(count / size))) if device.type == "cuda" else 1
    chosen = np.arange(min(count, size if device.type == "cuda" else _MORE))
    loader = BatchLoader(val, [chosen], EvaluationView(agent.config.image_size, config.data.resize_size))
    with evaluating(agent), autocast(device, training.precision):
        looker = prepare(agent, training.fast)
        began = time.perf_counter()
        (raw,) = loader
        decoding = time.perf_counter() - began

        def look() -> None:
            images = normalise(raw.images.to(device), agent.config.mean, agent.config.std)
            looker.look(images, training.num_glimpses)

        seconds(look, device)  # to warm up
        return (seconds(look, device) + decoding / decoders) / len(chosen)
