"""Settings for somebody's own images, chosen by the images and the machine.

What is chosen follows from trials on subsets of aerial and other photographs (experiments/subsets.py). A run
shows `episodes` images in all, each of them as many times as there are epochs.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from stam.learning import distributed
from stam.learning.expected_time import FORWARD_SHARE
from stam.learning.gains import ROWS_OF_UPDATE
from stam.learning.loop import Plan
from stam.learning.survey import Survey
from stam.learning.training import glimpses_of_batch
from stam.settings import RunConfig, TrainingConfig
from stam.weights.locate import NOTHING


@dataclass(frozen=True)
class _Pace:
    """How a core is trained.

    Attributes:
        epochs: Times each of 8,000 images is shown.
        batches: Least number of batches; they are made smaller for it.
        rates: Learning rate at batch 600 where the images are unlike those the core was trained on, and where
            its features tell the classes apart as they are.
        hasty_rates: The same in little time.
        gentle_rates: The same at any batch, where each image is shown more often than it should be.
        actor_rate: Learning rate of the actor at batch 600.
        critic_rate: The same of the critic.
        drop_path: Drop-path rate where each image is shown as often as it should be.
        crops_from: Smallest crop there, as a share of the image.
    """

    epochs: float
    batches: int
    rates: tuple[float, float]
    hasty_rates: tuple[float, float]
    gentle_rates: tuple[float, float]
    actor_rate: float
    critic_rate: float
    drop_path: float
    crops_from: float


_PACES = {
    "reencoding": _Pace(
        epochs=62,
        batches=180,
        rates=(7e-5, 2e-5),
        hasty_rates=(7e-5, 2e-5),
        gentle_rates=(4e-5, 2.5e-5),
        actor_rate=4e-4,
        critic_rate=1e-3,
        drop_path=0.1,
        crops_from=0.2,
    ),
    # all steps are learned from alike, and each image is shown four times as often
    "causal": _Pace(
        epochs=240,
        batches=2500,
        rates=(2e-4, 1.5e-4),
        hasty_rates=(4e-4, 2e-4),
        gentle_rates=(2e-4, 1.5e-4),
        actor_rate=8.7e-3,
        critic_rate=1.7e-3,
        drop_path=0.2,
        crops_from=0.15,
    ),
}
_FROM_NOTHING = 3e-4  # learning rate of a core that starts at random
_ACTOR_EPOCHS = 1 / 6  # in which the actor learns alone from gains, as a share of those of a core
_GAINS_RATE = 1e-3  # of an actor that learns from gains: all its updates are by as many scenes
_USES_OF_GAINS = 8  # updates of the actor that each scene takes part in: with more they are learned by heart
_MOST_EFFORT, _MOST_EFFORT_OF_CORES = 2.0, 3.0  # more time has not helped; with several cores, more than that

_FULL_SIZE = 8000  # images; of more, each is shown less often
_LEAST_EPISODES = 36_000
_OFTEN = 1.2  # times the usual number of epochs, from where on images are learned by heart
_SMALLEST_BATCH = 32  # smaller ones take longer for each image
_RATED_BATCH = 600  # images of the largest batch, which learning rates are given for
_TEACHER_EPOCHS, _TEACHER_UPDATES, _TEACHER_BATCH = 20, 500, 256
_TEACHER_RATES = 5e-4, 4e-5  # at that batch, as those of a pace
_PROBE_RATE = 1e-2  # of a classifier whose features stay
_MOST_FITTED = 20_000  # images that a linear classifier is fitted to
_LEAST_PASSES = 1.5  # over the images; in less time features do not become better than they were
_AVERAGED = 0.18  # of the batches
_WELL_KNOWN, _UNKNOWN = 0.94, 0.85  # accuracy of a linear classifier on the features a core starts with


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        config: The whole experiment.
        reasons: What was chosen and why, for a person to read, one line each.
    """

    config: RunConfig
    reasons: tuple[str, ...]


def choose(
    config: RunConfig,
    survey: Survey,
    effort: float = 1.0,
    teacher_effort: float = 1.0,
    feature_weight: float = 2.0,
) -> Choice:
    """Chooses how to train on images.

    Args:
        config: The recipe; what is not chosen here stays as it says.
        survey: What the images are like.
        effort: Time of the training: 1 as long as it pays, less where time is short, up to `most_effort`.
        teacher_effort: The same for the teacher, at most 1.
        feature_weight: Weight of following the teacher's features, 0 where that has none of this width.
    """
    pace = _PACES[config.agent.core]
    cores, for_actor = (max(1, round(effort)), _ACTOR_EPOCHS) if config.uses_gains else (1, 0.0)
    each = effort / cores
    whole = each > 0.5
    shown_share = each if whole else each * _cost_of_short_episodes(config)
    batch, core_epochs, share = _amount(survey.num_images, config.agent.core, shown_share)
    epochs = max(1, round((cores + for_actor) * core_epochs))
    num_batches = Plan(survey.num_images, core_epochs, batch, share, seed=0).num_batches()
    shown = each * episodes(survey.num_images, config.agent.core) / survey.num_images
    often = shown > _OFTEN * pace.epochs
    scale = _scale(batch)
    known, why_rate = _known(survey), _why_rate(config, survey)
    if config.init == NOTHING:
        base_lr = _FROM_NOTHING * scale
    elif often:
        base_lr = _between(pace.gentle_rates, known)
    else:
        base_lr = _between(pace.rates if whole else pace.hasty_rates, known) * scale
    training = dataclasses.replace(
        config.training,
        epochs=epochs,
        epoch_share=share,
        batch_size=batch,
        core_fraction=cores / (cores + for_actor) if config.uses_gains else 0.0,
        num_cores=cores,
        base_lr=base_lr,
        actor_lr=_GAINS_RATE if config.uses_gains else pace.actor_rate * scale,
        actor_steps=max(1, round(_USES_OF_GAINS * batch / ROWS_OF_UPDATE)),
        critic_lr=pace.critic_rate * scale,
        tau_epochs=max(1, epochs // 2),
        ema_batches=max(2, round(_AVERAGED * num_batches)),
        feature_weight=feature_weight,
        validate_every=max(1, math.ceil(epochs / (8 if whole else 2))),
        validation_images=config.training.validation_images if whole else 200,
        short_episodes=config.training.short_episodes if whole else 0,
    )
    flips = 0.5 if survey.has_no_up else 0.0
    crops_from = 0.1 if often else (pace.crops_from if whole else 0.2)
    augment = dataclasses.replace(config.data.augment, vertical_flip=flips, crop_scale=(crops_from, 1.0))
    drop_path = 0.2 if often else (pace.drop_path if whole else 0.1)
    agent = dataclasses.replace(config.agent, drop_path=drop_path)
    teacher, how_taught = _teacher(config, survey, teacher_effort)
    chosen = dataclasses.replace(
        config,
        agent=agent,
        data=dataclasses.replace(config.data, augment=augment, resize_size=min(config.agent.grid.image_size)),
        training=training,
        teacher_training=dataclasses.replace(config.teacher_training, **teacher),
        start_from_teacher=feature_weight > 0,
    )
    length = f"{epochs} epoch{'' if epochs == 1 else 's'}"
    length += "" if share == 1 else f" of {100 * share:.2g}% of the images"
    reasons = [
        f"{length}, batch {batch}: for {survey.num_images:,} images" + _why_effort(effort, often),
        f"learning rate {training.base_lr:.1e}: {why_rate}",
        _why_flips(survey),
    ]
    if config.uses_gains:
        reasons.append(_how_in_stages(training))
    if config.teacher is None:
        start = "; the agent starts from it and follows its features" if feature_weight > 0 else ""
        reasons.append(f"teacher: {how_taught}{start}")
    elif survey.named is not None and (config.teacher, config.class_indices) == (config.init, survey.rows):
        reasons.append(
            f"teacher: the starting weights, which name {100 * survey.named:.0f}% of the images rightly"
        )
    elif feature_weight == 0:
        reasons.append("the teacher's features are not followed: they are not as wide as the agent's")
    return Choice(chosen, tuple(reasons))


def most_effort(config: RunConfig) -> float:
    """Returns the most effort with which an agent may become better; several cores can be averaged."""
    return _MOST_EFFORT_OF_CORES if config.uses_gains else _MOST_EFFORT


def episodes(num_images: int, core: str) -> int:
    """Returns how many images an agent is shown in all, counted each time, for its best accuracy."""
    pace = _PACES[core]
    each = pace.epochs * min(1.0, math.sqrt(_FULL_SIZE / num_images))
    return max(round(each * num_images), _LEAST_EPISODES)


def teacher_images(num_images: int) -> int:
    """Returns the same for a teacher."""
    return round(num_images * min(3 * _TEACHER_EPOCHS, _TEACHER_EPOCHS * math.sqrt(_FULL_SIZE / num_images)))


def _cost_of_short_episodes(config: RunConfig) -> float:
    """Returns the cost of a batch with short episodes, relative to one without them."""
    core, without = config.agent.core, dataclasses.replace(config.training, short_episodes=0)
    return glimpses_of_batch(config.training, core) / glimpses_of_batch(without, core)


def _amount(num_images: int, core: str, times: float) -> tuple[int, int, float]:
    """Returns batch, epochs, and the share of the images an epoch shows.

    Args:
        num_images: Images of the training part.
        core: Kind of core.
        times: Times that the best number of episodes is shown.
    """
    total = episodes(num_images, core) * times
    wanted = max(_SMALLEST_BATCH, total / _PACES[core].batches)
    batch = _round_down(min(_RATED_BATCH, wanted, num_images / 2))
    return batch, *_epochs_and_share(total, num_images, batch, least_epochs=40)


def _epochs_and_share(total: float, num_images: int, batch: int, least_epochs: int) -> tuple[int, float]:
    """Returns epochs, and the share of the images each shows, that show so many images in all.

    Learning rates go by epochs: a few tens of them make the schedule smooth, though each shows few images.
    """
    num_batches = max(1, round(total / batch))
    whole = max(1, num_images // batch)  # the batches of all images
    each = min(whole, max(1, num_batches // least_epochs))
    share = 1.0 if each == whole else (each * batch + 0.5) / num_images  # half an image against rounding
    return max(1, round(num_batches / each)), share


def _teacher(config: RunConfig, survey: Survey, effort: float) -> tuple[dict[str, Any], str]:
    num_images, known = survey.num_images, _known(survey)
    total = teacher_images(num_images) * min(effort, 1.0)
    is_deit = config.teacher_training.model == "deit"
    is_short = total < _LEAST_PASSES * num_images and config.init != NOTHING
    if is_short:
        total /= FORWARD_SHARE  # so many more images can be shown in the same time
    fits = is_deit and effort < 1 and config.init != NOTHING and distributed.world_size() == 1
    if fits and (is_short or known == 1):
        return _fitted_teacher(num_images, min(total, num_images, _MOST_FITTED))
    named = "a DeiT" if is_deit else config.teacher_training.model
    batch = _round_down(min(_TEACHER_BATCH, max(_SMALLEST_BATCH / 2, total / _TEACHER_UPDATES), num_images))
    scale = math.sqrt(_TEACHER_BATCH / batch)
    if fits:
        epochs, share = _epochs_after_fitting(total, num_images, batch)
        learning = f"{epochs - 1} epoch{'s' if epochs > 2 else ''}"
        learning += "" if share == 1 else f" of {100 * share:.2g}% of the images"
        how = f"{named} fine-tuned for {learning}, after a classifier is fitted to its features"
    else:
        epochs, share = _epochs_and_share(total, num_images, batch, least_epochs=10)
        gently = ", gently" if known > 0.5 else ""
        how = f"{named} fine-tuned first{gently}, {total / num_images:.2g} passes over the images"
    settings = {
        "epochs": epochs,
        "epoch_share": share,
        "batch_size": batch,
        "base_lr": scale * _between(_TEACHER_RATES, known),
        "head_lr": scale * _TEACHER_RATES[0],
        "fit_classifier": fits,
        "warmup_epochs": 0 if fits else 1,  # its first epoch is over before the features change
        "validate_every": max(1, math.ceil(epochs / 4)),
    }
    if is_short or known == 1:  # fine-tuning made features worse that told the classes apart well
        settings |= {"base_lr": 0.0, "head_lr": scale * _PROBE_RATE, "drop_path": 0.0}
        why = "in little time" if is_short else "they tell the classes apart"
        shown = f"{total / num_images:.2g} passes over the images"
        how = f"the classifier of {named} learns, its features stay as they are: {shown}, {why}"
    return settings, how


def _epochs_after_fitting(total: float, num_images: int, batch: int) -> tuple[int, float]:
    """Returns epochs, and the share of the images each shows, where the first only fits a classifier.

    A classifier needs one look at each image, so an epoch is not as small as elsewhere.
    """
    shown = min(num_images, _MOST_FITTED)
    share = 1.0 if shown == num_images else (shown // batch * batch + 0.5) / num_images
    return 1 + max(1, int(total / shown - FORWARD_SHARE)), share


def _fitted_teacher(num_images: int, total: float) -> tuple[dict[str, Any], str]:
    """Returns a teacher for little time: a linear classifier of the features of images that it sees once."""
    batch = _round_down(min(_SMALLEST_BATCH, num_images))
    epochs, share = _epochs_and_share(total, num_images, batch, least_epochs=1)
    settings = {
        "epochs": epochs,
        "epoch_share": share,
        "batch_size": batch,
        "base_lr": 0.0,
        "fit_classifier": True,
        "drop_path": 0.0,
        "validate_every": epochs,
    }
    seen = "all images" if share == 1 else f"{100 * share:.2g}% of the images"
    return settings, f"a linear classifier of a DeiT's features, fitted to {seen}"


def _round_down(batch: float) -> int:
    """Returns a batch that kernels like, a multiple of 8, or of 2 where it is small, and processes share."""
    processes = distributed.world_size()
    unit = math.lcm(8, processes)
    if batch < 4 * unit:
        unit = math.lcm(2, processes)
    return max(unit, int(batch) // unit * unit)


def _why_rate(config: RunConfig, survey: Survey) -> str:
    if survey.separable is not None:
        return f"the features it starts with tell the classes apart in {100 * survey.separable:.0f}% of cases"
    return "the core starts from nothing" if config.init == NOTHING else "too many classes to tell more"


def _between(rates: tuple[float, float], known: float) -> float:
    """Returns a learning rate for features that tell the classes apart so well, from 0 to 1."""
    return rates[0] ** (1 - known) * rates[1] ** known


def _scale(batch: int) -> float:
    """Returns the factor of a learning rate at another batch than it is given for.

    Settings make learning rates proportional to the batch; AdamW wants them to go with its square root.
    """
    return math.sqrt(_RATED_BATCH / batch)


def _known(survey: Survey) -> float:
    """Returns from 0 to 1 how well the features that a core starts with tell the classes apart."""
    if survey.separable is None:
        return 0.0
    return min(1.0, max(0.0, (survey.separable - _UNKNOWN) / (_WELL_KNOWN - _UNKNOWN)))


def _why_effort(effort: float, often: bool) -> str:
    if effort > 1.2:
        why = f" and {effort:.1f} times the usual time"
    else:
        why = f" in {100 * effort:.2g}% of the time for full accuracy" if effort < 0.9 else ""
    return f"{why}; each is shown often, so with more drop-path and smaller crops" if often else why


def _how_in_stages(training: TrainingConfig) -> str:
    actor = sum(stage.num_epochs for stage in training.stages if stage.learns == "actor")
    if not actor:
        return "core and actor learn together: there is one epoch"
    several = f"{training.num_cores} cores, whose weights are averaged,"
    cores = several if training.num_cores > 1 else "the core"
    return f"first {cores} for {training.core_epochs} epochs, then the actor for {actor}"


def _why_flips(survey: Survey) -> str:
    if survey.upside_down is None:
        return "no vertical flips: nothing is known of the images"
    said = f"upside-down images are told from upright ones in {100 * survey.upside_down:.0f}% of cases"
    return f"{'vertical flips' if survey.has_no_up else 'no vertical flips'}: {said}"
