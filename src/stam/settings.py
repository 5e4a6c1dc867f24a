"""What a run is: an agent, its data, its teacher, and how it is trained."""

import math
from dataclasses import dataclass, field

from stam.config import AgentConfig, require, require_choice, require_sensible_numbers
from stam.data.augment import AugmentConfig
from stam.learning.objective import CONSISTENCY, REWARDS, Objective

PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class DataConfig:
    """Where images come from and how they reach the model.

    Attributes:
        path: `digits`, a folder of class folders, or tar shards.
        val_fraction: Share of the images held out, where the data has no split of its own.
        split_seed: Seed of that split; for digits, of the scenes.
        resize_size: Shorter side before the centre crop in evaluation; none resizes straight to size.
        decode_size: A shorter side above this is shrunk when decoding; none keeps every pixel.
        skip_unreadable: Leave out images that cannot be read, and count them, instead of refusing.
        check: Decode every image once before the first batch.
        cache: Keep decoded images in memory.
        num_workers: Processes that decode; none chooses by the machine.
        augment: What is done to a training image.
    """

    path: str = "digits"
    val_fraction: float = 0.1
    split_seed: int = 0
    resize_size: int | None = 256
    decode_size: int | None = 320
    skip_unreadable: bool = False
    check: bool = True
    cache: bool = False
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
        for name in ("resize_size", "decode_size"):
            given = getattr(self, name)
            require(given is None or given >= 1, f"{name} must be at least 1 or none, got {given}")
        require(
            self.num_workers is None or self.num_workers >= 0,
            f"num_workers must be 0 or more, got {self.num_workers}",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """How an agent is trained. The defaults are the paper's for ImageNet.

    Attributes:
        num_glimpses: Glimpses in an episode, and so updates a batch (the paper's T).
        extra_looks: More episodes with each batch, from other first locations, broken off after
            `extra_glimpses`: few glimpses cost little, and there is most to learn about them. 0 in the paper.
        extra_glimpses: Glimpses of those, and so updates of each; at most `num_glimpses` are taken.
        epochs: Epochs; each shows a fresh random part of the data.
        epoch_share: Share of the data an epoch shows; none is the paper's `1 / num_glimpses`, since a batch
            makes that many updates.
        warmup_epochs: First epochs that train the classifiers on random glimpses, before looking is learned.
        batch_size: Scenes in a batch, over all processes.
        consistency: `soft`, `hard` or `none`.
        feature_weight: Weight of how much the agent's two features turn away from the teacher's of the whole
            scene; 0 in the paper. For a core that starts as its teacher: it keeps what it knew.
        reward: Of the next glimpse: `agreement` with the teacher after it, as in the paper, or the `gain` in
            agreement by it.
        discount: How much what comes after the next glimpse counts; 1 in the paper.
        base_lr: Learning rate at batch 512 of everything but the critic; it scales with the batch.
        critic_lr: The same for the critic.
        actor_lr: The same for the actor; none takes `base_lr`, as the paper does.
        min_lr: Where the cosine ends.
        weight_decay: AdamW's, on matrices only.
        mixup: Alpha of mixup: images are blended in pairs, each by a share of its own, and so are labels.
            0 turns it off, as in the paper. For few images, which long trainings learn by heart.
        cutmix: Alpha of CutMix: part of an image is another's. With both, a coin decides for each image.
        mild_share: Share of the epochs, the last ones, whose crops are at least `augment.mild_crop`: small
            crops show things larger than they are in use. 0 in the paper.
        averaged_batches: Batches over which the weights that are validated and saved are averaged; 1 takes
            the latest weights, as the paper does.
        start_share: Share of the weights the core started from, its classifiers aside, in those that are
            validated and saved; 0 in the paper. For short trainings of pretrained cores.
        tau_start: Inverse temperature of the policy in the first epoch.
        tau_end: The same after `tau_epochs`.
        tau_epochs: Epochs over which it rises.
        precision: Of the transformer; auto is bfloat16 on a GPU and float32 elsewhere.
        compile: On a GPU, use kernels that are compiled in the first batch, and replay batches as a CUDA
            graph; otherwise training starts at once and is slower.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        seed: Seed of everything random.
        validate_every: Epochs between two validations.
        validation_images: Most scenes a validation looks at.
        save_minutes: Minutes between two saves within an epoch.
    """

    num_glimpses: int = 21
    extra_looks: int = 0
    extra_glimpses: int = 4
    epochs: int = 200
    epoch_share: float | None = None
    warmup_epochs: int = 0
    batch_size: int = 4096
    consistency: str = "soft"
    feature_weight: float = 0.0
    reward: str = "agreement"
    discount: float = 1.0
    base_lr: float = 1e-6
    critic_lr: float = 1e-3
    actor_lr: float | None = None
    min_lr: float = 1e-6
    weight_decay: float = 0.05
    mixup: float = 0.0
    cutmix: float = 0.0
    mild_share: float = 0.0
    averaged_batches: int = 1
    start_share: float = 0.0
    tau_start: float = 1.0
    tau_end: float = 4.0
    tau_epochs: int = 100
    precision: str = "auto"
    compile: bool = True
    device: str = "auto"
    seed: int = 0
    validate_every: int = 10
    validation_images: int = 2000
    save_minutes: float = 10.0

    def __post_init__(self) -> None:
        """Checks the settings."""
        require_sensible_numbers(self)
        for name in (
            "num_glimpses",
            "extra_glimpses",
            "epochs",
            "batch_size",
            "averaged_batches",
            "tau_epochs",
            "validate_every",
            "validation_images",
        ):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "base_lr",
            "critic_lr",
            "min_lr",
            "weight_decay",
            "feature_weight",
            "mixup",
            "cutmix",
            "extra_looks",
            "warmup_epochs",
            "seed",
            "save_minutes",
        ):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        rate = self.actor_lr
        require(rate is None or rate >= 0, f"actor_lr must be 0 or more, or none, got {rate}")
        require(
            self.warmup_epochs < self.epochs,
            f"warmup_epochs {self.warmup_epochs} leaves nothing of {self.epochs} epochs to learn looking",
        )
        share = self.epoch_share
        require(share is None or 0 < share <= 1, f"epoch_share must be above 0 and at most 1, got {share}")
        require(
            0 <= self.start_share < 1, f"start_share must be at least 0 and below 1, got {self.start_share}"
        )
        require(0 <= self.mild_share <= 1, f"mild_share must be from 0 to 1, got {self.mild_share}")
        require(self.tau_start > 0 and self.tau_end > 0, "tau_start and tau_end must be above 0")
        require_choice("consistency", self.consistency, CONSISTENCY)
        require_choice("reward", self.reward, REWARDS)
        require(0 <= self.discount <= 1, f"discount must be from 0 to 1, got {self.discount}")
        require_choice("precision", self.precision, PRECISIONS)

    def objective(self, handover: int | None = None) -> Objective:
        """Returns what is to be minimised, for an agent with such a handover."""
        return Objective(
            self.num_glimpses, self.consistency, self.reward, self.discount, handover, self.feature_weight
        )

    def is_mild(self, epoch: int) -> bool:
        """Tells whether an epoch is one of the last, with larger crops."""
        return epoch >= self.epochs * (1 - self.mild_share) - 1e-9  # 10 (1 - 0.7) is a little more than 3

    def tau(self, epoch: int) -> float:
        """Returns the policy's inverse temperature in an epoch: linear, then constant."""
        return self.tau_start + (self.tau_end - self.tau_start) * min(epoch / self.tau_epochs, 1.0)

    def learning_rate(self, base: float, epoch: int) -> float:
        """Returns the learning rate of an epoch: scaled by the batch, then a cosine to `min_lr`."""
        return cosine(base * self.batch_size / 512, self.min_lr, epoch / self.epochs)


@dataclass(frozen=True)
class TeacherConfig:
    """How a whole-image teacher is fine-tuned. The defaults are DeiT's.

    Attributes:
        model: `deit` takes the architecture of `--init`; `timm:NAME` a timm model (extra `timm`).
        epochs: Passes over the data.
        batch_size: Images in a batch.
        base_lr: Learning rate at batch 512.
        min_lr: Where the cosine ends.
        warmup_epochs: Epochs over which the learning rate rises from nothing.
        weight_decay: AdamW's, on matrices only.
        drop_path: Largest drop-path rate.
        smoothing: Label smoothing.
        mixup: Mixup's alpha; 0 turns it off.
        cutmix: CutMix's alpha; 0 turns it off.
        erasing: Probability that a random rectangle is replaced by noise.
        precision: Of the model; auto is bfloat16 on a GPU and float32 elsewhere.
        compile: On a GPU, use kernels that are compiled in the first batch.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        seed: Seed of everything random.
        validate_every: Epochs between two validations.
    """

    model: str = "deit"
    epochs: int = 100
    batch_size: int = 1024
    base_lr: float = 5e-4
    min_lr: float = 1e-5
    warmup_epochs: int = 5
    weight_decay: float = 0.05
    drop_path: float = 0.1
    smoothing: float = 0.1
    mixup: float = 0.8
    cutmix: float = 1.0
    erasing: float = 0.25
    precision: str = "auto"
    compile: bool = True
    device: str = "auto"
    seed: int = 0
    validate_every: int = 5

    def __post_init__(self) -> None:
        """Checks the settings."""
        require_sensible_numbers(self)
        for name in ("epochs", "batch_size", "validate_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("base_lr", "min_lr", "warmup_epochs", "weight_decay", "mixup", "cutmix", "seed"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("smoothing", "erasing", "drop_path"):
            given = getattr(self, name)
            require(0 <= given < 1, f"{name} must be in [0, 1), got {given}")
        require_choice("precision", self.precision, PRECISIONS)
        known = self.model == "deit" or (self.model.startswith("timm:") and len(self.model) > 5)
        require(known, f"model '{self.model}' is unknown: use deit, or timm:NAME")

    def learning_rate(self, epoch: int) -> float:
        """Returns the learning rate of an epoch: a linear rise, then a cosine to `min_lr`."""
        peak = self.base_lr * self.batch_size / 512
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
    """

    agent: AgentConfig
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    teacher_training: TeacherConfig = field(default_factory=TeacherConfig)
    init: str = "none"
    teacher: str | None = None
    class_indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks what no part can check alone."""
        most = self.agent.grid.num_locations
        require(
            self.training.num_glimpses <= most,
            f"num_glimpses {self.training.num_glimpses} is more than the {most} locations of the grid",
        )
        own, weight = self.teacher_training.model, self.training.feature_weight
        require(
            self.teacher is not None or own == "deit" or weight == 0,  # known before hours of fine-tuning
            f"feature_weight {weight} needs a DeiT as teacher, not {own}: use feature_weight 0",
        )
        require(
            self.data.augment.random_crop or self.training.mild_share == 0,
            f"mild_share {self.training.mild_share} needs random crops: pass --augment.random-crop",
        )
