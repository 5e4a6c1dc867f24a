"""Settings for own images follow from the images and the machine, and fit into the time there is."""

import dataclasses
import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from images import make_image_folder

import stam
from stam.config import AgentConfig
from stam.data import open_scenes
from stam.data.loader import BatchLoader, EvaluationView
from stam.errors import StamError
from stam.learning import distributed, fitting
from stam.learning import expected_time as expecting
from stam.learning.choosing import Choice, choose, most_effort
from stam.learning.expected_time import Cost, Speed, expected_time
from stam.learning.experiment import fitting_batch
from stam.learning.finetuning import TeacherLearner
from stam.learning.fitting import fit, with_core, with_fast_precision
from stam.learning.linear import fit_linear
from stam.learning.loop import Plan
from stam.learning.recipes import get_recipe
from stam.learning.survey import Survey, _accuracy, find_rows, look_at
from stam.learning.timing import bf16_speedup
from stam.learning.training import glimpses_of_batch, plan
from stam.model.vit import VisionTransformer
from stam.scene.pixels import normalise
from stam.settings import AugmentConfig, DataConfig, RunConfig
from stam.weights import save_agent

MOST = most_effort(get_recipe("tiny"))


def survey(num_images: int, upside_down: float = 0.9, separable: float = 0.6) -> Survey:
    return Survey(num_images, 10, upside_down, separable)


def causal(**training) -> RunConfig:
    base = with_core(get_recipe("tiny"), "causal")
    return dataclasses.replace(base, training=dataclasses.replace(base.training, **training))


def test_batches_are_smaller_where_there_are_few():
    efforts = (causal(), 1), (causal(), 0.1), (causal(), 0.01), (get_recipe("tiny"), 1)
    assert [
        choose(config, survey(8000), effort).config.training.batch_size for config, effort in efforts
    ] == [
        600,
        120,
        32,
        600,
    ]


@pytest.mark.parametrize(("effort", "num_cores"), [(0.01, 1), (1.0, 1), (1.6, 2), (3.0, 3)])
def test_cores_learn_one_after_another_before_the_actor(effort, num_cores):
    training = choose(causal(), survey(8000), effort).config.training
    lengths = [stage.end - stage.begin for stage in training.stages]
    assert [stage.learns for stage in training.stages] == ["core"] * num_cores + ["actor"]
    assert lengths[-1] == pytest.approx(lengths[0] / 6, abs=1)
    other = choose(causal(actor_objective="actor-critic"), survey(8000), effort).config.training
    assert [stage.learns for stage in other.stages] == ["both"]


def test_an_actor_that_learns_from_gains_has_one_rate_whatever_the_batch():
    """Its updates are by as many scenes."""
    efforts = 0.01, 0.1, 1.0
    assert len({choose(causal(), survey(8000), effort).config.training.actor_lr for effort in efforts}) == 1


@pytest.mark.parametrize("core", ["reencoding", "causal"])
@pytest.mark.parametrize("num_images", [3, 20, 270, 900, 8000, 100_000, 1_300_000])
@pytest.mark.parametrize("effort", [0.001, 0.1, 1.0, MOST])
def test_whatever_the_number_of_images_there_are_batches_for_it(core, num_images, effort):
    base = get_recipe("tiny")
    base = dataclasses.replace(base, agent=dataclasses.replace(base.agent, core=core))
    config = choose(base, survey(num_images), effort).config
    training, teacher = config.training, config.teacher_training
    assert 2 <= training.batch_size <= min(600, num_images)
    assert plan(num_images, config).num_batches() >= 1
    shown = plan(num_images, config).num_batches() * training.batch_size
    assert training.ema_batches < max(3, 0.5 * plan(num_images, config).num_batches())
    Plan(num_images, teacher.epochs, teacher.batch_size, teacher.epoch_share, 0).num_batches()
    if num_images >= 270 and effort >= 0.1:
        wanted = max(base.training.epochs * min(num_images, 8000) * effort, 1)
        assert shown > 0.3 * wanted  # more than for 8,000 images, or for a core that needs more


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("num_images", [60, 900, 8000, 1_300_000])
def test_any_number_of_processes_can_share_the_batches(monkeypatch, num_processes, num_images):
    alone = choose(get_recipe("tiny"), survey(num_images)).config
    monkeypatch.setattr(distributed, "world_size", lambda: num_processes)
    config = choose(get_recipe("tiny"), survey(num_images)).config
    for chosen, usual in (
        (config.training.batch_size, alone.training.batch_size),
        (config.teacher_training.batch_size, alone.teacher_training.batch_size),
    ):
        assert fitting_batch(num_images, chosen, "--batch-size") == chosen
        assert chosen % num_processes == 0 and chosen > 0.6 * usual
    assert plan(num_images, config).num_batches() >= 1


def test_more_effort_shows_more_images_and_drops_more():
    shown = []
    for effort in (0.05, 0.3, 1.0, MOST):
        config = choose(get_recipe("tiny"), survey(3000), effort).config
        shown.append(plan(3000, config).num_batches() * config.training.batch_size)
    assert shown == sorted(shown) and shown[-1] == pytest.approx(MOST * shown[-2], rel=0.05)
    assert config.agent.drop_path == 0.2 and config.data.augment.crop_scale[0] == 0.1


def test_few_images_are_shown_often_and_changed_more():
    few, enough = (choose(get_recipe("tiny"), survey(num_images)) for num_images in (270, 900))
    assert few.config.agent.drop_path > enough.config.agent.drop_path
    assert few.config.data.augment.crop_scale[0] < enough.config.data.augment.crop_scale[0]
    assert "each is shown often" in few.reasons[0] and "often" not in enough.reasons[0]


@pytest.mark.parametrize("num_images", [150, 344, 3000, 50_000])
def test_a_little_more_effort_is_a_little_more_training(num_images):
    base = get_recipe("tiny")
    base = dataclasses.replace(base, agent=dataclasses.replace(base.agent, core="causal"))
    efforts = [0.02 * 1.05**step for step in range(100)]
    configs = [choose(base, survey(num_images), effort).config for effort in efforts]
    shown = [
        plan(num_images, config).num_batches()
        * config.training.batch_size
        * glimpses_of_batch(config.training, "causal")
        for config in configs
    ]
    assert all(0.95 < later / earlier < 1.12 for earlier, later in pairwise(shown))


def test_a_causal_core_learns_slower_and_from_short_episodes_where_there_is_time():
    base = get_recipe("tiny")
    base = dataclasses.replace(base, agent=dataclasses.replace(base.agent, core="causal"))
    whole, hasty = (choose(base, survey(8000), effort).config.training for effort in (1.0, 0.1))
    assert (whole.short_episodes, hasty.short_episodes) == (base.training.short_episodes, 0)
    slow, fast = (each.learning_rate(each.base_lr, 0) / each.batch_size**0.5 for each in (whole, hasty))
    assert slow < fast


@pytest.mark.parametrize("core", ["reencoding", "causal"])
def test_shorter_episodes_are_expected_to_take_less(core):
    base = get_recipe("tiny")
    base = dataclasses.replace(base, agent=dataclasses.replace(base.agent, core=core))
    config = choose(base, survey(8000)).config
    timed = glimpses_of_batch(config.training, core)
    speed = Speed(Cost(5.0, 0.1, 0.01), None, 0.0, timed)
    without = dataclasses.replace(
        config, training=dataclasses.replace(config.training, short_episodes=0, num_glimpses=12)
    )
    long, short = (expected_time(each, speed, 8000, 0).agent - 5.0 for each in (config, without))
    assert timed == {"causal": 21 + 3 * 4, "reencoding": 231 + 3 * 10}[core]
    assert short / long == pytest.approx({"causal": 12, "reencoding": 78}[core] / timed)


def test_flips_and_rates_follow_from_the_survey():
    base = get_recipe("tiny")
    aerial = choose(base, survey(8000, upside_down=0.53, separable=0.6))
    assert aerial.config.data.augment.vertical_flip == 0.5
    assert aerial.config.training.base_lr == pytest.approx(7e-5)
    objects = choose(base, survey(8000, upside_down=0.8, separable=0.98))
    assert objects.config.data.augment.vertical_flip == 0
    assert objects.config.training.base_lr == pytest.approx(2e-5)
    assert any("98%" in reason for reason in objects.reasons)
    unlike = choose(base, survey(8000), feature_weight=0.0).config  # a teacher of another width
    assert unlike.training.feature_weight == 0 and not unlike.start_from_teacher


def test_a_linear_classifier_tells_what_can_be_told():
    random = np.random.default_rng(0)
    labels = random.permutation(np.tile([0, 1], 60))
    noise = random.normal(size=(1, 120, 8))
    assert 0.3 < _accuracy(noise, labels[None]) < 0.7
    noise[0, :, 0] += 4 * labels
    assert _accuracy(noise, labels[None]) > 0.9
    assert _accuracy(noise, np.zeros((1, 120), dtype=int)) is None


@pytest.fixture
def small(tmp_path) -> RunConfig:
    """Own images at toy size: an agent to start from, twenty images of each of three classes."""
    agent = AgentConfig(
        2, 32, 16, 8, width=16, depth=2, num_heads=2, actor_width=8, critic_width=8, drop_path=0.0
    )
    torch.manual_seed(0)
    save_agent(stam.Agent(agent), tmp_path / "start")
    base = get_recipe("tiny")
    return dataclasses.replace(
        base,
        agent=agent,
        init=str(tmp_path / "start"),
        data=DataConfig(
            str(make_image_folder(tmp_path / "images")), num_workers=0, augment=AugmentConfig(num_ops=0)
        ),
        training=dataclasses.replace(base.training, num_glimpses=3, device="cpu"),
        teacher_training=dataclasses.replace(base.teacher_training, device="cpu"),
    )


def test_a_survey_sees_which_way_is_up(small, tmp_path):
    scenes = open_scenes(small.data.path).train
    agent = stam.load(tmp_path / "start")
    found = look_at(scenes, agent, small.data, torch.device("cpu"))
    assert found.num_images == len(scenes) and found.num_classes == 3
    assert 0 <= found.upside_down <= 1 and (found.separable is None or 0 <= found.separable <= 1)


def test_the_time_is_used(small, monkeypatch):
    glimpses = glimpses_of_batch(choose(small, survey(20)).config.training, small.agent.core)
    speed = Speed(Cost(1.0, 0.01, 0.001), Cost(0.5, 0.0, 0.0005), 0.001, glimpses)
    monkeypatch.setattr(fitting, "measure", lambda *_: speed)
    monkeypatch.setattr(fitting, "time", SimpleNamespace(monotonic=lambda: 0.0))  # looking takes no time
    for minutes in (0.2, 0.5):
        fitted = fit(small, minutes)
        expected = fitted.expected(fitted.choice.config).total
        assert 0.8 * 60 * minutes < expected < 60 * minutes, minutes
    assert "takes less" in fit(small, 600).note
    with pytest.raises(StamError, match=r"too short: .* give it --minutes \d+ or more"):
        fit(small, 0.001)
    slow = Speed(Cost(0.0, 0.0, 10.0), Cost(0.0, 0.0, 0.01), 0.001, glimpses)
    monkeypatch.setattr(fitting, "measure", lambda *_: slow)
    assert not fit(small, 500).note
    note = fit(small, 3).note
    enough = int(re.search(r"too little time for a good agent: give it --minutes (\d+) or more", note)[1])
    assert not fit(small, enough).note and "too little" in fit(small, 0.8 * enough).note


@pytest.mark.parametrize(("taken", "batches"), [(0.01, 6), (4.0, 2)])
def test_slow_batches_are_timed_once(small, monkeypatch, taken, batches):
    learned = []

    def seconds(learn, device):
        learned.append(learn)
        return taken

    monkeypatch.setattr(expecting, "seconds", seconds)
    scenes = open_scenes(small.data.path).train
    cost = expecting._time(lambda batch: None, small, scenes, 12, torch.device("cpu"))
    assert len(learned) == batches and cost.image > 0


def test_one_epoch_is_called_that(small):
    reasons = choose(small, survey(20), effort=1e-4).reasons
    assert reasons[0].startswith("1 epoch of ") or reasons[0].startswith("1 epoch,")


def test_the_speed_is_measured(small):
    fitted = fit(small, 0.5)
    assert fitted.speed.agent.image > 0 and fitted.speed.look > 0
    assert fitted.speed.teacher is not None
    assert fitted.expected(fitted.choice.config).teacher > 0
    assert fitted.choice.config.start_from_teacher and len(fitted.splits.train.classes) == 3


def test_a_teacher_is_timed_while_all_of_it_learns(small, monkeypatch):
    """Also where only its classifier will: expected times take a share of the whole then."""
    timed = []

    def noting(how, *rest):
        learner = TeacherLearner(how, *rest)
        timed.append(
            {name for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
        )
        return learner

    monkeypatch.setattr(expecting, "TeacherLearner", noting)
    monkeypatch.setattr(fitting, "look_at", lambda *_: survey(18, separable=0.99))
    fitted = fit(small, 0.5)
    assert fitted.choice.config.teacher_training.base_lr == 0
    assert timed and all(any(name.startswith("blocks") for name in names) for names in timed)


def test_each_stage_of_a_training_costs_what_was_measured_of_it(small):
    """Short episodes are for the core alone."""
    given = {"core_fraction": 0.75, "short_episodes": 3, "short_episode_glimpses": 2, "num_glimpses": 4}
    given |= {"epochs": 8, "batch_size": 10, "epoch_share": 1.0, "actor_objective": "gains", "actor_steps": 8}
    config = dataclasses.replace(
        small,
        agent=dataclasses.replace(small.agent, core="causal"),
        training=dataclasses.replace(small.training, **given),
    )
    speed = Speed(Cost(5.0, 0.1, 0.01), None, 0.0, glimpses=5, actor=Cost(7.0, 1.5, 0.1), actor_steps=12)
    core = 12 * (0.1 + 0.01 * 10) * (4 + 3 * 2) / 5  # two batches an epoch
    actor = 4 * (1.0 + 0.1 * 10)
    assert speed.of_epochs(config, 20, 0) == pytest.approx(core + actor)
    assert speed.of_epochs(config, 20, 6) == pytest.approx(actor)
    assert speed.of_agent(config, 20) == pytest.approx(core + actor + 12)
    given["core_fraction"] = 0.0
    together = dataclasses.replace(config, training=dataclasses.replace(small.training, **given))
    assert speed.of_epochs(together, 20, 0) == pytest.approx(core * 8 / 6 + actor * 8 / 2)


def test_a_given_teacher_costs_nothing(small):
    config = choose(small, survey(20)).config
    glimpses = glimpses_of_batch(config.training, config.agent.core)
    time = expected_time(config, Speed(Cost(0, 0.1, 0.01), None, 0.0, glimpses), 20, 2)
    assert time.teacher == 0
    batches = plan(20, config).num_batches()
    assert time.agent == pytest.approx(batches * (0.1 + 0.01 * config.training.batch_size))


def fit_in(seconds: float, monkeypatch, images, look: float = 0.0) -> fitting.Fit:
    """A fit with so many seconds left, at a second an image; looking at a validation image takes `look`."""
    monkeypatch.setattr(fitting.time, "monotonic", lambda: 1000.0)
    choice = choose(get_recipe("tiny"), survey(len(images.train)))
    glimpses = glimpses_of_batch(choice.config.training, "reencoding")
    speed = Speed(Cost(0.0, 0.0, 1.0), None, look, glimpses)
    return fitting.Fit(choice, speed, images, "", 1000.0 + seconds, most_epochs=100)


@pytest.fixture
def images(tmp_path):
    return open_scenes(str(make_image_folder(tmp_path / "images")))


def test_epochs_follow_the_speed_of_the_first_ones(monkeypatch, images):
    fitted = fit_in(100.0, monkeypatch, images)
    epochs = fitted.fit_to_time(fitted.choice.config)
    assert epochs(3, 4.0) == 3 + 25
    assert epochs(3, 2.0) == 3 + 50
    assert epochs(3, 0.1) == 100, "more has not helped"
    assert epochs(3, 400.0) == 4, "one more: the last epoch is validated and saved"


def test_validations_are_as_slow_as_epochs(monkeypatch, images):
    num_images = len(images.train)
    fitted = fit_in(60.0 * num_images, monkeypatch, images, look=num_images / len(images.val))
    config = fitted.choice.config
    training = dataclasses.replace(
        config.training,
        epochs=32,
        batch_size=num_images,
        epoch_share=1.0,
        validate_every=10,
        choose_policy=False,
    )
    config = dataclasses.replace(config, training=training)
    fitted = dataclasses.replace(fitted, choice=Choice(config, ()))
    # an epoch was expected to take as long as a validation; both take twice that
    assert fitted.fit_to_time(config)(3, 2.0 * num_images) == 3 + 27
    training = dataclasses.replace(training, choose_policy=True)
    choosing = dataclasses.replace(config, training=training)
    assert fitted.fit_to_time(choosing)(3, 2.0 * num_images) == 3 + 6, (
        "three policies at the end, 8 times each"
    )


def test_epochs_that_somebody_wants_stay(monkeypatch, images):
    fitted = fit_in(100.0, monkeypatch, images)
    config = fitted.choice.config
    assert fitted.fit_to_time(config) is not None
    wanted = dataclasses.replace(config, training=config.training.with_epochs(8))
    assert fitted.fit_to_time(wanted) is None


def test_without_a_time_the_epochs_stay(monkeypatch, images):
    fitted = dataclasses.replace(fit_in(100.0, monkeypatch, images), deadline=None)
    assert fitted.fit_to_time(fitted.choice.config) is None


def test_features_that_know_the_classes_are_changed_gently_or_not_at_all():
    shares = 0.99, 0.92, 0.5
    known, half_known, unknown = (
        choose(get_recipe("tiny"), survey(8000, separable=share)).config for share in shares
    )
    assert known.training.base_lr < half_known.training.base_lr < unknown.training.base_lr
    assert known.training.base_lr < unknown.training.base_lr / 3
    usual, gentle, fixed = (each.teacher_training for each in (unknown, half_known, known))
    assert gentle.base_lr < usual.base_lr / 5 and usual.base_lr == usual.head_lr == gentle.head_lr
    assert fixed.base_lr == 0 and fixed.head_lr > usual.head_lr


def test_in_little_time_only_the_teachers_classifier_learns():
    images = survey(8000)
    efforts = 1.0, 0.05
    usual, short = (choose(get_recipe("tiny"), images, effort, effort).config for effort in efforts)
    assert usual.teacher_training.base_lr > 0
    how = short.teacher_training
    assert how.fit_classifier and how.base_lr == 0 and not usual.teacher_training.fit_classifier
    # every image is seen once: that takes a third of the time of learning from it
    speed = Speed(Cost(0.0, 0.0, 1.0), Cost(0.0, 0.0, 1.0), 0.0, glimpses=21)
    assert expected_time(short, speed, 8000, 0).teacher == pytest.approx(8000 / 3, rel=0.01)
    hurried = choose(get_recipe("tiny"), images, 0.01, 0.01)
    assert hurried.config.teacher_training.epochs == 1
    assert expected_time(hurried.config, speed, 8000, 0).teacher == pytest.approx(1600, rel=0.05)
    assert any("fitted to 60% of the images" in reason for reason in hurried.reasons)


def test_with_some_time_the_teachers_features_learn_after_a_classifier_is_fitted():
    choice = choose(get_recipe("tiny"), survey(8000), 0.2, 0.2)
    config, reasons = choice.config, choice.reasons
    how = config.teacher_training
    assert how.fit_classifier and how.base_lr > 0 and (how.epochs, how.epoch_share) == (4, 1.0)
    assert any("fine-tuned for 3 epochs, after a classifier is fitted" in reason for reason in reasons)
    speed = Speed(Cost(0.0, 0.0, 1.0), Cost(0.0, 0.0, 1.0), 0.0, glimpses=21)
    assert expected_time(config, speed, 8000, 0).teacher == pytest.approx(8000 * (3 + 1 / 3), rel=0.02)
    known = choose(get_recipe("tiny"), survey(8000, separable=0.98), 0.2, 0.2).config.teacher_training
    assert known.fit_classifier and known.base_lr == 0  # fine-tuning would make such features worse
    many = choose(get_recipe("tiny"), survey(100_000), 0.5, 0.5).config.teacher_training
    assert many.epochs > 2 and many.epoch_share == pytest.approx(0.2, rel=0.01)


def test_a_teacher_of_timm_or_of_several_processes_is_trained_in_little_time_too(monkeypatch):
    base = get_recipe("tiny")
    how = dataclasses.replace(base.teacher_training, model="timm:resnet18")
    training = dataclasses.replace(base.training, feature_weight=0.0)
    of_timm = dataclasses.replace(base, teacher_training=how, training=training, start_from_teacher=False)
    chosen = [choose(of_timm, survey(8000), 0.05, 0.05, feature_weight=0.0).config.teacher_training]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    chosen.append(choose(base, survey(8000), 0.05, 0.05).config.teacher_training)
    assert all(each.base_lr == 0 and each.head_lr > 1e-3 and not each.fit_classifier for each in chosen)


def test_rows_of_pretrained_classifiers_that_stand_for_classes_are_found():
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(9, 16, generator=random), torch.zeros(9)
    labels = torch.arange(60) % 3
    wanted = torch.tensor([7, 2, 5])
    noise = 0.3 * torch.randn(60, 16, generator=random)
    features = torch.cat([weight[wanted][labels] + noise] * 2, dim=1)  # of two classifiers, side by side
    both = [(weight, bias)] * 2
    assert find_rows(features, labels, 3, both) == ((7, 2, 5), 1.0)
    assert find_rows(features, labels, 3, []) is None
    assert find_rows(features[:5], labels[:5], 3, both) is None  # one class has a single image
    assert find_rows(features, labels, 4, both) is None  # one class has none
    same_row = torch.tensor([7, 7, 5])
    assert find_rows(torch.cat([weight[same_row][labels]] * 2, dim=1), labels, 3, both) is None
    unlike = torch.cat([torch.randn(60, 16, generator=random)] * 2, dim=1)
    _, named = find_rows(unlike, labels, 3, both) or ((), 0.0)
    assert named < 0.7


def test_pretrained_classifiers_are_taken_where_they_are_at_least_as_good_as_fitted_ones():
    assert Survey(900, 3, 0.9, 0.95, (1, 2, 3), 0.96).is_named
    assert not Survey(900, 3, 0.9, 0.99, (1, 2, 3), 0.96).is_named
    assert not Survey(900, 3, 0.9, 0.6, (1, 2, 3), 0.9).is_named
    assert not survey(900).is_named


@pytest.fixture
def named(small, tmp_path) -> RunConfig:
    """The same, from a DeiT that knows such images: rows 4, 1 and 5 of its six name the classes."""
    torch.manual_seed(0)
    vit = VisionTransformer(
        num_classes=6,
        patch_size=(8, 8),
        image_patches=(4, 4),
        width=16,
        depth=2,
        num_heads=2,
        distilled=False,
    ).eval()
    scenes = open_scenes(small.data.path).train
    view = EvaluationView((32, 32), 224)
    (raw,) = BatchLoader(scenes, [np.arange(len(scenes))], view)
    with torch.no_grad():
        features = vit(*vit.all_patches(normalise(raw.images))).flatten(1)
        weight, bias = fit_linear(features.numpy(), raw.labels.numpy(), 3, strength=100.0)
        vit.head.weight.zero_()
        vit.head.bias.fill_(-100.0)
        vit.head.weight[[4, 1, 5]], vit.head.bias[[4, 1, 5]] = map(torch.from_numpy, (weight, bias))
    torch.save(vit.state_dict(), tmp_path / "deit.pth")
    return dataclasses.replace(small, init=str(tmp_path / "deit.pth"))


def test_starting_weights_that_name_the_classes_are_the_teacher(named):
    fitted = fit(named, 0.5)
    config = fitted.choice.config
    assert (config.teacher, config.class_indices) == (named.init, (4, 1, 5))
    assert fitted.speed.teacher is None and fitted.expected(config).teacher == 0
    assert config.start_from_teacher and config.training.feature_weight > 0
    assert any("which name 100% of the images rightly" in reason for reason in fitted.choice.reasons)


def test_a_teacher_is_trained_where_that_is_wanted_or_the_classes_have_other_rows(named):
    assert fit(named, 0.5, may_skip_teacher=False).choice.config.teacher is None
    config = fit(dataclasses.replace(named, class_indices=(0, 1, 2)), 0.5).choice.config
    assert (config.teacher, config.class_indices) == (None, (0, 1, 2))


def test_a_cpu_that_is_faster_in_half_precision_trains_in_it(small, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(fitting, "bf16_speedup", lambda: 4.0)
    config, (why,) = with_fast_precision(small, cpu)
    assert config.training.precision == config.teacher_training.precision == "bfloat16"
    assert "4.0 times as fast" in why
    given = dataclasses.replace(small, training=dataclasses.replace(small.training, precision="float32"))
    for unchanged, device in ((given, cpu), (small, gpu)):
        assert with_fast_precision(unchanged, device) == (unchanged, ())
    monkeypatch.setattr(fitting, "bf16_speedup", lambda: 1.2)
    assert with_fast_precision(small, cpu) == (small, ())


def test_how_fast_half_precision_is_can_be_measured():
    num_threads = torch.get_num_threads()
    assert bf16_speedup() > 0
    assert torch.get_num_threads() == num_threads
