"""The agents that ship with the package: whole, small, described, and as they were recorded."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import stam
from stam import weights
from stam.errors import WeightsError
from stam.fast import prepare
from stam.weights import MODEL_FILE, load_teacher_folder, locate, package_folder, package_names, start_agent

AGENTS = {"digits": 10, "imagenette-tiny": 10, "aid-tiny": 30}
ASSETS = Path(locate._ASSETS)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_loads_without_a_network_and_looks(name):
    agent = stam.load(name)
    grid = agent.grid
    trace = agent.look(torch.randn(1, 3, *grid.image_size), 3, first_location=0)
    assert trace.probabilities.sum(-1) == pytest.approx(1, abs=1e-4)
    assert len(agent.labels) == AGENTS[name]
    assert (ASSETS / name / MODEL_FILE).stat().st_size <= 20_000_000


@pytest.mark.parametrize("name", AGENTS)
def test_a_card_says_what_an_agent_is(name):
    card = (ASSETS / name / "README.md").read_text()
    for part in ("**Data**", "**Training**", "**Results**", "**Limits**", f'stam.load("{name}")'):
        assert part in card


def test_every_model_is_as_recorded():
    for name in package_names():
        assert package_folder(name) == ASSETS / name


def test_a_damaged_model_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "assets"
    shutil.copytree(ASSETS, copy)
    file = copy / "digits" / MODEL_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(locate, "_ASSETS", copy)
    with pytest.raises(
        WeightsError, match="model 'digits' is not as it was shipped: install stam-vision again"
    ):
        stam.load("digits")
    assert stam.load("imagenette-tiny").labels


@pytest.mark.parametrize("name", ["imagenette-tiny", "aid-tiny"])
def test_a_calibrated_agent_says_so(name):
    agent = stam.load(name)
    assert agent.config.temperature != 1.0 and 0.5 < agent.threshold < 1


def test_the_shipped_core_starts_agents_and_teachers_for_other_classes():
    config = stam.AgentConfig.of_size("tiny", 3, actor_width=512, labels=("a", "b", "c"))
    agent = start_agent("package:imagenette-tiny", config)
    shipped = stam.load("imagenette-tiny")
    name = "blocks.3.mlp.fc1.weight"
    assert torch.equal(agent.core.state_dict()[name], shipped.core.state_dict()[name])
    assert agent.core.head.out_features == 3
    state, settings = weights.adapt_deit(package_folder("imagenette-tiny") / MODEL_FILE, 3)
    assert settings["distilled"] and state["head.weight"].shape[0] == 3
    teacher, labels = load_teacher_folder(package_folder("digits-teacher"))
    assert teacher.num_classes == len(labels) == 10


def test_a_temperature_that_was_asked_for_is_kept_whatever_the_core_starts_from():
    config = stam.AgentConfig.of_size("tiny", 3, labels=("a", "b", "c"), temperature=2.0)
    assert start_agent("package:imagenette-tiny", config).config.temperature == 2.0
    assert start_agent("none", config).config.temperature == 2.0


GOLDEN = json.loads((Path(__file__).parent / "golden_looks.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("fast", [True, False])
def test_shipped_agents_look_as_they_did_when_they_were_shipped(name, fast):
    agent, golden = stam.load(name), GOLDEN[name]
    height, width = agent.grid.image_size
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randn(3, 3, height // 8, width // 8, generator=generator)
    scenes = torch.nn.functional.interpolate(
        coarse, size=(height, width), mode="bicubic", align_corners=False
    )
    trace = prepare(agent, fast).look(scenes, len(golden["locations"][0]), torch.tensor([0, 24, 40]))
    assert trace.locations.tolist() == golden["locations"]
    assert trace.predictions.tolist() == golden["predictions"]
    torch.testing.assert_close(trace.confidences, torch.tensor(golden["confidences"]), atol=1e-4, rtol=0)
    last = trace.class_logits[:, -1, :5]
    torch.testing.assert_close(last, torch.tensor(golden["class_logits_last"]), atol=1e-3, rtol=0)
