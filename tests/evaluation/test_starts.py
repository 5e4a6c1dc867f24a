"""The first location: measured, tested on other images, kept with the weights, and begun at."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from evaluating import NoiseScenes, WholeThenCrops, fast_plan, make_agent, make_data, make_run

import stam
from stam.cli import main
from stam.config import AgentConfig
from stam.errors import ConfigError, StamError
from stam.evaluation import Evaluation, evaluate, load_evaluation
from stam.evaluation.evaluate import halves
from stam.evaluation.starts import best_location, describe_first_locations
from stam.scene.pixels import normalise
from stam.show.figures import evaluation_figures, scenes


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(make_agent(), NoiseScenes(12), fast_plan(num_glimpses=2, first_locations=True))


def test_every_location_is_tried_on_one_half_and_two_on_the_other(evaluation):
    agent, noise, found = make_agent(), NoiseScenes(12), evaluation.first_locations
    chosen, tested = halves(12, 0)
    assert (found.num_chosen, found.num_tested, found.num_glimpses) == (6, 6, 2)
    assert found.present == agent.grid.centre

    def scores(indices: np.ndarray, location: int) -> np.ndarray:
        pixels = torch.stack([torch.from_numpy(noise.load(int(index))) for index in indices])
        trace = agent.look(normalise(pixels.permute(0, 3, 1, 2)), 2, location)
        return (trace.predictions.numpy() == noise.labels[indices, None]).mean(axis=1)

    each = [scores(chosen, location).mean() for location in range(agent.grid.num_locations)]
    assert found.accuracy == pytest.approx(each)
    assert found.accuracy[found.best] == pytest.approx(max(each))
    gain = (scores(tested, found.best) - scores(tested, found.present)).mean()
    assert found.gain == pytest.approx(gain) and found.low <= gain <= found.high


def test_the_present_location_is_kept_unless_another_is_better_by_more_than_the_noise():
    assert best_location(np.array([[0.5, 0.5, 0.4]]), present=1) == 1
    assert best_location(np.array([[0.5, 0.6, 0.7]]), present=1) == 2
    everywhere = np.array([[0.2, 0.8]])
    better = describe_first_locations(everywhere, np.tile([0.2, 0.8], (20, 1)), 0, 1, 5)
    assert better.chosen == 1 and better.gain == pytest.approx(0.6)
    noise = np.array([[0.2, 0.8], [0.8, 0.2]] * 10)
    assert describe_first_locations(everywhere, noise, 0, 1, 5).chosen == 0


def test_the_result_round_trips_and_is_drawn(evaluation):
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    assert "first-locations" in evaluation_figures(evaluation)
    figure = scenes.first_locations(evaluation)
    assert len(figure.axes[0].texts) == 12 and len(figure.axes[0].patches) == 2
    values = json.loads(evaluation.to_json())
    values["first_locations"]["best"] = 12
    with pytest.raises(ConfigError, match="first_locations has a location 12 of 12"):
        Evaluation.from_json(json.dumps(values))


def test_a_system_that_begins_in_its_own_way_has_none():
    with pytest.raises(ConfigError, match="begins in its own way"):
        evaluate(WholeThenCrops(), NoiseScenes(4), fast_plan(first_locations=True))


def test_sessions_and_predictions_begin_where_the_agent_says():
    agent = make_agent(first_location=(0, 3))
    image = NoiseScenes().load(0)
    assert agent.session().location == agent.predict(image).path[0] == (0, 3)
    assert agent.session((1, 1)).location == (1, 1)
    assert make_agent().session().location == make_agent().grid.row_column(make_agent().grid.centre)
    assert AgentConfig.from_json(agent.config.to_json()) == agent.config
    with pytest.raises(StamError, match="outside|grid"):
        dataclasses.replace(agent.config, first_location=(3, 0))


def test_the_best_one_is_stored_with_the_weights(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", make_data(tmp_path / "data"), with_teacher=False)
    monkeypatch.setattr("stam.evaluation.results.FirstLocations.chosen", 1)
    words = "--first-locations --store --seeds 1 --glimpses 2 --no-cost --no-figures --examples 0".split()
    main(["evaluate", str(run), *words])
    said = capsys.readouterr()
    assert "first location          " in said.out and "and the first location, in" in said.err
    assert stam.load(run).session().location == (0, 1)
    assert load_evaluation(run / "evaluation.json").first_locations is not None
