"""A few scenes step by step, and the policy's maps."""

import numpy as np
import pytest
import torch
from evaluating import NoiseScenes, fast_plan, make_agent, make_data

from stam.errors import StamError
from stam.evaluation import collect_examples, load_examples, reader_for, runs, save_examples
from stam.evaluation.examples import choose_examples
from stam.evaluation.scenes import first_locations
from stam.model.agent import PlainLooker
from stam.weights import save_agent


@pytest.fixture(scope="module")
def examples():
    agent, scenes = make_agent(), NoiseScenes(20)
    return collect_examples(agent, reader_for(agent, scenes, fast_plan()), 3, 6, "learned")


def test_examples_are_what_the_agent_does(examples):
    agent, scenes = make_agent(), NoiseScenes(20)
    chosen = choose_examples(scenes.labels, 3)
    for example, index in zip(examples, chosen, strict=True):
        assert np.array_equal(example.image, scenes.load(int(index)))
        assert example.label == scenes.labels[index]
        assert example.locations[0] == int(first_locations(agent.grid, np.array([index]), 0))
        assert len(set(example.locations.tolist())) == 6


def test_a_map_is_a_distribution_over_the_unseen_whose_peak_is_next(examples):
    for example in examples:
        assert example.has_maps and not example.maps[-1].any()
        for step in range(5):
            assert example.maps[step].sum() == pytest.approx(1, abs=1e-5)
            assert not example.maps[step, example.locations[: step + 1]].any()
            assert example.maps[step].argmax() == example.locations[step + 1]


def test_once_an_order_decides_a_map_shows_what_it_takes():
    agent = make_agent()
    for example in collect_examples(
        agent, reader_for(agent, NoiseScenes(20), fast_plan()), 2, 6, "learned:3"
    ):
        certain = [example.maps[step, example.locations[step + 1]] == 1 for step in range(5)]
        assert certain == [False, False, True, True, True]


def test_an_agent_without_an_actor_has_no_map():
    agent = make_agent(policy="random")
    (example,) = collect_examples(agent, reader_for(agent, NoiseScenes(5), fast_plan()), 1, 4, "random")
    assert not example.has_maps


def test_pictures_are_looked_at_as_it_was_measured(tmp_path, monkeypatch):
    save_agent(make_agent(), tmp_path / "agent")
    looked = []

    def collect(looker, *given):
        looked.append((type(looker), torch.is_autocast_enabled("cpu")))
        return collect_examples(looker, *given)

    monkeypatch.setattr(runs, "collect_examples", collect)
    plan = fast_plan(fast=False, precision="bfloat16")
    data = str(make_data(tmp_path / "data"))
    runs.evaluate_run(tmp_path / "agent", plan, torch.device("cpu"), data=data, num_examples=2)
    assert looked == [(PlainLooker, True)]


def test_scenes_are_resized_as_the_agent_was_trained():
    agent, scenes = make_agent(preprocess_size=40), NoiseScenes(5)
    assert reader_for(agent, scenes, fast_plan()).resize_size == 40
    assert reader_for(agent, scenes, fast_plan(resize_size=50)).resize_size == 50
    assert reader_for(make_agent(), scenes, fast_plan()).resize_size is None


def test_examples_show_another_class_each_before_they_repeat():
    labels = np.array([0] * 50 + [1] * 5 + [2] * 5)
    chosen = choose_examples(labels, 4)
    assert sorted(labels[chosen[:3]].tolist()) == [0, 1, 2]
    assert len(set(chosen.tolist())) == 4
    assert len(choose_examples(labels[:2], 5)) == 2


def test_examples_round_trip(examples, tmp_path):
    save_examples(examples, tmp_path / "e.npz")
    again = load_examples(tmp_path / "e.npz")
    for one, other in zip(examples, again, strict=True):
        assert one.grid == other.grid and one.classes == other.classes and one.label == other.label
        for name in ("image", "locations", "predictions", "confidences", "maps"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    (tmp_path / "e.npz").write_bytes(b"no")
    with pytest.raises(StamError, match="cannot read the examples"):
        load_examples(tmp_path / "e.npz")
    save_examples([], tmp_path / "none.npz")
    assert not (tmp_path / "none.npz").exists()


def test_maps_need_no_gradient(examples):
    assert all(isinstance(example.maps, np.ndarray) for example in examples)
    assert torch.is_grad_enabled()
