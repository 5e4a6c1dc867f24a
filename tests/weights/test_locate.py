"""What a path or a name means, for an agent, a start of training, and a teacher."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from agents import tiny_config
from deits import CLASSES, deit_state, write
from evaluating import make_data, make_run, make_teacher

import stam
from stam import weights
from stam.errors import WeightsError
from stam.weights import find_agent, find_core, find_teacher, package_folder
from stam.weights.locate import find_home, locate


def test_a_run_folder_gives_its_best_checkpoint(tmp_path, agent):
    weights.save_agent(stam.Agent(tiny_config(num_classes=2)), tmp_path / "last")
    assert stam.load(tmp_path).config.num_classes == 2
    weights.save_agent(agent, tmp_path / "best")
    assert stam.load(tmp_path).config.num_classes == 5


def test_loading_nothing_says_what_is_missing(tmp_path, agent):
    with pytest.raises(WeightsError, match="no agent at"):
        stam.load(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="holds no agent"):
        stam.load(tmp_path)
    weights.save_agent(agent, tmp_path / "a")
    config = tmp_path / "a/config.json"
    config.write_text(config.read_text().replace('"1.0"', '"2.0"'))
    with pytest.raises(WeightsError, match=r"has format 2.0, this version reads 1.0"):
        stam.load(tmp_path / "a")
    config.write_text("{")
    with pytest.raises(WeightsError, match="is not a configuration of ours"):
        stam.load(tmp_path / "a")


@pytest.fixture
def run(tmp_path):
    """A run folder with an agent and a teacher of its own."""
    return make_run(tmp_path / "run", make_data(tmp_path / "data", num_images=1))


def test_an_agent_is_found_in_its_run(run, monkeypatch):
    for source in (run, str(run)):
        found = find_agent(source)
        assert (found.name, found.folder, found.home, found.run) == ("run", run / "best", run, run)
        assert not found.is_borrowed
    found = find_agent(run / "best")
    assert (found.name, found.folder, found.home, found.run) == ("best", run / "best", run / "best", run)
    assert find_agent(run / "best" / "model.safetensors") == found
    monkeypatch.setenv("HOME", str(run.parent))
    assert find_agent("~/run").folder == run / "best"
    alone = shutil.copytree(run / "best", run.parent / "alone")
    assert find_agent(alone).run is None


@pytest.mark.parametrize("source", ["digits", "package:digits", Path("digits")])
def test_a_shipped_agent_is_found_by_name_and_is_not_written_to(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_agent(source)
    assert (found.name, found.folder, found.run) == ("digits", package_folder("digits"), None)
    assert found.is_borrowed and found.home == find_home(source) == Path("digits-results")
    assert stam.load(source).labels == tuple("0123456789") and not list(tmp_path.iterdir())


def test_a_path_comes_before_a_shipped_name(tmp_path, agent, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights.save_agent(agent, "digits")
    assert stam.load("digits").config == agent.config
    assert stam.load("package:digits").config.num_classes == 10


def test_an_agent_comes_from_the_hub_with_its_configuration(tmp_path, agent, monkeypatch):
    fetched = []

    def download(name, file):
        fetched.append((name, file))
        return str(tmp_path / "cache" / file)

    weights.save_agent(agent, tmp_path / "cache")
    hub = ModuleType("huggingface_hub")
    hub.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert stam.load("hub:some/agent").config == agent.config
    assert sorted(fetched) == [("some/agent", "config.json"), ("some/agent", "model.safetensors")]
    found = find_agent("hub:some/agent")
    assert (found.name, found.home, found.is_borrowed) == ("agent", Path("agent-results"), True)
    assert locate("hub:some/agent") == tmp_path / "cache" / "model.safetensors"


def test_what_is_no_agent_says_what_would_be_one(run, tmp_path, monkeypatch):
    with pytest.raises(WeightsError, match="at 'none': give .*or one of aid-tiny, digits, imagenette-tiny$"):
        find_agent("none")
    with pytest.raises(WeightsError, match="no agent at 'imagenette': did you mean 'imagenette-tiny'?"):
        find_agent("imagenette")
    with pytest.raises(WeightsError, match="no model 'digts': did you mean 'digits'"):
        stam.load("package:digts")
    with pytest.raises(WeightsError, match="is a file, not an agent: give a run folder"):
        stam.load(write(tmp_path, deit_state(True), "safetensors"))
    with pytest.raises(WeightsError, match="is a stam-teacher, not a stam-agent"):
        stam.load(run / "teacher")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match=r"\[hub\]'.*bring the file config.json of 'some/agent'"):
        stam.load("hub:some/agent")


def test_a_start_is_nothing_a_file_an_agent_or_a_teacher(run, tmp_path):
    assert find_core("none") is None
    file = write(tmp_path, deit_state(True), "safetensors")
    assert find_core(file) == find_core(str(file)) == file
    assert find_core(run) == find_core(run / "best") == run / "best"
    assert find_core(run / "teacher") == run / "teacher" / "model.safetensors"
    assert find_core("package:digits-core") == find_core("digits-core") == package_folder("digits-core")
    (run / "teacher").rename(tmp_path / "last")
    assert find_core(tmp_path) == tmp_path / "last" / "model.safetensors"  # the run of a teacher
    with pytest.raises(WeightsError, match="no weights at 'nowhere': give a file"):
        find_core("nowhere")
    with pytest.raises(WeightsError, match="holds no agent and no teacher"):
        find_core(tmp_path / "data")


def test_a_teacher_is_found_by_itself_in_its_run_and_in_the_run_of_an_agent(run, tmp_path):
    own = run / "teacher"
    assert find_teacher(own) == find_teacher(run) == own
    assert find_teacher(run / "best") is None
    (tmp_path / "one").mkdir()
    moved = own.rename(tmp_path / "one" / "best")
    assert find_teacher(tmp_path / "one") == moved
    (tmp_path / "one").rename(own)
    assert find_teacher(run) == own / "best"
    assert find_teacher("digits-teacher") == package_folder("digits-teacher")
    assert find_teacher(write(tmp_path, deit_state(True), "safetensors")) is None


def test_a_teacher_is_opened_from_a_run_or_a_file(run, tmp_path):
    config = stam.load(run).config
    teacher = weights.open_teacher(str(run), config.labels, config.image_size)
    for name, value in make_teacher().model.state_dict().items():
        assert teacher.model.state_dict()[name].equal(value)
    with pytest.raises(WeightsError, match="holds no teacher"):
        weights.open_teacher(str(run / "best"), config.labels, config.image_size)
    with pytest.raises(WeightsError, match="tells 5 classes apart"):
        weights.open_teacher(str(run), ("a", "b"), config.image_size)
    file = write(tmp_path, deit_state(False), "pth")
    classes = tuple(map(str, range(CLASSES)))
    teacher = weights.open_teacher(str(file), classes, 64)
    assert teacher(torch.zeros(1, 3, 64, 64)).shape == (1, CLASSES)


def test_a_teacher_has_the_heads_of_its_own_width(tmp_path):
    """An agent's number of heads says something of a file only where that is as wide."""
    file = write(tmp_path, deit_state(False), "pth")  # 64 wide
    classes = tuple(map(str, range(CLASSES)))

    def num_heads(like: stam.AgentConfig | None) -> int:
        return weights.open_teacher(str(file), classes, 64, like).model.blocks[0].attn.num_heads

    settings = dict(image_size=64, num_heads=4)
    assert num_heads(stam.AgentConfig(CLASSES, width=64, **settings)) == 4
    assert num_heads(stam.AgentConfig(CLASSES, width=32, **settings)) == 1
    assert num_heads(None) == 1
