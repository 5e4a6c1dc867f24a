import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from agents import randomise, tiny_config

import stam
from stam.cli import main
from stam.errors import StamError
from stam.integrations.onnx import StepGraph, check_parity, export_onnx
from stam.model.policy import _kept_ranks

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install '.[export]'")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _unchecked():
    """Under the exporter a size is a symbol, which no annotation of an int allows."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, _unchecked):
    agent = stam.Agent(tiny_config(labels=tuple("abcde"), temperature=1.5, threshold=0.6, preprocess_size=27))
    randomise(agent)
    path = tmp_path_factory.mktemp("export") / "agent.onnx"
    export_onnx(agent.eval(), path)
    return agent, path


def test_a_hundred_episodes_say_the_same_after_every_glimpse(exported):
    agent, path = exported
    parity = check_parity(agent, path, num_episodes=100)
    assert parity.ok and parity.num_episodes == 100
    assert max(parity.probabilities, parity.policy) <= 1e-4
    other = stam.Agent(agent.config).eval()
    randomise(other, seed=7)
    assert not check_parity(other, path, num_episodes=2).ok
    assert not dataclasses.replace(parity, policy=float("nan")).ok  # what is no number agrees with nothing


@pytest.fixture(scope="module")
def exported_causal(tmp_path_factory, _unchecked):
    settings = dict(labels=tuple("abcde"), temperature=1.5, threshold=0.9)
    agent = stam.Agent(tiny_config(core="causal", actor="joint", **settings))
    randomise(agent)
    path = tmp_path_factory.mktemp("export") / "causal.onnx"
    export_onnx(agent.eval(), path)
    return agent, path


def test_the_step_of_a_causal_core_carries_its_cache(exported_causal):
    agent, path = exported_causal
    session = onnxruntime.InferenceSession(path)
    assert [(node.name, node.shape) for node in session.get_inputs()] == [
        ("glimpses", ["batch", 1, 3, 8, 8]),
        ("locations", ["batch", 1]),
        ("seen", ["batch", 12]),
        ("cache", [2, 2, "batch", 3, "num_patches", 8]),
    ]
    parity = check_parity(agent, path, num_episodes=20)
    assert parity.ok and max(parity.probabilities, parity.policy) <= 1e-4
    other = stam.Agent(agent.config).eval()
    randomise(other, seed=7)
    assert not check_parity(other, path, num_episodes=2).ok


def test_an_agent_is_exported_with_a_policy_of_two_parts(exported, tmp_path):
    agent = stam.Agent(tiny_config(policy="learned:5")).eval()
    agent.load_state_dict(exported[0].state_dict())
    export_onnx(agent, tmp_path / "mirrored.onnx")
    assert check_parity(agent, tmp_path / "mirrored.onnx", num_episodes=5).ok
    assert not check_parity(agent, exported[1], num_episodes=5).ok


def test_the_graph_takes_any_batch_and_any_count(exported):
    agent, path = exported
    session = onnxruntime.InferenceSession(path)
    assert [(node.name, node.shape, node.type) for node in session.get_inputs()] == [
        ("glimpses", ["batch", "num_glimpses", 3, 8, 8], "tensor(float)"),
        ("locations", ["batch", "num_glimpses"], "tensor(int64)"),
    ]
    for batch, count in ((1, 1), (1, 12), (7, 1), (3, 5)):
        generator = torch.Generator().manual_seed(batch)
        locations = torch.rand(batch, 12, generator=generator).argsort(1)[:, :count]
        glimpses = torch.randn(batch, count, 3, 8, 8, generator=generator)
        got = session.run(None, {"glimpses": glimpses.numpy(), "locations": locations.numpy()})
        with torch.no_grad():
            want = StepGraph(agent)(glimpses, locations)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other.numpy(), atol=1e-5)
        assert (np.take_along_axis(got[1], locations.numpy(), 1) == 0).all()
        assert got[1].sum(1) == pytest.approx(0 if count == 12 else 1)


def test_the_graph_decides_as_the_agent_does(exported):
    agent, path = exported
    session = onnxruntime.InferenceSession(path)
    scene = torch.randn(1, 3, 24, 32, generator=torch.Generator().manual_seed(2))
    trace = agent.look(scene, 12, first_location=4)
    for count in range(1, 12):
        locations = trace.locations[:, :count]
        inputs = {"glimpses": agent.grid.cut(scene, locations).numpy(), "locations": locations.numpy()}
        probabilities, policy = session.run(None, inputs)
        np.testing.assert_allclose(probabilities[0], trace.probabilities[0, count - 1], atol=1e-5)
        assert policy[0].argmax() == trace.locations[0, count]


def test_metadata_say_what_a_runner_needs(exported):
    _, path = exported
    record = json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["stam"])
    assert record["rows"] == 3 and record["columns"] == 4 and record["labels"] == list("abcde")
    assert record["threshold"] == 0.6 and record["temperature"] == 1.5 and record["policy"] == "learned"
    assert record["preprocess_size"] == 27
    assert record["image_size"] == [24, 32] and record["glimpse_size"] == [8, 8] and len(record["mean"]) == 3


@pytest.mark.parametrize("kind", ["exported", "exported_causal"])
def test_the_example_runs_without_torch(kind, request, tmp_path):
    _, path = request.getfixturevalue(kind)
    scene = tmp_path / "scene.npy"
    np.save(scene, np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    example = ROOT / "examples" / "onnx_runner.py"
    code = "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0])"
    command = [sys.executable, "-c", code, example, path, scene]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "glimpse  1 at (" in done.stdout and "% sure" in done.stdout
    body = example.read_text().split('"""')[2].strip()
    assert len(body.splitlines()) <= 30


def test_what_cannot_be_exported_is_said(exported, tmp_path):
    agent, _ = exported
    with pytest.raises(StamError, match=r"call agent.eval\(\)"):
        export_onnx(stam.Agent(tiny_config()), tmp_path / "a.onnx")
    with pytest.raises(StamError, match="could not write"):
        export_onnx(agent, tmp_path / "no" / "a.onnx")


def test_the_command_and_an_agent_without_an_actor(tmp_path, capsys):
    _kept_ranks.cache_clear()  # as in a process that only exports
    agent = stam.Agent(tiny_config(policy="spiral", depth=1))
    randomise(agent)
    stam.weights.save_agent(agent.eval(), tmp_path / "agent")
    main(["export", str(tmp_path / "agent"), "--out", str(tmp_path / "agent.onnx"), "--episodes", "2"])
    said = capsys.readouterr()
    assert "wrote" in said.out and "2 episodes against PyTorch" in said.out
    assert "next: python examples" in said.err
    for wrong in (["--out", "agent.txt"], ["--out", str(tmp_path / "no" / "a.onnx")]):
        with pytest.raises(SystemExit) as ended:
            main(["export", str(tmp_path / "agent"), *wrong])
        assert ended.value.code == 2
