"""What a run is: an agent, its data, its teacher, and how it is trained."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stam.config import (
    AgentConfig,
    require_at_least_one,
    require_not_negative,
    require_sensible_numbers,
    require_timm_name,
)
from stam.errors import require, require_choice

PRECISIONS = ("auto", "float32", "bfloat16")
CONSISTENCY = ("soft", "hard", "none")
ACTOR_OBJECTIVES = ("actor-critic", "gains")
INTERPOLATIONS = ("random", "bilinear", "bicubic")
MAX_MAGNITUDE = 10.0

# settings that earlier versions had and nothing needed, with the value that stands for their absence
REMOVED = {
    "reward": "agreement",
    "discount": 1.0,
    "warmup_epochs": 0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "start_share": 0.0,
    "updates_per_batch": 1,
    "try_every": 1,
}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to a training image; by default what DeiT does, "rand-m9-mstd0.5-inc1" in timm's notation.

    Attributes:
        random_crop: Whether a random part of the image is cut; otherwise its centre is kept.
        crop_scale: Smallest and largest area of a random crop, as a fraction of the image's.
        large_crop: Smallest area of a crop in the last epochs, if `large_crop_fraction` says so.
        crop_ratio: Smallest and largest width of a random crop divided by its height.
        horizontal_flip: Probability of mirroring.
        vertical_flip: Probability of turning upside down, for images that have no up (fMoW).
        num_ops: Operations of RandAugment for each image; 0 turns it off.
        magnitude: Mean strength of an operation, 0 to 10.
        magnitude_std: Standard deviation of the strength.
        op_probability: Probability that a drawn operation is applied at all.
        interpolation: How rotations, shears and translations interpolate: random takes bilinear or bicubic
            each time, which is timm's default; DeiT's own script set bicubic.
    """

    random_crop: bool = True
    crop_scale: tuple[float, float] = (0.08, 1.0)
    large_crop: float = 0.8
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    num_ops: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    op_probability: float = 0.5
    interpolation: str = "random"

    def __post_init__(self) -> None:
        require_sensible_numbers(self)
        for name in ("horizontal_flip", "vertical_flip", "op_probability"):
            given = getattr(self, name)
            require(0 <= given <= 1, f"{name} is a probability, 0 to 1, got {given}")
        low, high = self.crop_scale
        require(0 < low <= high <= 1, f"crop_scale must be 0 < least <= most <= 1, got {low}, {high}")
        require(0 < self.large_crop <= 1, f"large_crop must be above 0 and at most 1, got {self.large_crop}")
        low, high = self.crop_ratio
        require(0 < low <= high, f"crop_ratio must be 0 < least <= most, got {low}, {high}")
        require(self.num_ops >= 0, f"num_ops must be 0 (no RandAugment) or more, got {self.num_ops}")
        most = MAX_MAGNITUDE
        require(0 <= self.magnitude <= most, f"magnitude must be 0 to {most:g}, got {self.magnitude}")
        require(self.magnitude_std >= 0, f"magnitude_std must be 0 or more, got {self.magnitude_std}")
        require_choice("interpolation", self.interpolation, INTERPOLATIONS)

    @classmethod
    def off(cls) -> "AugmentConfig":
        """Returns the settings that only bring an image to size, its aspect kept and its centre shown."""
        return cls(random_crop=False, horizontal_flip=0.0, vertical_flip=0.0, num_ops=0)

    def with_large_crops(self) -> "AugmentConfig":
        """Returns the settings with larger crops, which show things about as large as they are in use."""
        low, high = self.crop_scale
        return dataclasses.replace(self, crop_scale=(min(max(low, self.large_crop), high), high))

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Brings settings of format 1.0 up to date."""
        return _renamed(values, {"mild_crop": "large_crop"})


@dataclass(frozen=True)
class DataConfig:
    """Where images come from and how they reach the model.

    Attributes:
        path: `digits`, a folder of class folders, a CSV file with the columns path, label and split, or tar
            shards.
        val_fraction: Share of the images held out, where the data has no split of its own.
        test_fraction: Share of the images that is kept from training and validation, for `stam evaluate` to
            report on; 0 where none is, or the data has a part `test` of its own.
        split_seed: Seed of that split; for digits, of the scenes.
        resize_size: Shorter side before the centre crop in evaluation; none resizes straight to size.
        decode_size: A shorter side above this is shrunk when decoding; none keeps every pixel.
        skip_unreadable: Leave out images that cannot be read, and count them, instead of refusing.
        check: Decode every image once before the first batch; what was found is remembered.
        cache: Keep decoded images in memory. None keeps training images on the GPU that trains, where they
            are at most 50,000 and take a fifth of its memory at most.
        num_workers: Processes that decode; none chooses by the machine.
        augment: What is done to a training image.
    """

    path: str = "digits"
    val_fraction: float = 0.1
    test_fraction: float = 0.0
    split_seed: int = 0
    resize_size: int | None = 256
    decode_size: int | None = 320
    skip_unreadable: bool = False
    check: bool = True
    cache: bool | None = None
    num_workers: int | None = None
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        """Checks the settings."""
        require_sensible_numbers(self)
        require(
            self.check or not self.skip_unreadable,
            "skip_unreadable needs every image to be checked: pass --check, or leave out --skip-unreadable",
        )
        require(0 < self.val_fraction < 1, f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        require(0 <= self.test_fraction < 1, f"test_fraction must be in [0, 1), got {self.test_fraction}")
        for name in ("resize_size", "decode_size"):
            given = getattr(self, name)
            require(given is None or given >= 1, f"{name} must be at least 1 or none, got {given}")
        require(
            self.num_workers is None or self.num_workers >= 0,
            f"num_workers must be 0 or more, got {self.num_workers}",
        )


@dataclass(frozen=True)
class Stage:
    """Epochs in which the same parts of an agent learn.

    Attributes:
        learns: `both` core and actor, the `core` alone or the `actor` alone.
        begin: The first epoch.
        end: The epoch after the last.
    """

    learns: str
    begin: int
    end: int

    @property
    def num_epochs(self) -> int:
        """How many epochs it has."""
        return self.end - self.begin

    def progress(self, epoch: int) -> float:
        """Returns how much of the stage is over when an epoch begins, from 0 to 1."""
        return (epoch - self.begin) / self.num_epochs


@dataclass(frozen=True)
class TrainingConfig:
    """How an agent is trained. The defaults are the paper's for ImageNet.

    Attributes:
        num_glimpses: Glimpses in an episode (the paper's T). With the paper's core a batch makes as many
            updates, with a causal core one.
        short_episodes: More episodes with each batch, from other first locations, which end after
            `short_episode_glimpses`: few glimpses cost little, and there is most to learn about them. 0 in
            the paper.
        short_episode_glimpses: Glimpses of those that are learned from; at most `num_glimpses` are taken.
        epochs: Epochs; each shows a fresh random part of the data.
        epoch_share: Share of the data an epoch shows; none is the paper's `1 / num_glimpses`, since a batch
            makes that many updates, and all of it with a causal core.
        batch_size: Scenes in a batch, over all processes.
        consistency: `soft`, `hard` or `none`.
        actor_objective: How the actor learns: `actor-critic`, the paper's way, from the returns of the
            locations that were drawn; `gains` from what every location would have been worth after one step
            of each episode: all are tried. That needs a causal core.
        actor_steps: With `gains`, updates of the actor after each batch, each from 256 scenes of the last 32
            batches.
        core_fraction: Fraction of the epochs, the first ones, in which the core learns alone, along the order
            centre-out and noisy versions of it. In the others the actor learns alone, with `gains`. That
            needs a causal core. With 0 both learn together, as in the paper.
        num_cores: How many cores learn in that part of the epochs, one after another from the same start. The
            average of their weights is used, which generalises better than any of them (a model soup).
        feature_weight: Weight of the distance (1 - cosine) between the agent's two features and the teacher's
            of the whole scene; 0 in the paper. For a core that starts as its teacher: it keeps what it knew.
        base_lr: Learning rate at batch 512 of everything but the critic; it scales with the batch.
        critic_lr: The same for the critic.
        actor_lr: The same for the actor; none takes `base_lr`, as the paper does. With `gains` an update is
            by 256 scenes, whatever the batch.
        min_lr: Where the cosine ends, in each stage of the training (`core_fraction`).
        weight_decay: AdamW's; one-dimensional parameters, such as biases, have none.
        large_crop_fraction: Fraction of the epochs, the last ones of each stage, whose crops are at least
            `augment.large_crop`: small crops show things larger than they are in use. 0 in the paper.
        ema_batches: Batches over which the weights that are validated and saved are averaged (an exponential
            moving average); 1 takes the latest weights, as the paper does. In a stage that is shorter than
            the first there are as many fewer.
        tau_start: Inverse temperature of the policy in the first epoch; `gains` has none.
        tau_end: The same after `tau_epochs`.
        tau_epochs: Epochs over which it rises.
        precision: Of the transformer; auto is bfloat16 on a GPU and float32 elsewhere.
        fast: On a GPU, use fused kernels, which are compiled in the first batch, and replay batches as a CUDA
            graph; otherwise the plain modules train, which start at once and are slower.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        seed: Seed of everything random.
        validate_every: Epochs between two validations.
        validation_images: Most scenes a validation looks at.
        choose_policy: Whether the last validation also tries how long the actor shall choose: always, or
            until 8 or 1 glimpses have been seen, after which the order centre-out takes over. What is most
            accurate becomes the agent's policy. The paper's actor always chooses.
        save_minutes: Minutes between two saves within an epoch.
    """

    num_glimpses: int = 21
    short_episodes: int = 0
    short_episode_glimpses: int = 4
    epochs: int = 200
    epoch_share: float | None = None
    batch_size: int = 4096
    consistency: str = "soft"
    actor_objective: str = "actor-critic"
    actor_steps: int = 32
    core_fraction: float = 0.0
    num_cores: int = 1
    feature_weight: float = 0.0
    base_lr: float = 1e-6
    critic_lr: float = 1e-3
    actor_lr: float | None = None
    min_lr: float = 1e-6
    weight_decay: float = 0.05
    large_crop_fraction: float = 0.0
    ema_batches: int = 1
    tau_start: float = 1.0
    tau_end: float = 4.0
    tau_epochs: int = 100
    precision: str = "auto"
    fast: bool = True
    device: str = "auto"
    seed: int = 0
    validate_every: int = 10
    validation_images: int = 2000
    choose_policy: bool = False
    save_minutes: float = 10.0

    def __post_init__(self) -> None:
        """Checks the settings."""
        require_sensible_numbers(self)
        require_at_least_one(
            self,
            "num_glimpses",
            "short_episode_glimpses",
            "epochs",
            "batch_size",
            "num_cores",
            "ema_batches",
            "tau_epochs",
            "actor_steps",
            "validate_every",
            "validation_images",
        )
        require_not_negative(
            self,
            "base_lr",
            "critic_lr",
            "min_lr",
            "weight_decay",
            "feature_weight",
            "short_episodes",
            "seed",
            "save_minutes",
        )
        rate = self.actor_lr
        require(rate is None or rate >= 0, f"actor_lr must be 0 or more, or none, got {rate}")
        share = self.epoch_share
        require(share is None or 0 < share <= 1, f"epoch_share must be above 0 and at most 1, got {share}")
        for name in ("large_crop_fraction", "core_fraction"):
            fraction = getattr(self, name)
            require(0 <= fraction <= 1, f"{name} must be from 0 to 1, got {fraction}")
        require(self.tau_start > 0 and self.tau_end > 0, "tau_start and tau_end must be above 0")
        require_choice("consistency", self.consistency, CONSISTENCY)
        require_choice("actor_objective", self.actor_objective, ACTOR_OBJECTIVES)
        require_choice("precision", self.precision, PRECISIONS)

    @property
    def core_epochs(self) -> int:
        """Epochs in which the core learns alone: of two epochs or more, one at least for each stage."""
        if self.core_fraction in (0, 1):
            return round(self.core_fraction) * self.epochs
        return max(min(1, self.epochs - 1), min(round(self.core_fraction * self.epochs), self.epochs - 1))

    @property
    def stages(self) -> tuple["Stage", ...]:
        """The parts of the training, one after another."""
        core_epochs = self.core_epochs
        if core_epochs == 0:
            return (Stage("both", 0, self.epochs),)
        ends = [core_epochs * number // self.num_cores for number in range(self.num_cores + 1)]
        cores = tuple(Stage("core", begin, end) for begin, end in pairwise(ends))
        return cores if core_epochs == self.epochs else (*cores, Stage("actor", core_epochs, self.epochs))

    def stage(self, epoch: int) -> "Stage":
        """Returns the part of the training that an epoch belongs to."""
        return next((stage for stage in self.stages if epoch < stage.end), self.stages[-1])

    def has_large_crops(self, epoch: int) -> bool:
        """Tells whether an epoch is one of the last of its stage, with larger crops."""
        return self.stage(epoch).progress(epoch) >= 1 - self.large_crop_fraction - 1e-9  # 1 - 0.7 is over 0.3

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Brings settings of format 1.0 up to date."""
        kept = {name: value for name, value in values.items() if name not in REMOVED}
        names = {
            "extra_looks": "short_episodes",
            "extra_glimpses": "short_episode_glimpses",
            "mild_share": "large_crop_fraction",
            "averaged_batches": "ema_batches",
            "compile": "fast",
        }
        return _renamed(kept, names)

    def tau(self, epoch: int) -> float:
        """Returns the policy's inverse temperature in an epoch: linear, then constant."""
        return self.tau_start + (self.tau_end - self.tau_start) * min(epoch / self.tau_epochs, 1.0)

    def with_epochs(self, epochs: int) -> "TrainingConfig":
        """Returns the settings of a longer or shorter training, its schedules in proportion."""
        ratio = epochs / self.epochs
        averaged = max(2, round(self.ema_batches * ratio)) if self.ema_batches > 1 else self.ema_batches
        tau_epochs = max(1, round(self.tau_epochs * ratio))
        one_core = dataclasses.replace(
            self, epochs=epochs, tau_epochs=tau_epochs, ema_batches=averaged, num_cores=1
        )
        num_cores = max(1, min(self.num_cores, one_core.core_epochs))
        return dataclasses.replace(one_core, num_cores=num_cores)

    def extended(self, epochs: int) -> "TrainingConfig":
        """Returns the settings of a training that goes on for more epochs: its last stage is longer."""
        fraction = self.core_fraction if self.core_fraction == 1 else self.core_epochs / epochs
        return dataclasses.replace(self, epochs=epochs, core_fraction=fraction)

    def ema_batches_of(self, stage: "Stage") -> int:
        """Returns over how many batches weights are averaged: in a short stage, as many fewer."""
        first = self.stages[0]
        return max(1, round(self.ema_batches * min(1.0, stage.num_epochs / first.num_epochs)))

    def learning_rate(self, base: float, epoch: int, num_images: int | None = None) -> float:
        """Returns the learning rate of an epoch: in each stage a cosine to `min_lr`.

        Args:
            base: The rate at 512 images an update, to whose number it is proportional.
            epoch: The epoch.
            num_images: Images of an update, by default a batch.
        """
        peak = base * (num_images or self.batch_size) / 512
        return cosine(peak, self.min_lr, self.stage(epoch).progress(epoch))


@dataclass(frozen=True)
class TeacherConfig:
    """How a whole-image teacher is fine-tuned. The defaults are DeiT's.

    Attributes:
        model: `deit` takes the architecture of `--init`; `timm:NAME` a timm model (extra `timm`), which
            starts from timm's own weights, or with `--init none` from nothing.
        epochs: Epochs; each shows a fresh random part of the data.
        epoch_share: Share of the data an epoch shows.
        batch_size: Images in a batch.
        base_lr: Learning rate at batch 512.
        head_lr: The same for the classifier, which starts anew; none takes `base_lr`. With a low `base_lr`
            beside it, pretrained features that are good already change little.
        fit_classifier: Use the first epoch to fit the classifier to the features as they are, by logistic
            regression. One look at each image is enough, where training the classifier takes many. With a
            `base_lr` of 0 the features stay so, and every epoch fits it again, to all images shown so far.
            For a DeiT in one process.
        min_lr: Where the cosine ends.
        warmup_epochs: Epochs over which the learning rate rises from nothing.
        weight_decay: AdamW's; one-dimensional parameters, such as biases, have none.
        drop_path: Largest drop-path rate of a DeiT; timm's models keep their own.
        smoothing: Label smoothing.
        mixup: Mixup's alpha; 0 turns it off.
        cutmix: CutMix's alpha; 0 turns it off.
        erasing: Probability that a random rectangle is replaced by noise.
        precision: Of the model; auto is bfloat16 on a GPU and float32 elsewhere.
        fast: On a GPU, use fused kernels, which are compiled in the first batch.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        seed: Seed of everything random.
        validate_every: Epochs between two validations.
    """

    model: str = "deit"
    epochs: int = 100
    epoch_share: float = 1.0
    batch_size: int = 1024
    base_lr: float = 5e-4
    head_lr: float | None = None
    fit_classifier: bool = False
    min_lr: float = 1e-5
    warmup_epochs: int = 5
    weight_decay: float = 0.05
    drop_path: float = 0.1
    smoothing: float = 0.1
    mixup: float = 0.8
    cutmix: float = 1.0
    erasing: float = 0.25
    precision: str = "auto"
    fast: bool = True
    device: str = "auto"
    seed: int = 0
    validate_every: int = 5

    def __post_init__(self) -> None:
        """Checks the settings."""
        require_sensible_numbers(self)
        require_at_least_one(self, "epochs", "batch_size", "validate_every")
        require_not_negative(
            self, "base_lr", "min_lr", "warmup_epochs", "weight_decay", "mixup", "cutmix", "seed"
        )
        if self.head_lr is not None:
            require_not_negative(self, "head_lr")
        for name in ("smoothing", "erasing", "drop_path"):
            given = getattr(self, name)
            require(0 <= given < 1, f"{name} must be in [0, 1), got {given}")
        share = self.epoch_share
        require(0 < share <= 1, f"epoch_share must be above 0 and at most 1, got {share}")
        require_choice("precision", self.precision, PRECISIONS)
        require(
            not self.fit_classifier or self.model == "deit",
            f"fit_classifier needs a DeiT, not {self.model}: turn it off",
        )
        require(
            not self.fit_classifier or self.base_lr == 0 or self.epochs > 1,
            f"fit_classifier takes the first epoch, so that nothing learns at base_lr {self.base_lr}: set "
            "epochs to 2 or more, base_lr to 0, or turn it off (no-fit-classifier)",
        )
        if self.model != "deit":
            known = self.model.startswith("timm:")
            require(known, f"model '{self.model}' is unknown: use deit, or timm:NAME")
            require_timm_name(self.model.removeprefix("timm:"))

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Brings settings of format 1.0 up to date."""
        return _renamed(values, {"compile": "fast"})

    def learning_rate(self, base: float, epoch: int) -> float:
        """Returns the learning rate of an epoch: a linear rise, then a cosine to `min_lr`."""
        peak = base * self.batch_size / 512
        if epoch < self.warmup_epochs:
            return peak * (epoch + 1) / (self.warmup_epochs + 1)
        rest = max(self.epochs - self.warmup_epochs, 1)
        return cosine(peak, self.min_lr, (epoch - self.warmup_epochs) / rest)


def cosine(start: float, end: float, progress: float) -> float:
    """Returns a point on the half cosine from `start` to `end`; a start below the end stays constant."""
    end = min(start, end)
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


@dataclass(frozen=True)
class RunConfig:
    """A whole experiment.

    Attributes:
        agent: What is trained; its classes come from the data.
        data: What it is trained on.
        training: How.
        teacher_training: How its teacher is fine-tuned, where none is given.
        init: Where the core starts: a weights file, a run, `package:NAME`, `hub:NAME`, or `none`.
        teacher: The same for the teacher; none fine-tunes one on the data first.
        class_indices: Rows of the weights' classifiers that the classes are; none starts other classifiers
            afresh.
        start_from_teacher: Whether the core and both classifiers start as the teacher instead, which has
            learned these classes already; the paper's start as `init`.
    """

    agent: AgentConfig
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    teacher_training: TeacherConfig = field(default_factory=TeacherConfig)
    init: str = "none"
    teacher: str | None = None
    class_indices: tuple[int, ...] | None = None
    start_from_teacher: bool = False

    def __post_init__(self) -> None:
        """Checks what no part can check alone."""
        most = self.agent.grid.num_locations
        require(
            self.training.num_glimpses <= most,
            f"num_glimpses {self.training.num_glimpses} is more than the {most} locations of the grid",
        )
        require(
            self.training.actor_objective == "actor-critic" or self.agent.core == "causal",
            f"actor_objective gains needs a core that tries a glimpse cheaply: pass --core causal, not "
            f"{self.agent.core}, or --actor-objective actor-critic",
        )
        fraction = self.training.core_fraction
        require(
            fraction == 0 or self.agent.core == "causal",
            f"core_fraction {fraction:g} needs a core that reads all steps in one pass: pass --core causal, "
            f"not {self.agent.core}",
        )
        cores, epochs = self.training.num_cores, self.training.core_epochs
        require(
            cores == 1 or cores <= epochs,
            f"num_cores {cores} needs as many epochs in which the core learns alone: pass a larger "
            f"--core-fraction than {fraction:g}, or more --epochs than {self.training.epochs}",
        )
        require(
            fraction in (0, 1) or self.agent.has_actor,
            f"core_fraction {fraction:g} leaves epochs for an actor, and policy {self.agent.policy} has "
            "none: pass --core-fraction 1 or 0",
        )
        require(
            fraction < 1 or not self.agent.has_actor,
            f"core_fraction 1 leaves no epoch for the actor of policy {self.agent.policy}: pass a smaller "
            "--core-fraction, or a fixed order, as --policy centre-out",
        )
        require(
            fraction in (0, 1) or self.training.actor_objective == "gains",
            f"core_fraction {fraction:g} leaves epochs in which the actor learns alone, by what locations "
            "are worth: pass --actor-objective gains, or --core-fraction 0",
        )
        require(
            self.training.actor_objective == "actor-critic" or self.training.num_glimpses >= 2,
            "actor_objective gains needs at least 2 glimpses: pass a larger --num-glimpses",
        )
        own, weight = self.teacher_training.model, self.training.feature_weight
        require(
            self.teacher is not None or own == "deit" or weight == 0,  # known before hours of fine-tuning
            f"feature_weight {weight} needs a DeiT as teacher, not {own}: pass --feature-weight 0",
        )
        require(
            self.teacher is not None or own == "deit" or not self.start_from_teacher,
            f"an agent cannot start from a teacher that is no DeiT ({own}): use --no-start-from-teacher",
        )
        require(
            self.data.augment.random_crop or self.training.large_crop_fraction == 0,
            f"large_crop_fraction {self.training.large_crop_fraction} needs random crops: "
            "pass --augment.random-crop",
        )

    @property
    def uses_gains(self) -> bool:
        """Whether the agent has an actor that learns from what every location is worth."""
        return self.training.actor_objective == "gains" and self.agent.has_actor
