"""Training a system of the zoo in a run folder, with the loop that agents and teachers have.

A run goes through the stages of its system one after the other: each has its own AdamW and its own cosine,
and updates the modules it names. What is random is a function of (seed, epoch, batch), so a run that was
interrupted and is resumed does what it would have done. On a GPU a batch is replayed as a CUDA graph.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stam.config import (
    from_plain,
    require_at_least_one,
    require_not_negative,
    require_sensible_numbers,
    to_plain,
)
from stam.data import (
    BatchLoader,
    ClutteredScenes,
    EvaluationView,
    RawBatch,
    Scenes,
    Splits,
    Subset,
    batches,
)
from stam.data.augment import Augment
from stam.data.randomness import random_key, random_order
from stam.data.scenes import run_length
from stam.errors import ConfigError, require, require_choice
from stam.fast.cuda_graph import GraphedFunction
from stam.learning import distributed
from stam.learning.experiment import already_has, fitting_batch, lengthen, open_data
from stam.learning.loop import (
    Learner,
    Meter,
    MetricLogger,
    Place,
    Plan,
    num_workers,
    only_one,
    restore,
    run_loop,
)
from stam.learning.optimisation import autocast, choose_device, make_optimiser, restore_optimiser
from stam.learning.runs import RunError, RunFolder
from stam.model.agent import evaluating
from stam.model.randomness import RandomSource
from stam.scene.pixels import normalise
from stam.settings import PRECISIONS, AugmentConfig, DataConfig
from stam.weights.locate import NOTHING
from stam.zoo.saving import SYSTEMS, build, require_system, save_system
from stam.zoo.system import Stage, System, SystemConfig

_WARMUP = 0.02  # of a stage's batches, in which its learning rate rises


@dataclass(frozen=True)
class ZooTraining:
    """How a system is trained.

    Attributes:
        epochs: Passes over the data, all stages together.
        batch_size: Scenes in a batch.
        lr: Learning rate of everything but backbones.
        backbone_lr: The same for a DeiT, which starts from weights of its own.
        weight_decay: AdamW's; one-dimensional parameters, such as biases, have none.
        max_norm: Longest gradient; a longer one is shortened.
        precision: Of the networks; auto is bfloat16 on a GPU where there is a DeiT, and float32 elsewhere.
        fast: On a GPU, replay batches as a CUDA graph.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        seed: Seed of everything random.
        validate_every: Epochs between two validations.
        validation_images: Most scenes a validation looks at.
        save_minutes: Minutes between two saves within an epoch.
    """

    epochs: int = 60
    batch_size: int = 128
    lr: float = 1e-3
    backbone_lr: float = 1e-4
    weight_decay: float = 1e-4
    max_norm: float = 5.0
    precision: str = "auto"
    fast: bool = True
    device: str = "auto"
    seed: int = 0
    validate_every: int = 10
    validation_images: int = 2000
    save_minutes: float = 10.0

    def __post_init__(self) -> None:
        """Checks the settings."""
        require_sensible_numbers(self)
        require_at_least_one(self, "epochs", "batch_size", "validate_every", "validation_images")
        require_not_negative(self, "lr", "backbone_lr", "weight_decay", "seed", "save_minutes")
        require(self.max_norm > 0, f"max_norm must be above 0, got {self.max_norm}")
        require_choice("precision", self.precision, PRECISIONS)


@dataclass(frozen=True)
class ZooConfig:
    """A whole experiment with a system of the zoo.

    Attributes:
        name: Which system.
        system: Its settings; its classes come from the data.
        data: What it is trained on.
        training: How.
        init: Where its backbones start: a DeiT's weights file, a run, `package:NAME`, `hub:NAME`, or `none`.
    """

    name: str
    system: SystemConfig
    data: DataConfig = field(default_factory=DataConfig)
    training: ZooTraining = field(default_factory=ZooTraining)
    init: str = NOTHING


def default_config(name: str, data: str) -> ZooConfig:
    """Returns the experiment that a system's name and some data mean.

    Digits in an `.npz` file become cluttered scenes, with the settings the papers have for them.
    """
    system = require_system(name)
    if Path(data).suffix == ".npz":
        return ZooConfig(
            name,
            system.settings.for_clutter(),
            DataConfig(data, resize_size=None, decode_size=None, check=False, augment=AugmentConfig.off()),
            ZooTraining(epochs=100, batch_size=1024),
        )
    augment = AugmentConfig(num_ops=0, crop_scale=(0.25, 1.0))
    init = "package:imagenette-tiny" if hasattr(system.settings(), "backbone") else NOTHING
    return ZooConfig(name, system.settings(), DataConfig(data, augment=augment), init=init)


def begin(config: ZooConfig, out: str | Path, loggers: tuple[MetricLogger, ...] = ()) -> System:
    """Trains a system in a new run folder.

    Raises:
        StamError: The run cannot begin as asked; no folder was made.
        Interrupted: Ctrl-C; the state was saved and `resume` goes on from it.
    """
    choose_device(config.training.device)
    splits = open_data(config.data)
    config = with_classes(config, splits.train.classes)
    batch = fitting_batch(len(splits.train), config.training.batch_size, "--batch-size")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, batch_size=batch))
    system = start(config)
    folder = RunFolder.begin(out, config.name, config, splits.record)
    return train_system(folder, config, system, splits, False, loggers)


def resume(out: str | Path, loggers: tuple[MetricLogger, ...] = ()) -> System:
    """Goes on with a run of `begin`, exactly where it stopped and with the settings it was begun with."""
    folder = RunFolder.open(out)
    config = read_config(folder)
    choose_device(config.training.device)
    splits = open_data(config.data, folder.require_split())
    return train_system(folder, config, start(config), splits, True, loggers)


def extend(out: str | Path, epochs: int) -> str:
    """Gives a run more epochs, with which `resume` then goes on; returns what that means, in a sentence.

    Its last stage becomes longer; the stages before it stay as they were.

    Raises:
        RunError: It has more.
    """
    folder = RunFolder.open(out)
    config = read_config(folder)
    before, last = config.training.epochs, require_system(config.name).stages[-1].name
    done = lengthen(folder, "training", before, epochs)
    if done is None:
        return already_has(epochs)
    return (
        f"extended from {before} to {epochs} epochs, of which {done} are done. The stage '{last}' becomes "
        "longer: its learning rate follows the longer cosine from here on, so this is not the run that "
        f"{epochs} epochs from the start would have been"
    )


def is_zoo_run(out: str | Path) -> bool:
    """Tells whether a folder holds a run of a system of the zoo."""
    folder = RunFolder(out)
    return folder.record_file.is_file() and folder.record().get("config", {}).get("name") in SYSTEMS


def read_config(folder: RunFolder) -> ZooConfig:
    """Reads the configuration of a run."""
    values = folder.record()["config"]
    if values.get("name") not in SYSTEMS:
        raise RunError(f"the run in '{folder.path}' is not of a system of the zoo")
    try:
        return config_from(values)
    except ConfigError as error:
        raise RunError(f"'{folder.record_file}' is damaged: {error}") from error


def config_from(values: dict[str, Any]) -> ZooConfig:
    """Returns the configuration that a run has recorded."""
    system = from_plain(require_system(values["name"]).settings, values.get("system"))
    rest = {key: value for key, value in values.items() if key != "system"}
    return dataclasses.replace(
        from_plain(ZooConfig, rest | {"system": to_plain(SystemConfig())}), system=system
    )


def with_classes(config: ZooConfig, classes: tuple[str, ...]) -> ZooConfig:
    """Returns the configuration for the data's classes, with the data's preprocessing in the system's."""
    system = dataclasses.replace(
        config.system, num_classes=len(classes), labels=classes, preprocess_size=config.data.resize_size
    )
    return dataclasses.replace(config, system=system)


def start(config: ZooConfig) -> System:
    """Builds a system, its backbones with the weights that the configuration names."""
    require(
        distributed.world_size() == 1, "a system of the zoo trains in one process: start without torchrun"
    )
    torch.manual_seed(config.training.seed)
    system = build(config.name, config.system)
    if config.init != NOTHING:
        found = system.backbones()
        require(bool(found), f"--init {config.init}: {config.name} has no backbone to start from it")
        for backbone in found:
            backbone.start(config.init)
    return system


def train_system(
    folder: RunFolder,
    config: ZooConfig,
    system: System,
    splits: Splits,
    resumed: bool = False,
    loggers: tuple[MetricLogger, ...] = (),
) -> System:
    """Trains a system that was built, on scenes that were opened, in a run folder that was begun."""
    training = config.training
    earlier = folder.record()["extended_from"] if folder.record_file.is_file() else ()
    learner = SystemLearner(
        *(config, system, len(splits.train), splits.val, run_length(splits.train)),
        epochs_at_first=earlier[0] if earlier else training.epochs,
    )
    train_scenes: Scenes = splits.train
    if isinstance(train_scenes, ClutteredScenes):
        train_scenes = train_scenes.to(learner.device)
    with only_one(folder):
        if resumed:
            restore(learner, folder)
        how_to_resume = distributed.how_to_resume("train", folder.path)
        run_loop(
            *(learner, folder, learner.plan, train_scenes, config.data, config.name),
            *(training.save_minutes, how_to_resume, loggers),
        )
    return system.eval()


class SystemLearner(Learner):
    """A system being trained."""

    def __init__(
        self,
        config: ZooConfig,
        system: System,
        num_scenes: int,
        val_scenes: Scenes,
        run_length: int = 1,
        epochs_at_first: int | None = None,
    ) -> None:
        """Prepares the training.

        Args:
            config: The experiment.
            system: What is trained.
            num_scenes: Training scenes.
            val_scenes: What it is validated on.
            run_length: See `Plan`.
            epochs_at_first: Epochs the run had before it was extended: its stages but the last are shares of
                these.
        """
        training = config.training
        self.config, self.training = config, training
        self.device = choose_device(training.device)
        self.system = system.to(self.device)
        self.val_scenes = val_scenes
        self.plan = Plan(num_scenes, training.epochs, training.batch_size, 1.0, training.seed, run_length)
        self.batches_an_epoch = len(self.plan.batches_of(0))
        at_first = dataclasses.replace(self.plan, epochs=epochs_at_first or training.epochs)
        self.ends = [*stage_ends(system.stages, at_first.num_batches())[:-1], self.plan.num_batches()]
        size, facts = config.system.image_size, system.facts
        self.augment = Augment(config.data.augment, size, facts.mean, facts.std)
        self._as_they_are = config.data.augment == AugmentConfig.off()
        self.precision = precision_of(system, training.precision)
        self.rates = {name: torch.zeros((), device=self.device) for name in ("backbone", "rest")}
        self.meter = Meter()
        self.generator = torch.Generator(self.device)
        self.stage = -1
        self.optimiser: torch.optim.Optimizer
        self._enter(0)

    def _enter(self, stage: int) -> None:
        """Begins a stage: its own optimiser over the modules it trains."""
        if stage == self.stage:
            return
        self.stage, system = stage, self.system
        self._graphed: GraphedFunction | None = None  # what is replayed belongs to the stage
        trained = system.stages[stage].trains
        for name, parameter in system.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in trained)
        inside = {
            id(value) for part in system.backbones() if part.kind != "conv" for value in part.parameters()
        }
        named = [pair for pair in system.named_parameters() if pair[1].requires_grad]
        parts = {
            "backbone": [pair for pair in named if id(pair[1]) in inside],
            "rest": [pair for pair in named if id(pair[1]) not in inside],
        }
        self.trained = [parameter for _, parameter in named]
        self.optimiser = make_optimiser(parts, self.training.weight_decay, self.rates)

    def train_batch(self, place: Place, raw: RawBatch) -> None:
        """Takes one optimiser step."""
        training, number = self.training, place.epoch * self.batches_an_epoch + place.batch
        self._enter(sum(number >= end for end in self.ends[:-1]))
        self._set_rates(number)
        seed = (training.seed, place.epoch, place.batch)
        images, labels = self._images(raw, seed), raw.labels.to(self.device, non_blocking=True)
        self.generator.manual_seed(random_key("zoo", *seed) >> 1)  # a seed has 63 bits
        self.system.train()
        if self.device.type == "cuda" and training.fast:
            self._graphed = self._graphed or GraphedFunction(self.update, self.generator)
            self._graphed(images, labels)
        else:
            self.update(images, labels)

    def update(self, images: Tensor, labels: Tensor) -> None:
        """Takes one optimiser step; nothing in it waits for the device."""
        with autocast(self.device, self.precision):
            stage = self.system.stages[self.stage]
            losses = self.system.losses(stage.name, images, labels, RandomSource(self.generator))
        self.on_progress(1 / 3)
        self.optimiser.zero_grad(set_to_none=True)
        torch.stack([loss.float() for loss in losses.values()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.trained, self.training.max_norm, foreach=True)
        self.optimiser.step()
        self.meter.add({key: loss.float() for key, loss in losses.items()})

    def _images(self, raw: RawBatch, seed: tuple[int, int, int]) -> Tensor:
        images = raw.images.to(self.device, non_blocking=True)
        facts = self.system.facts
        if self._as_they_are and tuple(images.shape[2:]) == facts.image_size:
            return self.system.prepared(normalise(images, facts.mean, facts.std))
        return self.system.prepared(self.augment(images, raw.sizes, seed))

    def _set_rates(self, number: int) -> None:
        """Sets the learning rates of a batch: a short rise, then a cosine to 0, anew in each stage."""
        begin = self.ends[self.stage - 1] if self.stage else 0
        length = max(self.ends[self.stage] - begin, 1)
        done = (number - begin) / length
        height = (
            min((number - begin + 1) / max(_WARMUP * length, 1), 1.0) * (1 + math.cos(math.pi * done)) / 2
        )
        height *= self.system.stages[self.stage].rate
        self.rates["rest"].fill_(self.training.lr * height)
        self.rates["backbone"].fill_(self.training.backbone_lr * height)
        self.system.get_buffer("progress").fill_(done)

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Returns the mean losses, and the accuracy after some looks when a validation is due."""
        metrics: dict[str, Any] = {"stage": self.stage + 1}
        metrics |= {f"loss/{name}": mean for name, mean in self.meter.means().items()}
        if self.validates_after(epoch, self.training.validate_every, self.training.epochs):
            found = accuracy(self.system, self.val_scenes, self.config, self.training.validation_images)
            metrics |= {f"val/accuracy@{n + 1}": value for n, value in enumerate(found)}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes while training."""
        return {
            "system": self.system.state_dict(),
            "stage": self.stage,
            "optimiser": self.optimiser.state_dict(),
            "meter": self.meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self.system.load_state_dict(state["system"])
        self._enter(state["stage"])
        restore_optimiser(self.optimiser, state["optimiser"], self.rates)
        self.meter.sums = {name: value.to(self.device) for name, value in state["meter"].items()}

    def save(self, folder: Path) -> None:
        """Saves the system for use."""
        save_system(self.system, folder)

    def progress(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Returns the stage, the loss and the accuracy."""
        loss = sum(value for name, value in metrics.items() if name.startswith("loss/"))
        shown = {"stage": self.system.stages[self.stage].name, "loss": f"{loss:.3f}"}
        right = [value for name, value in metrics.items() if name.startswith("val/")]
        return shown | ({"acc": f"{100 * right[-1]:.1f}"} if right else {})


def stage_ends(stages: tuple[Stage, ...], num_batches: int) -> list[int]:
    """Returns after how many batches each stage ends."""
    total = sum(stage.share for stage in stages)
    shares = np.cumsum([stage.share / total for stage in stages])
    return [*(round(float(share) * num_batches) for share in shares[:-1]), num_batches]


def precision_of(system: System, precision: str) -> str:
    """Returns the precision meant by `auto`: small networks gain nothing from bfloat16."""
    large = any(backbone.kind != "conv" for backbone in system.backbones())
    return "float32" if precision == "auto" and not large else precision


def accuracy(
    system: System, scenes: Scenes, config: ZooConfig, most: int, policy: str | None = None
) -> list[float]:
    """Returns the accuracy after each look, on a fixed part of some scenes."""
    count, facts, device = min(len(scenes), most), system.facts, system.device
    chosen = np.sort(random_order(len(scenes), "validation", config.training.seed)[:count])
    planned = batches(np.arange(count), min(config.training.batch_size, 256), drop_last=False)
    view = EvaluationView(facts.image_size, config.data.resize_size)
    generator = torch.Generator().manual_seed(config.training.seed)
    correct = torch.zeros(facts.most_glimpses, dtype=torch.long, device=device)
    painted = scenes.to(device) if isinstance(scenes, ClutteredScenes) else None
    loaded = (
        (painted.paint(chosen[part]) for part in planned)
        if painted is not None
        else iter(BatchLoader(Subset(scenes, chosen), planned, view, num_workers(config.data)))
    )
    with evaluating(system), autocast(device, precision_of(system, config.training.precision)):
        for raw in loaded:
            images = normalise(raw.images.to(device), facts.mean, facts.std)
            trace = system.look(images, facts.most_glimpses, policy=policy, generator=generator)
            numbers = ~trace.logits.isnan().any(dim=-1)  # what is no number is not right
            correct += (numbers & (trace.predictions == raw.labels.to(device)[:, None])).sum(dim=0)
    return (correct / count).tolist()
