"""A run from Python: one call begins it, one call resumes it, and nothing is left behind by a mistake."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from images import make_image_folder

import stam
from stam.config import AgentConfig
from stam.errors import ConfigError, DataError, WeightsError
from stam.learning import experiment
from stam.learning.finetuning import build_student
from stam.learning.loop import run_loop
from stam.learning.runs import RunError, RunFolder, read_metrics
from stam.learning.training import AgentLearner
from stam.settings import AugmentConfig, DataConfig, RunConfig, TeacherConfig, TrainingConfig
from stam.weights import load_teacher_folder


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig(
        agent=AgentConfig(
            2, 32, 16, 8, width=16, depth=1, num_heads=2, actor_width=8, critic_width=8, drop_path=0.0
        ),
        data=DataConfig(
            str(make_image_folder(tmp_path / "images")), num_workers=0, augment=AugmentConfig.off()
        ),
        training=TrainingConfig(num_glimpses=2, epochs=1, batch_size=4, device="cpu"),
        teacher_training=TeacherConfig(epochs=1, batch_size=6, warmup_epochs=0, device="cpu"),
    )


def test_a_teacher_then_an_agent_in_one_call_each(config, tmp_path):
    seen = []
    experiment.begin_teacher(config, tmp_path / "teacher", loggers=(seen.append,))
    assert len(seen) == 1 and "val/score" in seen[0]
    config = dataclasses.replace(config, teacher=str(tmp_path / "teacher"))
    agent = experiment.begin(config, tmp_path / "run", loggers=(seen.append,))
    assert agent.labels == ("class0", "class1", "class2") and not agent.training
    assert len(seen) == 2 and "loss/actor" in seen[1]
    folder = RunFolder.open(tmp_path / "run")
    assert experiment.recipe_of(folder) == "custom" and folder.config().agent == agent.config
    for name, value in experiment.resume(tmp_path / "run").state_dict().items():  # nothing is left to do
        assert value.equal(stam.load(tmp_path / "run/last").state_dict().get(name, value)), name
    experiment.resume_teacher(tmp_path / "teacher")
    with pytest.raises(RunError, match="was begun with stam teacher"):
        experiment.resume(tmp_path / "teacher")


@pytest.mark.parametrize("begin", [experiment.begin, experiment.begin_teacher])
def test_a_mistake_leaves_no_folder(config, tmp_path, begin):
    out = tmp_path / "run"
    wrong = dataclasses.replace(config, init="no/such/file")
    with pytest.raises(WeightsError, match="no weights at"):
        begin(wrong, out)
    nowhere = dataclasses.replace(config, data=DataConfig(str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="no such data"):
        begin(nowhere, out)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").touch()
    with pytest.raises(RunError, match="is not empty"):
        begin(nowhere, out)  # the folder is looked at before any data


def test_a_classifier_that_several_processes_cannot_fit_leaves_no_folder(config, tmp_path, monkeypatch):
    how = dataclasses.replace(config.teacher_training, epochs=2, fit_classifier=True)
    monkeypatch.setattr("stam.learning.distributed.world_size", lambda: 2)
    with pytest.raises(ConfigError, match="fit_classifier is for one process"):
        experiment.begin(dataclasses.replace(config, teacher_training=how), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_can_be_begun_in_another_thread(config, tmp_path):
    """Python gives signals to the main thread alone."""
    with ThreadPoolExecutor(1) as pool:
        agent = pool.submit(experiment.begin, config, tmp_path / "run").result()
    assert agent.labels == ("class0", "class1", "class2")


def test_a_device_without_memory_left_is_no_damaged_state(config, tmp_path, monkeypatch):
    experiment.begin(config, tmp_path / "run")

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AgentLearner, "load_state_dict", full)
    with pytest.raises(torch.OutOfMemoryError):
        experiment.resume(tmp_path / "run")


def test_its_own_teacher_is_saved_as_often(config, tmp_path, monkeypatch):
    asked = []

    def loop(learner, run, plan, scenes, data, description, save_minutes, *rest):
        asked.append((description, save_minutes))
        return run_loop(learner, run, plan, scenes, data, description, save_minutes, *rest)

    monkeypatch.setattr("stam.learning.finetuning.run_loop", loop)
    training = dataclasses.replace(config.training, save_minutes=3.0)
    experiment.begin(dataclasses.replace(config, training=training), tmp_path / "run")
    assert asked == [("teacher", 3.0)]


def test_an_agent_can_start_as_its_teacher(config, tmp_path, capsys):
    still = dataclasses.replace(config.training, base_lr=0.0, min_lr=0.0)  # the core stays where it starts
    config = dataclasses.replace(config, training=still, start_from_teacher=True)
    agent = experiment.begin(config, tmp_path / "run")
    assert "no teacher given: fine-tuning one" in capsys.readouterr().err
    experiment.resume(tmp_path / "run")
    err = capsys.readouterr().err
    assert "no teacher given" not in err and f"its teacher is in {tmp_path / 'run/teacher/best'}" in err
    teacher = load_teacher_folder(tmp_path / "run/teacher/best")[0].model
    assert agent.core.blocks[0].attn.qkv.weight.equal(teacher.blocks[0].attn.qkv.weight)
    for head in (agent.core.head, agent.core.head_dist):
        assert head.weight.equal(teacher.head.weight) and head.bias.equal(teacher.head.bias)
    given = dataclasses.replace(config, teacher=str(tmp_path / "run/teacher"))
    assert experiment.begin(given, tmp_path / "again").core.head.weight.equal(teacher.head.weight)
    with pytest.raises(ConfigError, match="no DeiT.*--no-start-from-teacher"):
        dataclasses.replace(
            config, teacher_training=dataclasses.replace(config.teacher_training, model="timm:resnet18")
        )


@pytest.mark.parametrize("epochs", [5, 9])
def test_the_number_of_epochs_follows_the_speed_and_is_resumed_with(config, tmp_path, epochs):
    training = dataclasses.replace(config.training, epochs=7, tau_epochs=7, validate_every=1)
    config = dataclasses.replace(config, training=training)
    experiment.begin_teacher(config, tmp_path / "teacher")
    config = dataclasses.replace(config, teacher=str(tmp_path / "teacher"))
    timed = []

    def fit_to_time(done: int, seconds: float) -> int:
        timed.append((done, seconds > 0))
        return epochs

    experiment.begin(config, tmp_path / "whole", fit_to_time=fit_to_time)
    assert timed == [(3, True)]
    assert RunFolder(tmp_path / "whole").config().training.epochs == epochs
    assert RunFolder(tmp_path / "whole").config().training.tau_epochs == epochs
    whole = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [each["epoch"] for each in whole] == list(range(epochs))

    def stop(metrics: dict) -> None:
        if metrics["epoch"] == 4:
            raise RuntimeError("a power failure")

    with pytest.raises(RuntimeError, match="power failure"):
        experiment.begin(config, tmp_path / "cut", loggers=(stop,), fit_to_time=fit_to_time)
    experiment.resume(tmp_path / "cut")
    assert read_metrics(tmp_path / "cut" / "metrics.jsonl") == whole


def test_a_teachers_classifier_can_learn_while_its_features_stay(config, tmp_path):
    how = dataclasses.replace(config.teacher_training, base_lr=0.0, min_lr=0.0, head_lr=1e-2)
    config = dataclasses.replace(config, teacher_training=how)
    torch.manual_seed(how.seed)
    begun, _ = build_student(how, config.agent, "none", ("class0", "class1", "class2"))
    taught = experiment.begin_teacher(config, tmp_path / "teacher").model
    assert taught.blocks[0].attn.qkv.weight.equal(begun.blocks[0].attn.qkv.weight)
    assert not taught.head.weight.equal(begun.head.weight)
    (metrics,) = read_metrics(tmp_path / "teacher" / "metrics.jsonl")
    assert metrics["lr/model"] == 0 and metrics["lr/head"] > 0
