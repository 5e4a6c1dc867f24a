import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch
from images import make_image_folder

from stam.config import AgentConfig
from stam.data import open_scenes
from stam.data.mixing import erase, mix, smooth_targets
from stam.errors import ConfigError, Interrupted, StamError
from stam.learning.finetuning import FittedTeacherLearner, build_student, finetune, whole_image_accuracy
from stam.learning.linear import fit_linear
from stam.learning.runs import RunFolder
from stam.settings import DataConfig, TeacherConfig
from stam.weights import load_teacher_folder, package_folder, save_agent, start_agent


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_smoothed_targets_sum_to_one():
    targets = smooth_targets(torch.tensor([1, 0]), 4, 0.1)
    torch.testing.assert_close(targets.sum(1), torch.ones(2))
    assert targets[0].tolist() == pytest.approx([0.025, 0.925, 0.025, 0.025])


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_keeps_the_share_of_pixels_and_of_targets_alike(mixup, cutmix):
    images = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 16, 16)
    targets = torch.eye(2)
    for seed in range(20):
        mixed, shares = mix(images, targets, mixup, cutmix, random(seed))
        torch.testing.assert_close(mixed[0].mean(), shares[0, 1], atol=1e-5, rtol=0)
        torch.testing.assert_close(shares.sum(1), torch.ones(2))
    same, _ = mix(images, targets, 0.0, 0.0, random())
    assert same.equal(images)


def test_erasing_hits_the_share_asked_for_and_leaves_the_rest():
    images = torch.zeros(2000, 1, 12, 12)
    erased = erase(images, 0.25, random(), torch.Generator().manual_seed(0))
    touched = (erased != 0).flatten(1).float().mean(1)
    assert (touched > 0).float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert touched.max() <= 0.45
    assert erase(images, 0.0, random(), torch.Generator()).equal(images)


AGENT = AgentConfig(2, image_size=32, glimpse_size=16, patch_size=8, width=16, depth=1, num_heads=2)
DATA = DataConfig("x", resize_size=36, num_workers=0)


def test_a_teacher_learns_from_images(tmp_path):
    splits = open_scenes(make_image_folder(tmp_path / "data", classes=2, train=12, val=6))
    config = TeacherConfig(
        epochs=12, batch_size=8, base_lr=0.2, warmup_epochs=1, validate_every=4, device="cpu",
        smoothing=0.0, mixup=0.0, cutmix=0.0, erasing=0.0,
    )  # fmt: skip
    data = dataclasses.replace(DATA, augment=dataclasses.replace(DATA.augment, num_ops=0))
    torch.manual_seed(0)
    model, record = build_student(config, AGENT, "none", splits.train.classes)
    run = RunFolder.create(tmp_path / "run")
    teacher = finetune(run, config, data, AGENT, model, record, splits.train, splits.val)
    assert whole_image_accuracy(teacher, AGENT, DATA, splits.val) > 0.9  # the colour gives the class away


FITTED = TeacherConfig(epochs=2, batch_size=4, base_lr=0.0, fit_classifier=True, device="cpu")


def test_a_classifier_is_fitted_to_features_that_stay(tmp_path):
    splits = open_scenes(make_image_folder(tmp_path / "data", classes=3, train=12, val=6))
    torch.manual_seed(0)
    model, record = build_student(FITTED, AGENT, "none", splits.train.classes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = RunFolder.create(tmp_path / "run")
    teacher = finetune(run, FITTED, DATA, AGENT, model, record, splits.train, splits.val)
    assert whole_image_accuracy(teacher, AGENT, DATA, splits.val) > 0.9
    after = teacher.model.state_dict()
    assert {name for name in before if not before[name].equal(after[name])} == {"head.weight", "head.bias"}


TUNED = dataclasses.replace(FITTED, base_lr=0.05, warmup_epochs=0)


def test_features_learn_after_a_classifier_is_fitted(tmp_path):
    splits = open_scenes(make_image_folder(tmp_path / "data", classes=3, train=12, val=6))
    config = dataclasses.replace(TUNED, validate_every=1)
    torch.manual_seed(0)
    model, record = build_student(config, AGENT, "none", splits.train.classes)
    run = RunFolder.create(tmp_path / "run")
    finetune(run, config, DATA, AGENT, model, record, splits.train, splits.val)
    first = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["lr/model"] == 0 and first["val/score"] > 0.8  # before the first update
    kept, _ = load_teacher_folder(run.path / "last")
    before = build_again(config, splits.train.classes)
    assert not kept.model.state_dict()["blocks.0.attn.qkv.weight"].equal(before["blocks.0.attn.qkv.weight"])


def build_again(config: TeacherConfig, labels: tuple[str, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return build_student(config, AGENT, "none", labels)[0].state_dict()


@pytest.mark.parametrize("config", [FITTED, TUNED])
def test_fitting_a_classifier_is_resumed_exactly(tmp_path, monkeypatch, config):
    splits = open_scenes(make_image_folder(tmp_path / "data", classes=2, train=12, val=2))
    take = FittedTeacherLearner.train_batch
    stop_at: list[tuple[int, int]] = []  # epoch and batch

    def take_and_stop(learner, place, raw):
        take(learner, place, raw)
        if (place.epoch, place.batch) in stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(FittedTeacherLearner, "train_batch", take_and_stop)

    def finetuned(run: RunFolder) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, record = build_student(config, AGENT, "none", splits.train.classes)
        finetune(run, config, DATA, AGENT, model, record, splits.train, splits.val, resume=True)
        return load_teacher_folder(run.path / "best")[0].model.state_dict()

    whole = finetuned(RunFolder.create(tmp_path / "whole"))
    run = RunFolder.create(tmp_path / "stopped")
    for place in ((0, 1), (1, 0)):
        stop_at[:] = [place]
        with pytest.raises(Interrupted):
            finetuned(run)
    stop_at.clear()
    resumed = finetuned(run)
    assert all(resumed[name].equal(value) for name, value in whole.items())


@pytest.mark.parametrize("present", [(0, 2), (0, 1, 2, 3)])
def test_a_linear_classifier_never_names_a_class_it_has_not_seen(present):
    labels = np.tile(present, 30)
    features = random().normal(size=(len(labels), 5)) + 3.0 * labels[:, None]
    weight, bias = fit_linear(features, labels, 4)
    answers = (features @ weight.T + bias).argmax(axis=1)
    assert set(answers) <= set(present) and (answers == labels).mean() > 0.9
    assert bias.min() > -100  # what is not there yet can be learned


def test_a_classifier_of_timm_is_not_fitted():
    with pytest.raises(ConfigError, match="fit_classifier needs a DeiT, not timm:resnet18"):
        TeacherConfig(model="timm:resnet18", fit_classifier=True)


def test_a_rate_that_no_epoch_is_left_for_is_refused():
    with pytest.raises(ConfigError, match="nothing learns at base_lr 0.0005: set epochs to 2 or more"):
        TeacherConfig(fit_classifier=True, epochs=1)


def test_a_student_starts_from_an_agent_or_the_package(tmp_path):
    model, record = build_student(TeacherConfig(), AGENT, "none", ("a", "b"))
    assert record["vit"]["distilled"] is False and model.head.weight.shape == (2, 16)
    digits = AgentConfig(3, image_size=56, glimpse_size=8, patch_size=4, width=96, depth=4, num_heads=3)
    model, record = build_student(TeacherConfig(), digits, "package:digits-teacher", ("a", "b", "c"))
    assert model.head.weight.shape == (3, 96) and not record["vit"]["distilled"]
    with pytest.raises(StamError, match="timm"):
        build_student(TeacherConfig(model="timm:resnet18"), AGENT, "none", ("a", "b"))
    for name in ("hf-hub:someone/model", "hf_hub:x", "local-dir:/tmp/x", "a/b", "../x", "", "resnet18 --x"):
        with pytest.raises(ConfigError, match="is not the plain name of an architecture: use one such as"):
            TeacherConfig(model=f"timm:{name}")
    assert TeacherConfig(model="timm:resnet50.a1_in1k").model == "timm:resnet50.a1_in1k"
    with pytest.raises(ConfigError, match="use deit, or timm:NAME"):
        TeacherConfig(model="resnet18")


def test_an_agent_starts_from_another_with_its_actor_where_it_fits(tmp_path):
    first = start_agent("none", AGENT)
    save_agent(first, tmp_path / "first")
    second = start_agent(str(tmp_path / "first"), AGENT)
    assert second.actor.fc1.weight.equal(first.actor.fc1.weight)
    narrower = start_agent(str(tmp_path / "first"), dataclasses.replace(AGENT, actor_width=8, num_classes=5))
    assert narrower.core.norm.weight.equal(first.core.norm.weight)
    assert narrower.actor.fc1.weight.shape == (8, 8) and narrower.core.head.weight.shape == (5, 16)
    with pytest.raises(ConfigError, match="a core of depth 1 instead of 2: set --depth 1"):
        start_agent(str(tmp_path / "first"), dataclasses.replace(AGENT, depth=2))
    with pytest.raises(StamError, match="the package has no model"):
        package_folder("nonsense")
