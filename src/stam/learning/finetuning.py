"""Fine-tuning a whole-image teacher, with DeiT's settings.

Label smoothing, mixup or CutMix (one of them for each batch), random erasing, drop-path, AdamW with a linear
rise and a cosine. The teacher of a run is the checkpoint that does best on the validation images.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.config import AgentConfig
from stam.data import BatchLoader, EvaluationView, RawBatch, Scenes, batches
from stam.data.augment import Augment
from stam.data.mixing import erase, mix, smooth_targets
from stam.data.randomness import random_key
from stam.data.scenes import run_length
from stam.errors import ConfigError, require_package
from stam.fast.cuda import encode
from stam.fast.cuda_graph import GraphedFunction, Pipeline
from stam.learning import distributed
from stam.learning.linear import fit_linear
from stam.learning.loop import (
    Learner,
    Meter,
    MetricLogger,
    Place,
    Plan,
    host_random,
    num_workers,
    only_one,
    restore,
    run_loop,
)
from stam.learning.optimisation import autocast, choose_device, gradients, make_optimiser, restore_optimiser
from stam.learning.runs import RunFolder
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.scene.pixels import normalise
from stam.settings import DataConfig, TeacherConfig
from stam.weights import MODEL_FILE, adapt_deit, find_core, heads_like, load_teacher_folder, save_teacher
from stam.weights.locate import NOTHING

Student = tuple[nn.Module, dict[str, Any]]  # a model to fine-tune, and the record to build it again from


def build_student(
    config: TeacherConfig,
    agent: AgentConfig,
    init: str,
    labels: tuple[str, ...],
    class_indices: tuple[int, ...] | None = None,
) -> Student:
    """Returns the model to fine-tune, and the record from which it can be built again.

    Args:
        config: Which model.
        agent: Image size, and the architecture where nothing is given to start from.
        init: Where it starts: a weights file, a run, `package:NAME`, `hub:NAME`, or `none`.
        labels: Class names.
        class_indices: Rows of the file's classifier to keep.
    """
    if config.fit_classifier and distributed.world_size() > 1:
        raise ConfigError("fit_classifier is for one process: turn it off, or start one")
    record: dict[str, Any] = {"labels": list(labels), "image_size": list(agent.grid.image_size)}
    if config.model != "deit":
        name = config.model.removeprefix("timm:")
        timm = require_package("timm", extra="timm")
        try:
            model = timm.create_model(name, num_classes=len(labels), pretrained=init != NOTHING)
        except RuntimeError as error:
            raise ConfigError(f"timm has no model '{name}' to give: {str(error).splitlines()[0]}") from error
        return model, record | {"timm": name}
    settings: dict[str, Any] = {
        "width": agent.width,
        "depth": agent.depth,
        "num_heads": agent.num_heads,
        "mlp_ratio": agent.mlp_ratio,
        "channels": agent.channels,
        "distilled": False,
    }
    state: Mapping[str, Tensor] | None = None
    start = find_core(init)
    if start is not None:
        source = start / MODEL_FILE if start.is_dir() else start
        state, settings = adapt_deit(
            source,
            len(labels),
            class_indices,
            image_size=agent.image_size,
            num_heads=heads_like(source, agent.width, agent.num_heads),
        )
    grid = agent.grid
    model = VisionTransformer(
        num_classes=len(labels),
        patch_size=grid.patch_size,
        image_patches=grid.image_patches,
        drop_path=config.drop_path,
        **settings,
    )
    if state is not None:
        model.load_state_dict(dict(state))
    return model, record | {"vit": settings | {"patch_size": list(grid.patch_size)}}


def finetune(
    run: RunFolder,
    config: TeacherConfig,
    data: DataConfig,
    agent: AgentConfig,
    model: nn.Module,
    record: dict[str, Any],
    train_scenes: Scenes,
    val_scenes: Scenes,
    resume: bool = False,
    how_to_resume: str = "",
    loggers: tuple[MetricLogger, ...] = (),
    save_minutes: float = 10.0,
) -> Teacher:
    """Fine-tunes a model in a run folder and returns the best teacher.

    Args:
        run: Where metrics, checkpoints and state go.
        config: How.
        data: Loading and augmentation.
        agent: Image size and normalisation.
        model: What `build_student` returned.
        record: Likewise.
        train_scenes: What to learn from.
        val_scenes: What to choose the best checkpoint by.
        resume: Whether to go on from the run's saved state.
        how_to_resume: The command to show when interrupted.
        loggers: Called with every epoch's metrics.
        save_minutes: Minutes between two saves within an epoch.

    Raises:
        Interrupted: Ctrl-C; the state was saved and `resume` goes on from it.
    """
    kind = FittedTeacherLearner if config.fit_classifier else TeacherLearner
    learner = kind(config, data, agent, model, record, val_scenes)
    with only_one(run):
        if resume:
            restore(learner, run)
        run_loop(
            learner,
            run,
            plan(len(train_scenes), config, run_length(train_scenes)),
            train_scenes,
            data,
            "teacher",
            save_minutes,
            how_to_resume,
            loggers,
        )
    teacher, _ = load_teacher_folder(run.path / "best")
    return teacher


def plan(num_scenes: int, config: TeacherConfig, run_length: int = 1) -> Plan:
    """Returns which scenes a fine-tuning shows when."""
    return Plan(num_scenes, config.epochs, config.batch_size, config.epoch_share, config.seed, run_length)


class TeacherLearner(Learner):
    """A whole-image classifier being fine-tuned."""

    def __init__(
        self,
        config: TeacherConfig,
        data: DataConfig,
        agent: AgentConfig,
        model: nn.Module,
        record: dict[str, Any],
        val_scenes: Scenes,
    ) -> None:
        self.config, self.data, self.agent, self.record = config, data, agent, record
        self.device = choose_device(config.device)
        self.model = model.to(self.device).train()
        self.val_scenes = val_scenes
        parts = _parts(model, config)
        self._trained = [each for name, part in parts.items() for _, each in part if self._is_trained(name)]
        self._mark_trained()
        self.rates = {name: torch.zeros((), device=self.device) for name in parts}
        self.optimiser = make_optimiser(parts, config.weight_decay, self.rates)
        self.augment = Augment(data.augment, agent.grid.image_size, agent.mean, agent.std)
        self.generator = torch.Generator(self.device)
        self.meter = Meter()
        fast = config.fast and self.device.type == "cuda" and isinstance(model, VisionTransformer)
        self.pipeline = Pipeline(self.device)
        self.update: Callable[[Tensor, Tensor], object] = self._update
        if fast and distributed.can_be_captured():
            self.update = GraphedFunction(self._update, self.generator)

    def train_batch(self, place: Place, raw: RawBatch) -> None:
        """Takes one optimiser step; on a GPU the images are prepared while the last step is computed."""
        config = self.config
        seed = (config.seed, place.epoch, place.batch)
        share = distributed.rank(), distributed.world_size()
        host = host_random("mixing", *seed)
        self.generator.manual_seed(random_key("batch", *seed) >> 1)
        with self.pipeline.preparing(raw.images, raw.labels):
            images = self.augment(raw.images.to(self.device, non_blocking=True), raw.sizes, seed, share)
            labels = raw.labels.to(self.device, non_blocking=True)
            targets = smooth_targets(labels, len(self.record["labels"]), config.smoothing)
            images, targets = mix(images, targets, config.mixup, config.cutmix, host)
            images = erase(images, config.erasing, host, self.generator)
        with self.pipeline.using(images, targets):
            for name, rate in self.learning_rates(place.epoch).items():
                self.rates[name].fill_(rate)
            self.model.train()
            self.update(images, targets)

    def _update(self, images: Tensor, targets: Tensor) -> None:
        """Takes one optimiser step from images that are ready; all of it is one CUDA graph on a GPU."""
        with autocast(self.device, self.config.precision):
            logits = self._logits(images)
            loss = torch.stack([F.cross_entropy(part.float(), targets) for part in logits]).mean()
        self.on_progress(1 / 3)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        distributed.average(gradients(self.optimiser))
        self.optimiser.step()
        self.meter.add({"supervised": loss})

    def _logits(self, images: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.model, VisionTransformer):
            masks = self.model.sample_drop_path(len(images), distributed.random_source(self.generator))
            if not self.config.fast:
                return self.model.classify_images(images, masks)
            return self.model.classify(encode(self.model, *self.model.all_patches(images), masks))
        return (self.model(images),)

    def _is_trained(self, part: str) -> bool:
        """Tells whether a part learns: with a rate of 0, no gradient is computed for it."""
        config = self.config
        return part != "model" or config.base_lr > 0 or config.head_lr is None

    def _mark_trained(self) -> None:
        self.model.requires_grad_(False)
        for parameter in self._trained:
            parameter.requires_grad_(True)

    def learning_rates(self, epoch: int) -> dict[str, float]:
        """Returns the learning rate of each part in an epoch."""
        config = self.config
        bases = {"model": config.base_lr, "head": config.head_lr or 0.0}
        return {part: config.learning_rate(bases[part], epoch) for part in self.rates}

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Returns the mean loss, and the accuracy when a validation is due."""
        metrics: dict[str, Any] = {f"lr/{part}": rate for part, rate in self.learning_rates(epoch).items()}
        metrics |= {f"loss/{name}": mean for name, mean in self.meter.means().items()}
        if self.validates_after(epoch, self.config.validate_every, self.config.epochs):
            teacher = Teacher(self.model, len(self.record["labels"]))
            given = self.agent, self.data, self.val_scenes, self.config.precision
            metrics["val/score"] = whole_image_accuracy(teacher, *given)
            self._mark_trained()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes while training."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "meter": self.meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self.model.load_state_dict(state["model"])
        restore_optimiser(self.optimiser, state["optimiser"], self.rates)
        self.meter.sums = {name: value.to(self.device) for name, value in state["meter"].items()}

    def save(self, folder: Path) -> None:
        """Saves the teacher for use."""
        save_teacher(self.model, folder, self.record)

    def progress(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Returns the loss and the accuracy."""
        shown = {"loss": f"{metrics['loss/supervised']:.3f}"}
        return shown | ({"acc": f"{100 * metrics['val/score']:.1f}"} if "val/score" in metrics else {})


class FittedTeacherLearner(TeacherLearner):
    """Fits the classifier to the features as they are, before anything else learns.

    The first epoch is for that. Where the features do not learn (`base_lr` 0) all others are too, and the
    classifier is fitted to the images of all of them.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._features: list[Tensor] = []
        self._labels: list[Tensor] = []

    def _is_fitting(self, epoch: int) -> bool:
        return epoch == 0 or self.config.base_lr == 0

    def learning_rates(self, epoch: int) -> dict[str, float]:
        """Returns the learning rate of each part in an epoch; 0 while the classifier is fitted."""
        rates = super().learning_rates(epoch)
        return dict.fromkeys(rates, 0.0) if self._is_fitting(epoch) else rates

    def train_batch(self, place: Place, raw: RawBatch) -> None:
        """Notes the features of some images, or takes an optimiser step."""
        if not self._is_fitting(place.epoch):
            super().train_batch(place, raw)
            return
        seed = (self.config.seed, place.epoch, place.batch)
        images = self.augment(raw.images.to(self.device), raw.sizes, seed)
        vit = cast(VisionTransformer, self.model.eval())
        with torch.no_grad(), autocast(self.device, self.config.precision):
            given = vit.all_patches(images)
            features = encode(vit, *given) if self.config.fast else vit(*given)
        self._features.append(features.float().cpu())
        self._labels.append(raw.labels.cpu())

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Fits the classifiers where it is time for that, each to the features of its own token."""
        if self._is_fitting(epoch):
            self._fit()
        return super().end_epoch(epoch)

    def _fit(self) -> None:
        vit, labels = cast(VisionTransformer, self.model), torch.cat(self._labels)
        features = torch.cat(self._features)
        heads = [vit.head, vit.head_dist] if vit.distilled else [vit.head]
        if len(labels.unique()) > 1:
            for index, head in enumerate(heads):
                fitted = fit_linear(features[:, index].numpy(), labels.numpy(), head.out_features)
                with torch.no_grad():
                    for parameter, value in zip((head.weight, head.bias), fitted, strict=True):
                        parameter.copy_(torch.from_numpy(value))
        with torch.no_grad():
            logits = vit.classify(features.to(self.device))
            each = [F.cross_entropy(part.float(), labels.to(self.device)) for part in logits]
        self.meter.add({"supervised": torch.stack(each).mean()})
        if self.config.base_lr > 0:  # from now on the features change
            self._features, self._labels = [], []

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes while training."""
        return super().state_dict() | {"features": self._features, "labels": self._labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        super().load_state_dict(state)
        self._features, self._labels = list(state["features"]), list(state["labels"])


def _parts(model: nn.Module, config: TeacherConfig) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Returns the parameters that share a learning rate; the classifier is apart if it has one of its own."""
    named = list(model.named_parameters())
    if config.head_lr is None:
        return {"model": named}
    if isinstance(model, VisionTransformer):
        own = {name for name, _ in named if name.startswith("head")}
    else:  # of timm
        heads = {id(parameter) for parameter in model.get_classifier().parameters()}  # type: ignore[operator]
        own = {name for name, parameter in named if id(parameter) in heads}
    return {
        "model": [each for each in named if each[0] not in own],
        "head": [each for each in named if each[0] in own],
    }


def whole_image_accuracy(
    teacher: Teacher, agent: AgentConfig, data: DataConfig, scenes: Scenes, precision: str = "auto"
) -> float:
    """Returns the share of scenes a teacher names rightly from the whole image."""
    device = next(teacher.model.parameters()).device
    view = EvaluationView(agent.image_size, data.resize_size)
    planned = batches(np.arange(len(scenes)), 128, drop_last=False)
    correct = torch.zeros((), dtype=torch.long, device=device)
    with autocast(device, precision):
        for raw in BatchLoader(scenes, planned, view, num_workers(data)):
            images = normalise(raw.images.to(device), agent.mean, agent.std)
            scores = teacher(images)
            numbers = ~scores.isnan().any(dim=1)  # what is no number is not right
            correct += (numbers & (scores.argmax(dim=1) == raw.labels.to(device))).sum()
    return float(correct) / len(scenes)
