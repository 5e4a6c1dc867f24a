"""Named experiments: functions that return a full configuration. Every experiment of the paper has one.

A name is built of parts: the data or size, then what differs from the default. `stam train --help-all`
lists all.
"""

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from stam.config import CORE_SIZES, AgentConfig
from stam.errors import ConfigError
from stam.settings import AugmentConfig, DataConfig, RunConfig, TeacherConfig, TrainingConfig

Recipe = Callable[[], RunConfig]

_CONSISTENCY_NAMES = {"hard": "hard", "none": "no-consistency"}

# glimpse size: (image size, glimpses an episode, batch), from the paper's appendix
GLIMPSE_SIZES = {32: (224, 21, 4096), 48: (240, 16, 2000), 64: (256, 7, 1600)}


def digits() -> RunConfig:
    """Cluttered digits: an actor for the package's causal core, in minutes on two CPU cores."""
    base = digits_paper()
    return dataclasses.replace(
        base,
        agent=dataclasses.replace(base.agent, core="causal", actor="joint", actor_width=512),
        training=dataclasses.replace(
            base.training,
            num_glimpses=12,
            actor_objective="gains",
            actor_steps=64,
            epochs=15,
            epoch_share=1024 / 60_000,  # four batches
            base_lr=1e-4,
            actor_lr=5e-3,
            min_lr=1e-6,
            tau_epochs=7,
            ema_batches=10,
            validate_every=15,
        ),
        init="package:digits-causal-core",
    )


def digits_paper() -> RunConfig:
    """Cluttered digits from the package's faithful core and teacher, trained the paper's way."""
    return RunConfig(
        agent=AgentConfig(
            num_classes=10,
            image_size=56,
            glimpse_size=8,
            patch_size=4,
            width=96,
            depth=4,
            num_heads=3,
            drop_path=0.0,
            actor_width=128,
            critic_width=128,
        ),
        data=DataConfig(
            "digits", resize_size=None, decode_size=None, check=False, augment=AugmentConfig.off()
        ),
        training=TrainingConfig(
            num_glimpses=10,
            epochs=4,
            batch_size=256,
            base_lr=3e-4,
            actor_lr=2e-3,
            critic_lr=1e-3,
            min_lr=1e-5,
            tau_epochs=2,
            validate_every=2,
            validation_images=300,
        ),
        init="package:digits-core",
        teacher="package:digits-teacher",
    )


def imagenet(size: str = "small", glimpse_size: int = 32) -> RunConfig:
    """ImageNet with the paper's settings."""
    image_size, num_glimpses, batch_size = GLIMPSE_SIZES[glimpse_size]
    return RunConfig(
        agent=AgentConfig.of_size(size, 1000, image_size=image_size, glimpse_size=glimpse_size),
        data=DataConfig("imagenet", resize_size=image_size * 256 // 224, decode_size=None),
        training=TrainingConfig(num_glimpses=num_glimpses, batch_size=512 if size == "base" else batch_size),
        init=f"hub:facebook/deit-{size}-distilled-patch16-224",
        teacher=f"hub:facebook/deit-{size}-distilled-patch16-224" if image_size == 224 else None,
    )


def fmow(size: str = "small", glimpse_size: int = 32) -> RunConfig:
    """The paper's settings for fMoW: 62 classes, vertical flips, a teacher fine-tuned for 100 epochs."""
    num_glimpses = GLIMPSE_SIZES[glimpse_size][1]
    base = imagenet(size, glimpse_size)
    return dataclasses.replace(
        base,
        agent=dataclasses.replace(base.agent, num_classes=62),
        data=dataclasses.replace(
            base.data, path="fmow", resize_size=None, augment=AugmentConfig(vertical_flip=0.5)
        ),
        training=TrainingConfig(num_glimpses=num_glimpses, epochs=400, batch_size=600, base_lr=1e-5),
        teacher_training=TeacherConfig(epochs=100),
        teacher=None,
    )


def own_images(size: str) -> RunConfig:
    """Anybody's images. `learning/fitting.py` chooses the rest by the images and the machine."""
    return RunConfig(
        agent=AgentConfig.of_size(size, 2, actor_width=512),
        data=DataConfig("images", resize_size=224, augment=AugmentConfig(num_ops=0, crop_scale=(0.2, 1.0))),
        training=_in_minutes(epochs=62, base_lr=7e-5, tau_epochs=31, choose_policy=True),
        teacher_training=_short_teacher(batch_size=256, base_lr=5e-4, warmup_epochs=1),
        init="package:imagenette-tiny" if size == "tiny" else f"hub:facebook/deit-{size}-patch16-224",
        start_from_teacher=True,
    )


def _short_teacher(**settings: Any) -> TeacherConfig:
    """Fine-tuning on thousands of images: too few epochs for DeiT's mixing and erasing to pay."""
    return TeacherConfig(epochs=20, mixup=0.0, cutmix=0.0, erasing=0.0, **settings)


def _in_minutes(**settings: Any) -> TrainingConfig:
    """Training on thousands of images within minutes on one GPU: whole epochs, an actor that learns fast.

    With all that raised the accuracy after each glimpse beyond the paper's way (docs/results.md).
    """
    return TrainingConfig(
        epoch_share=1.0,
        batch_size=600,
        actor_lr=4e-4,
        short_episodes=3,
        feature_weight=2.0,
        large_crop_fraction=0.25,
        ema_batches=150,
        **settings,
    )


# rows of ImageNet's 1000 classes, for Imagenette's ten in alphabetical order
_IMAGENETTE_ROWS = (482, 491, 497, 217, 566, 569, 571, 574, 701, 0)


def imagenette() -> RunConfig:
    """Imagenette, ten classes of ImageNet, from a DeiT-Tiny that is the teacher too: minutes on one GPU."""
    return RunConfig(
        agent=AgentConfig.of_size("tiny", 10, actor_width=512),
        data=DataConfig(
            "imagenette", resize_size=None, augment=AugmentConfig(num_ops=0, crop_scale=(0.25, 1.0))
        ),
        training=_in_minutes(epochs=54, base_lr=2e-5, tau_epochs=27),
        init="hub:facebook/deit-tiny-patch16-224",
        teacher="hub:facebook/deit-tiny-patch16-224",
        class_indices=_IMAGENETTE_ROWS,
    )


def aid() -> RunConfig:
    """AID aerial scenes, 30 classes, from a DeiT-Tiny; its teacher is fine-tuned first."""
    base = imagenette()
    return dataclasses.replace(
        base,
        agent=dataclasses.replace(base.agent, num_classes=30),
        data=DataConfig(
            "aid",
            resize_size=None,
            augment=AugmentConfig(num_ops=0, vertical_flip=0.5, crop_scale=(0.2, 1.0)),
        ),
        training=_in_minutes(epochs=62, base_lr=7e-5, tau_epochs=31),
        teacher_training=_short_teacher(batch_size=256, base_lr=5e-4, warmup_epochs=2, validate_every=10),
        teacher=None,
        class_indices=None,
    )


def _longer(base: RunConfig, epochs: int, base_lr: float, crops_from: float) -> RunConfig:
    """More epochs than a recipe has, with what keeps small datasets from being learned by heart."""
    augment = dataclasses.replace(base.data.augment, crop_scale=(crops_from, 1.0))
    return dataclasses.replace(
        base,
        agent=dataclasses.replace(base.agent, drop_path=0.2),
        data=dataclasses.replace(base.data, augment=augment),
        training=dataclasses.replace(base.training, epochs=epochs, tau_epochs=epochs // 2, base_lr=base_lr),
    )


def vary(
    base: RunConfig, policy: str = "learned", consistency: str = "soft", epochs: int | None = None
) -> RunConfig:
    """Returns a recipe with another policy, consistency or length, and all else alike."""
    training = dataclasses.replace(base.training, consistency=consistency)
    if consistency == "none":  # nothing of the teacher's
        training = dataclasses.replace(training, feature_weight=0.0)
    if epochs is not None:
        training = dataclasses.replace(training, epochs=epochs)
    return dataclasses.replace(base, agent=dataclasses.replace(base.agent, policy=policy), training=training)


def _variants(name: str, base: Recipe) -> dict[str, Recipe]:
    """Returns a recipe with every policy and consistency the paper compares."""
    found: dict[str, Recipe] = {name: base}
    for consistency in ("hard", "none"):
        found[f"{name}-{_CONSISTENCY_NAMES[consistency]}"] = partial(_varied, base, "learned", consistency)
    for policy in ("random", "plus", "spiral"):
        found[f"{name}-{policy}"] = partial(_varied, base, policy, "soft")
        found[f"{name}-{policy}-{_CONSISTENCY_NAMES['none']}"] = partial(_varied, base, policy, "none")
    return found


def _varied(base: Recipe, policy: str, consistency: str) -> RunConfig:
    return vary(base(), policy, consistency)


def _all() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {size: partial(own_images, size) for size in CORE_SIZES}
    for name, recipe in (("digits", digits), ("imagenette", imagenette), ("aid", aid)):
        found |= _variants(name, recipe)
    found["digits-paper"] = digits_paper
    found["imagenette-long"] = lambda: _longer(imagenette(), epochs=90, base_lr=2e-5, crops_from=0.15)
    found["aid-long"] = lambda: _longer(aid(), epochs=124, base_lr=4e-5, crops_from=0.1)
    for dataset, paper in (("imagenet", imagenet), ("fmow", fmow)):
        found |= _variants(f"{dataset}-small", paper)
        found |= {f"{dataset}-{size}": partial(paper, size) for size in ("tiny", "base")}
        found |= {f"{dataset}-small-glimpse{side}": partial(paper, "small", side) for side in (48, 64)}
    found["imagenet-small-400-epochs"] = lambda: vary(imagenet(), epochs=400)
    found["fmow-small-200-epochs"] = lambda: vary(fmow(), epochs=200)
    return found


RECIPES: dict[str, Recipe] = _all()


def get_recipe(name: str) -> RunConfig:
    """Returns a recipe's configuration; an unknown name names the nearest."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else "stam train --help lists them"
        raise ConfigError(f"unknown recipe '{name}': {hint}")
    return RECIPES[name]()
