"""Our own folders: saved and read back, never half written, and nothing unknown in a record is used."""

import json
import os
import resource
import sys
from types import ModuleType

import pytest
import torch
from agents import randomise, tiny_config
from torch import nn

import stam
from stam import weights
from stam.errors import WeightsError
from stam.learning.finetuning import build_student
from stam.model.agent import interpolate_positions
from stam.model.vit import VisionTransformer
from stam.settings import TeacherConfig


def test_save_and_load_keep_everything_but_the_critic(tmp_path, agent, images):
    agent.configure(threshold=0.7, labels=tuple("abcde"))
    agent.add_critic()
    weights.save_agent(agent, tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "saved/config.json").read_text())["format_version"] == "1.0"
    again = stam.load(tmp_path / "saved")
    assert again.config == agent.config and again.critic is None and not again.training
    assert not any(
        name.startswith("critic") for name in weights.read_state_dict(tmp_path / "saved/model.safetensors")
    )
    assert again.look(images, 5, 0).probabilities.equal(agent.look(images, 5, 0).probabilities)


def test_half_precision_save_is_close(tmp_path, agent, images):
    weights.save_agent(agent, tmp_path / "saved", half=True)
    again = stam.load(tmp_path / "saved")
    torch.testing.assert_close(
        again.look(images, 1, 0).probabilities, agent.look(images, 1, 0).probabilities, atol=1e-2, rtol=0
    )


def test_an_interrupted_save_leaves_the_old_agent(tmp_path, agent, monkeypatch):
    folder = tmp_path / "saved"
    weights.save_agent(agent, folder)
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(stam.StamError, match="could not write .*No space left on device"):
        weights.save_agent(stam.Agent(tiny_config(width=48)), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert stam.load(folder).config == agent.config


def test_a_folder_with_other_things_is_not_overwritten(tmp_path, agent):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(stam.StamError, match="is not empty and holds no agent"):
        weights.save_agent(agent, tmp_path)


def test_a_later_minor_format_is_read(tmp_path, agent):
    weights.save_agent(agent, tmp_path / "a")
    config = tmp_path / "a/config.json"
    config.write_text(config.read_text().replace('"1.0"', '"1.3"'))
    assert stam.load(tmp_path / "a").config == agent.config


RECORD = {
    "labels": ["a", "b"],
    "image_size": [8, 12],
    "vit": {"patch_size": [4, 4], "width": 8, "depth": 1, "num_heads": 2, "distilled": False},
}


def save_tiny_teacher(folder, **changes):
    model = VisionTransformer(
        num_classes=2,
        patch_size=(4, 4),
        image_patches=(2, 3),
        width=8,
        depth=1,
        num_heads=2,
        distilled=False,
    )
    randomise(model, seed=1)
    weights.save_teacher(model, folder, RECORD | changes)
    return model


def test_a_teacher_is_saved_and_read_back(tmp_path):
    model = save_tiny_teacher(tmp_path / "teacher")
    teacher, labels = weights.load_teacher_folder(tmp_path / "teacher")
    assert labels == ("a", "b") and teacher.num_classes == 2
    for name, value in model.state_dict().items():
        assert teacher.model.state_dict()[name].equal(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timm_settings": {"pretrained": True}}, "unknown setting 'timm_settings'"),
        ({"vit": RECORD["vit"] | {"depht": 3}}, "unknown setting 'vit.depht': did you mean 'depth'"),
        ({"vit": RECORD["vit"] | {"drop_path": 0.5}}, "unknown setting 'vit.drop_path'"),
        ({"vit": None}, "needs either the settings 'vit' or the model name 'timm'"),
        ({"timm": "resnet18"}, "needs either the settings 'vit' or the model name 'timm'"),
        ({"timm": {"name": "resnet18"}, "vit": None}, "timm must be text, got {'name': 'resnet18'}"),
        ({"timm": "hf-hub:someone/else", "vit": None}, "not the plain name of an architecture"),
        ({"timm": "local-dir:/tmp/x", "vit": None}, "not the plain name of an architecture"),
        ({"labels": "ab"}, "labels must be a list, got 'ab'"),
        ({"labels": ["a", 1]}, r"labels\[1\] must be text, got 1"),
        ({"vit": RECORD["vit"] | {"depth": True}}, "vit.depth must be a whole number, got True"),
        ({"vit": RECORD["vit"] | {"width": 10**30}}, "vit.width must be a whole number"),
        ({"vit": RECORD["vit"] | {"mlp_ratio": 1e9}}, "does not fit at 'blocks.0.mlp.fc1.weight'"),
        ({"vit": RECORD["vit"] | {"depth": 10**9}}, "depth is 1000000000, with 20 tensors"),
        ({"vit": RECORD["vit"] | {"width": 2**40}}, "model.safetensors"),
        ({"vit": {"patch_size": [4, 4], "width": "wide"}}, "width must be a whole number, got 'wide'"),
        ({"image_size": [9, 12]}, "does not describe a teacher"),
    ],
)
def test_a_teachers_record_with_anything_else_is_refused_in_one_line(tmp_path, changes, message):
    save_tiny_teacher(tmp_path / "teacher", **changes)
    with pytest.raises(WeightsError, match=message) as raised:
        weights.load_teacher_folder(tmp_path / "teacher")
    assert "config.json" in str(raised.value) or "model.safetensors" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 2**20, "num_heads": 1}, "does not fit at 'core.cls_token': expected shape"),
        ({"width": 2**40, "num_heads": 1}, "describes no model: Storage size calculation overflowed"),
        ({"depth": 10**9}, r"config.json' does not describe an agent: depth is 1000000000, with 59 tensors"),
        ({"num_classes": 2**40}, "does not fit at 'core.head.weight'"),
        ({"image_size": 2**30}, "does not fit at 'core.pos_embed'"),
        ({"mlp_ratio": 1e8}, "does not fit at 'core.blocks.0.mlp.fc1.weight'"),
        ({"actor_width": 2**25}, "does not fit at 'actor"),
        ({"channels": 2.5}, "channels must be a whole number, got 2.5"),
        ({"labels": {"a": 1}}, "labels must be a list"),
        ({"labels": [*"abcd", "\udcff"]}, "labels must be text that can be written"),
        ({"mean": [0.1, None, 0.1]}, r"mean\[1\] must be a finite number, got None"),
        ({"image_size": [24, 32, 8]}, "image_size must be a list of 2"),
        ({"handover": {}}, "handover must be a whole number"),
    ],
)
def test_an_agents_record_is_checked_before_memory_is_taken(tmp_path, agent, changes, message):
    weights.save_agent(agent, tmp_path / "a")
    config = tmp_path / "a/config.json"
    record = json.loads(config.read_text())
    config.write_text(json.dumps(record | {"agent": record["agent"] | changes}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError, match=message):
        stam.load(tmp_path / "a")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def test_a_record_without_its_part_is_refused(tmp_path):
    save_tiny_teacher(tmp_path / "teacher")
    config = tmp_path / "teacher" / "config.json"
    config.write_text(json.dumps({"format": "stam-teacher", "format_version": "1.0"}))
    with pytest.raises(WeightsError, match="not a configuration of ours: it lacks 'teacher'"):
        weights.load_teacher_folder(tmp_path / "teacher")
    with pytest.raises(WeightsError, match="is a stam-teacher, not a stam-agent"):
        stam.load(tmp_path / "teacher")


def test_a_timm_teacher_is_built_from_its_name_alone(tmp_path, monkeypatch):
    asked = []

    def create_model(*arguments, **settings):
        asked.append((arguments, settings))
        return nn.Linear(3, 2)

    timm = ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    record = {"labels": ["a", "b"], "image_size": 8, "timm": "some_model"}
    weights.save_teacher(nn.Linear(3, 2), tmp_path / "teacher", record)
    _, labels = weights.load_teacher_folder(tmp_path / "teacher")
    assert labels == ("a", "b") and asked == [(("some_model",), {"num_classes": 2})]
    weights.save_teacher(nn.Linear(3, 2), tmp_path / "other", record | {"timm_settings": {"x": 1}})
    with pytest.raises(WeightsError, match="unknown setting 'timm_settings'"):
        weights.load_teacher_folder(tmp_path / "other")
    assert len(asked) == 1


def test_a_file_in_the_way_is_one_line(tmp_path, agent):
    (tmp_path / "file").write_text("x")
    with pytest.raises(stam.StamError, match="could not write"):
        weights.save_agent(agent, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x" and len(list(tmp_path.iterdir())) == 1


def test_an_agent_on_a_grid_that_is_not_square_is_started_from_with_its_own_grid(tmp_path):
    """9x16 patches are as many as 12x12: the configuration says which they are."""
    config = tiny_config(image_size=(36, 64), glimpse_size=4, patch_size=4)
    wide = stam.Agent(config)
    randomise(wide)
    weights.save_agent(wide, tmp_path / "wide")
    same = weights.start_agent(str(tmp_path / "wide"), config)
    assert same.core.pos_embed.equal(wide.core.pos_embed)
    other = weights.start_agent(str(tmp_path / "wide"), tiny_config(image_size=(72, 64), glimpse_size=4))
    want = interpolate_positions(wide.core.pos_embed[:, 2:], (9, 16), (18, 16))
    torch.testing.assert_close(other.core.pos_embed[:, 2:], want)


def test_whatever_starts_from_a_model_of_ours_takes_its_grid(tmp_path):
    """Agents, teachers and backbones; from an agent, from a teacher, and from their weights files alone."""
    config = tiny_config(image_size=(36, 64), glimpse_size=4, patch_size=4)
    wide = stam.Agent(config)
    randomise(wide)
    weights.save_agent(wide, tmp_path / "agent")
    labels = tuple("abcde")
    student, record = build_student(TeacherConfig(), config, str(tmp_path / "agent"), labels)
    assert student.pos_embed.equal(wide.core.pos_embed)
    weights.save_teacher(student, tmp_path / "teacher", record)
    for source in ("teacher", "teacher/model.safetensors", "agent/model.safetensors"):
        again = weights.start_agent(str(tmp_path / source), config)
        assert again.core.pos_embed.equal(wide.core.pos_embed), source
    file = tmp_path / "teacher/model.safetensors"
    teacher = weights.load_teacher(file, 5, image_size=(36, 64), num_heads=config.num_heads)
    assert teacher.model.pos_embed.equal(wide.core.pos_embed)
