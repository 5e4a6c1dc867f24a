"""Run folders that version 0.1 wrote are read, and go on."""

import copy
import json

import pytest
import torch
from learners import learner

import stam
from stam.evaluation.speed import batches_from
from stam.learning.runs import RunFolder
from stam.weights import save_agent

AGENT = {
    "num_classes": 3,
    "image_size": 32,
    "glimpse_size": 8,
    "patch_size": 4,
    "channels": 3,
    "width": 24,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio": 4.0,
    "drop_path": 0.0,
    "actor_width": 16,
    "critic_width": 8,
    "policy": "learned",
    "handover": 2,
    "threshold": 0.8,
    "temperature": 1.0,
    "mirrored": False,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.2, 0.2, 0.2],
    "labels": ["a", "b", "c"],
}
TRAINING = {
    "num_glimpses": 5,
    "extra_looks": 2,
    "extra_glimpses": 3,
    "epochs": 4,
    "epoch_share": 0.5,
    "warmup_epochs": 0,
    "batch_size": 32,
    "consistency": "soft",
    "feature_weight": 2.0,
    "reward": "agreement",
    "discount": 1.0,
    "base_lr": 1e-4,
    "mixup": 0.0,
    "cutmix": 0.0,
    "mild_share": 0.25,
    "averaged_batches": 4,
    "start_share": 0.0,
    "compile": True,
    "device": "cpu",
}
AUGMENT = {"random_crop": True, "crop_scale": [0.2, 1.0], "mild_crop": 0.7, "num_ops": 0}


@pytest.fixture
def run(tmp_path):
    agent = stam.Agent(stam.AgentConfig.from_json(json.dumps(AGENT))).eval()
    save_agent(agent, tmp_path / "best")
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    config |= {"format_version": "1.0", "agent": AGENT}
    (tmp_path / "best" / "config.json").write_text(json.dumps(config))
    settings = {"agent": AGENT, "data": {"path": "digits", "augment": AUGMENT}, "training": TRAINING}
    settings |= {"teacher_training": {"epochs": 3, "compile": False}, "init": "none", "teacher": None}
    record = {"format": "stam-run", "format_version": "1.0", "recipe": "digits", "seed": 0}
    (tmp_path / "run.json").write_text(json.dumps(record | {"versions": {}, "config": settings}))
    return tmp_path, agent


def test_a_run_of_version_0_1_is_read(run):
    folder, agent = run
    images = torch.randn(2, 3, 32, 32)
    loaded = stam.load(folder)
    assert loaded.config.policy == "learned:2"
    want = agent.look(images, 5, 0, policy="learned:2")
    assert loaded.look(images, 5, 0).locations.equal(want.locations)
    config = RunFolder.open(folder).config()
    training, augment = config.training, config.data.augment
    assert (training.short_episodes, training.short_episode_glimpses, training.ema_batches) == (2, 3, 4)
    assert (training.large_crop_fraction, augment.large_crop) == (0.25, 0.7)
    assert training.fast and not config.teacher_training.fast


def test_a_state_of_version_0_1_is_gone_on_from():
    made, other = (learner(base_lr=1e-2, ema_batches=4) for _ in range(2))
    for _ in batches_from(made, None, 2):
        pass
    state = copy.deepcopy(made.state_dict())
    averaged = {
        name.removeprefix("module."): value
        for name, value in state["averaged"].items()
        if value.is_floating_point() and not name.startswith("module.critic.")
    }
    state["averaged"] = {"count": 2, "average": averaged, "start": {}}
    other.load_state_dict(state)
    for one in (made, other):
        for _ in batches_from(one, None, 3):
            pass
    got, want = (one.agent_to_use.state_dict() for one in (other, made))
    assert all(got[name].equal(value) for name, value in want.items() if not name.startswith("critic."))
