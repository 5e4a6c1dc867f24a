"""The loop that training an agent and fine-tuning a teacher share: batches, progress, saving, interruption.

What is random is a function of (seed, epoch, batch), and the place is part of the saved state, so a run that
is interrupted and resumed does exactly what it would have done.
"""

import itertools
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stam.data import (
    BatchLoader,
    CachedScenes,
    PaintedScenes,
    RawBatch,
    Scenes,
    TrainingView,
    batches,
    epoch_indices,
)
from stam.data.randomness import random_key
from stam.data.sampler import epoch_size, num_whole_batches
from stam.errors import Interrupted, StamError
from stam.learning import distributed
from stam.learning.interruption import interruptible
from stam.learning.progress import Progress
from stam.learning.runs import RunFolder
from stam.settings import DataConfig

MetricLogger = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Place:
    """Where in a run a batch is."""

    epoch: int
    batch: int
    last_of_epoch: bool


@dataclass(frozen=True)
class Plan:
    """Which scenes are shown when.

    Attributes:
        num_scenes: Scenes to choose from.
        epochs: Epochs in all.
        batch_size: Scenes in a batch.
        fraction: Share of the scenes an epoch shows, a fresh random part each time.
        seed: Seed of the choice.
        run_length: Scenes that lie side by side and are shown one after another; see `epoch_indices`.
    """

    num_scenes: int
    epochs: int
    batch_size: int
    fraction: float
    seed: int
    run_length: int = 1

    def batches_of(self, epoch: int) -> list[np.ndarray]:
        """Returns the batches of one epoch, as indices of scenes: the part of each that is this process's."""
        chosen = epoch_indices(
            self.num_scenes, epoch, self.fraction, self.seed, self.batch_size, self.run_length
        )
        return batches(chosen, self.batch_size, distributed.rank(), distributed.world_size())

    def num_batches(self, start: tuple[int, int] = (0, 0)) -> int:
        """Returns the number of batches from an (epoch, batch) on, by default those of the whole run."""
        chosen = epoch_size(self.num_scenes, self.fraction, self.batch_size)
        of_epoch = num_whole_batches(chosen, self.batch_size, distributed.world_size())
        return (self.epochs - start[0]) * of_epoch - start[1]

    def batches_from(self, start: tuple[int, int]) -> Iterator[tuple[Place, np.ndarray]]:
        """Yields every batch from an (epoch, batch) on, an epoch's drawn when it begins."""
        for epoch in range(start[0], self.epochs):
            parts = self.batches_of(epoch)
            for index, part in enumerate(parts):
                if (epoch, index) >= start:
                    yield Place(epoch, index, index == len(parts) - 1), part


class Learner(ABC):
    """Something that learns from batches, whose whole state can be saved and restored.

    Attributes:
        position: The next (epoch, batch).
        best: The best score so far.
        on_progress: Called within a batch, where one takes long, with the share of it that is done.
    """

    position: tuple[int, int] = (0, 0)
    best: float = -1.0
    on_progress: Callable[[float], None] = staticmethod(lambda share: None)

    def validates_after(self, epoch: int, every: int, epochs: int) -> bool:
        """Tells whether this process, the first, validates after an epoch: now and then, and at the end."""
        return distributed.rank() == 0 and ((epoch + 1) % every == 0 or epoch + 1 == epochs)

    @abstractmethod
    def train_batch(self, place: Place, raw: RawBatch) -> None:
        """Learns from one batch."""

    @abstractmethod
    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Returns the metrics of an epoch; `val/score` among them when it was validated."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes, but for the position and the best score."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Saves the model for use."""

    @abstractmethod
    def progress(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Returns what the progress bar shows of an epoch's metrics."""


class Meter:
    """Means over an epoch, kept on the device so that nothing waits for it.

    The sums are changed in place: a recorded batch goes on adding to the same memory. Values given together
    are kept together, with how often that was.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, *given: dict[str, Tensor]) -> None:
        """Adds one value to each mean, or several."""
        alike: dict[str, list[dict[str, Tensor]]] = {}
        for values in given:
            alike.setdefault(" ".join(values), []).append(values)
        for names, several in alike.items():
            each = torch.stack([value.detach() for values in several for value in values.values()])
            total = each.view(len(several), -1).sum(dim=0, dtype=torch.double)
            together = self.sums.setdefault(names, total.new_zeros(len(total) + 1))
            together[:-1] += total
            together[-1] += len(several)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the sums, as means over all processes: each of them can go on from there."""
        distributed.average(self.sums.values())
        return dict(self.sums)

    def means(self) -> dict[str, float]:
        """Returns the means of what was added since, over all processes, and starts over."""
        distributed.average(self.sums.values())
        totals: dict[str, float] = {}
        counts: dict[str, float] = {}
        for names, sums in self.sums.items():
            *each, count = sums.tolist()
            sums.zero_()
            for name, total in zip(names.split(), each, strict=True):
                totals[name] = totals.get(name, 0.0) + total
                counts[name] = counts.get(name, 0.0) + count
        return {name: total / counts[name] for name, total in totals.items() if counts[name]}


def host_random(purpose: str, *key: int) -> np.random.Generator:
    """Returns random numbers for a batch on the host, others in each process."""
    own = (distributed.rank(),) if distributed.rank() > 0 else ()
    return np.random.Generator(np.random.Philox(random_key(purpose, *key, *own)))


def num_workers(data: DataConfig) -> int:
    """Returns how many processes decode: as said, or most cores where there are many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return data.num_workers if data.num_workers is not None else (min(cores - 1, 12) if cores > 2 else 0)


def run_loop(
    learner: Learner,
    run: RunFolder,
    plan: Plan,
    scenes: Scenes,
    data: DataConfig,
    description: str,
    save_minutes: float,
    how_to_resume: str,
    loggers: tuple[MetricLogger, ...] = (),
) -> None:
    """Runs a learner through a plan from its position on; what it leaves goes to the run folder.

    Raises:
        Interrupted: Ctrl-C or a termination; the state was saved after the batch in hand.
    """
    saved = began = time.monotonic()
    is_first = distributed.rank() == 0  # it alone writes
    shown: dict[str, str] = {}
    total, left = plan.num_batches(), plan.num_batches(learner.position)
    progress = Progress(description, plan.epochs, plan.batch_size, total, left, shown=is_first)
    learner.on_progress = progress.within_batch
    if is_first and not left:  # the state is all there is to go by: `last` may be lost, or older
        learner.save(run.path / "last")
    with _resumable(how_to_resume), progress, interruptible() as interruption:
        for place, raw in load_batches(scenes, plan.batches_from(learner.position), data):
            learner.train_batch(place, raw)
            learner.position = (place.epoch + 1, 0) if place.last_of_epoch else (place.epoch, place.batch + 1)
            finished = learner.position[0] == plan.epochs
            if place.last_of_epoch:
                metrics = {"epoch": place.epoch} | learner.end_epoch(place.epoch)
                require_finite(metrics)
                if is_first:
                    note(learner, run, metrics, time.monotonic() - began, loggers)
                shown |= {"epoch": f"{place.epoch + 1}/{plan.epochs}"} | learner.progress(metrics)
            progress.end_batch(shown)
            late = time.monotonic() - saved > 60 * save_minutes
            stopped, late = distributed.any_process(bool(interruption), late)
            if finished or stopped or late:
                save(learner, run)
                saved = time.monotonic()
            if stopped:  # even where all is done: more may follow, as after a teacher
                distributed.wait()  # where one ends torchrun ends all: not while the first one writes
                message = f"interrupted and saved; to go on: {how_to_resume}"
                raise Interrupted(message if is_first else "", interruption.number)
    distributed.wait()  # what the first process saves is there for all


@contextmanager
def _resumable(how_to_resume: str) -> Iterator[None]:
    """Within it, stopping at once names the command to go on, too."""
    try:
        yield
    except KeyboardInterrupt:
        message = f"stopped at once; to go on from what was saved last: {how_to_resume}"
        raise Interrupted(message) from None


def only_one(run: RunFolder) -> AbstractContextManager[None]:
    """Returns a context in which nobody else trains in a run folder; the first process holds the lock."""
    return run.locked() if distributed.rank() == 0 else nullcontext()


def require_finite(metrics: dict[str, Any]) -> None:
    """Raises where a loss is no number any more."""
    for name, value in metrics.items():
        if name.startswith("loss/") and not math.isfinite(value):
            raise StamError(
                f"training diverged, {name} is {value} in epoch {metrics['epoch'] + 1}: use lower learning "
                "rates (--base-lr, --actor-lr, --critic-lr) and another --out"
            )


def note(
    learner: Learner,
    run: RunFolder,
    metrics: dict[str, Any],
    seconds: float,
    loggers: tuple[MetricLogger, ...],
) -> None:
    """Writes down an epoch's metrics, and keeps the model if it is the best so far."""
    run.log(metrics)
    run.log({"epoch": metrics["epoch"], "seconds": seconds}, "timing.jsonl")
    for logger in loggers:
        logger(metrics)
    if metrics.get("val/score", -1.0) > learner.best:
        learner.best = metrics["val/score"]
        learner.save(run.path / "best")


def save(learner: Learner, run: RunFolder) -> None:
    """Saves the model to use and the state to resume from; all processes come here, the first one writes.

    The state comes last: whatever is killed in between is trained again from the state before, and saved.
    """
    state = learner.state_dict() | {"position": list(learner.position), "best": learner.best}
    if distributed.rank() == 0:
        learner.save(run.path / "last")
        run.save_state(state)


def restore(learner: Learner, run: RunFolder) -> None:
    """Goes back to where the run was saved; a run without a saved state starts over."""
    state = run.load_state()
    if state is None:
        return
    try:
        learner.load_state_dict(state)
        epoch, batch = state["position"]
        learner.position, learner.best = (int(epoch), int(batch)), float(state["best"])
        if min(learner.position) < 0 or not math.isfinite(learner.best):
            raise ValueError(f"it is at {learner.position} with the best score {learner.best}")
    except torch.OutOfMemoryError:
        raise  # it says nothing of the state
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise run.damaged_state(error) from error


def load_batches(
    scenes: Scenes, planned: Iterable[tuple[Place, np.ndarray]], data: DataConfig
) -> Iterator[tuple[Place, RawBatch]]:
    """Loads planned batches ahead of their use; workers go on over the ends of epochs.

    Scenes that are painted come from the device itself, fresh ones in each epoch.
    """
    if isinstance(scenes, PaintedScenes):
        yield from ((place, scenes.paint(part, place.epoch)) for place, part in planned)
        return
    workers = num_workers(data)
    if data.cache:
        cached = CachedScenes(scenes)
        cached.fill(data.decode_size, workers)
        scenes, workers = cached, 0
    shown, asked_for = itertools.tee(planned)  # no more is kept than what workers load ahead
    loader = BatchLoader(scenes, (part for _, part in asked_for), TrainingView(data.decode_size), workers)
    yield from zip((place for place, _ in shown), loader, strict=True)
