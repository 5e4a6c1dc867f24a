"""Confusions, classes, mistakes and chance against naive counts; intervals and tests against known ones."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from evaluating import NoiseScenes, WholeThenCrops, fast_plan, gridless_evaluation, make_agent

from stam.data import open_scenes
from stam.data.scenes import Subset, name_of
from stam.errors import ConfigError
from stam.evaluation import Evaluation, compare, evaluate
from stam.evaluation.answers import accuracy_of_classes, chance_of, confusion_of
from stam.evaluation.intervals import binomial_tail, bootstrap_interval, sign_flip_test
from stam.evaluation.scenes import first_locations
from stam.scene.pixels import normalise

SCENES = NoiseScenes(25)


@pytest.fixture(scope="module", params=["reencoding", "causal"])
def pair(request) -> tuple[Evaluation, Evaluation]:
    """Two agents with one core, on the same scenes."""
    plan = fast_plan(num_glimpses=3)
    one, other = (evaluate(make_agent(seed, core=request.param), SCENES, plan) for seed in (0, 1))
    return one, other


def test_answers_are_what_a_naive_loop_counts():
    agent = make_agent()
    found = evaluate(agent, SCENES, fast_plan(num_glimpses=3)).answers
    pixels = torch.stack([torch.from_numpy(SCENES.load(index)) for index in range(len(SCENES))])
    images, counts = normalise(pixels.permute(0, 3, 1, 2)), np.zeros((5, 5), int)
    traces = [agent.look(images, 3, first_locations(agent.grid, np.arange(25), seed)) for seed in (0, 1)]
    for trace in traces:
        np.add.at(counts, (SCENES.labels, trace.predictions[:, -1].numpy()), 1)
    assert found.confusion.num_answers == (10,) * 5
    assert {(t, a): n for t, a, n in found.confusion.cells} == {
        (t, a): counts[t, a] for t, a in zip(*np.nonzero(counts), strict=True)
    }
    np.testing.assert_allclose(found.confusion.shares(range(5)), counts / 10)
    assert found.per_class.accuracy == pytest.approx(np.diag(counts) / 10)
    assert found.per_class.weakest(1) == [int(np.diag(counts).argmin())]
    first = traces[0]
    wrong = first.predictions[:, -1].numpy() != SCENES.labels
    worst = found.mistakes[0]
    assert wrong[worst.scene] and worst.image == f"scene {worst.scene}" and len(found.mistakes) == 8
    assert worst.confidence == pytest.approx(first.confidences[:, -1].numpy()[wrong].max(), abs=1e-5)
    assert worst.locations == tuple(first.locations[worst.scene].tolist())
    right = sum(trace.predictions.numpy() == SCENES.labels[:, None] for trace in traces)
    evaluation = evaluate(agent, SCENES, fast_plan(num_glimpses=3))
    np.testing.assert_allclose(evaluation.scores(), right / 2)


def test_a_looker_without_a_grid_has_answers_too():
    found = gridless_evaluation().answers
    assert [cell[1] for cell in found.confusion.cells] == [0] * 5  # it always answers the first class
    assert found.per_class.accuracy == (1, 0, 0, 0, 0) and found.mistakes[0].locations == ()
    assert (
        gridless_evaluation().is_at_chance
        and "not above the 20.0 %" in gridless_evaluation().chance_in_words()
    )


def test_a_looker_of_another_kind_is_evaluated_in_single_precision(monkeypatch):
    asked = []
    module = sys.modules["stam.evaluation.evaluate"]
    monkeypatch.setattr(module, "autocast", lambda device, precision: asked.append(precision))
    for looker in (WholeThenCrops(), make_agent()):
        with pytest.raises((AttributeError, TypeError)):  # what stands in for autocast is no context
            evaluate(looker, SCENES, fast_plan(precision="auto"))
    assert asked == ["float32", "auto"]


def test_intervals_hold_what_they_should():
    values = (np.arange(400) % 4 == 0).astype(float)
    low, high = bootstrap_interval(np.stack([values, np.ones(400)], axis=1))
    assert low[0] == pytest.approx(0.25 - 1.96 * 0.0217, abs=0.004)
    assert high[0] == pytest.approx(0.25 + 1.96 * 0.0217, abs=0.004)
    assert (low[1], high[1]) == (1, 1)
    again = bootstrap_interval(np.stack([values, np.ones(400)], axis=1))
    assert np.array_equal(low, again[0]) and np.array_equal(high, again[1])


def test_curves_have_their_interval(pair):
    for curve in (pair[0].accuracy.ensemble.top1, pair[0].accuracy.distill_head.top5):
        ends = np.array([curve.low, curve.mean, curve.high])
        assert (np.diff(ends, axis=0) >= -1e-6).all() and len(curve.low) == 3


def test_the_sign_flip_test_is_mcnemars_for_single_answers():
    assert sign_flip_test(np.zeros(10)) == 1.0
    eight_to_two = np.array([1.0] * 8 + [-1.0] * 2 + [0.0] * 30)
    assert sign_flip_test(eight_to_two) == pytest.approx(0.1094, abs=0.01)  # 2 P(X >= 8), binomial
    assert sign_flip_test(np.ones(30)) < 0.001
    assert sign_flip_test(np.array([0.5, -0.5] * 9)) == 1.0


def test_binomial_tails():
    assert binomial_tail(5, 10, 0.5) == pytest.approx(0.623, abs=1e-3)
    assert binomial_tail(0, 10, 0.5) == binomial_tail(3, 3, 1.0) == 1.0
    assert binomial_tail(600, 50_000, 0.001) < 1e-100


def test_chance_is_the_share_of_the_largest_class():
    labels = np.array([0] * 60 + [1] * 40)
    always_first = (labels == 0)[:, None]
    assert chance_of(labels, always_first).explains_it and chance_of(labels, always_first).share == 0.6
    assert not chance_of(labels, np.arange(100)[:, None] < 75).explains_it


def test_a_class_without_scenes_is_not_among_the_weakest():
    found = accuracy_of_classes(np.array([0, 2]), np.array([[True], [False]]), 4)
    assert found.num_scenes == (1, 0, 1, 0) and found.weakest(9) == [2, 0]
    assert confusion_of(np.array([0, 2]), np.array([[0], [1]]), 4).mistaken() == [(2, 1, 1)]


def test_runs_are_tested_on_the_same_images(pair):
    found = compare(pair, ["one", "other"])
    (test,) = found.tests
    scores = [evaluation.scores()[:, -1] for evaluation in pair]
    assert test.difference == pytest.approx((scores[1] - scores[0]).mean()) and test.num_images == 25
    assert test.low <= test.difference <= test.high and 0 < test.p_value <= 1
    assert test.num_better == (scores[1] > scores[0]).sum()
    (difference,) = found.differences
    assert difference.mean[-1] == pytest.approx(test.difference)
    assert (difference.low[-1], difference.high[-1]) == pytest.approx((test.low, test.high))
    assert found.to_markdown().splitlines()[-1].startswith("| other | one | ")
    undigested = dataclasses.replace(pair[0], data=dataclasses.replace(pair[0].data, digest=""))
    assert compare([undigested, pair[1]]).tests == ()  # not certain to be the same images


def test_a_run_compared_with_itself_differs_in_nothing(pair):
    (test,) = compare([pair[0], pair[0]]).tests
    assert (test.difference, test.low, test.high, test.p_value) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right": ["AAAA"]}, "right must have 3 entries"),
        ({"right": ["AAAA"] * 3}, "right must have 25 entries, got 3"),
        ({"right": ["?"] * 3}, "right is not base64"),
        ({"confusion": {"num_answers": [10] * 5, "cells": [[0, 9, 1]]}}, "a class 9 of 5"),
        ({"confusion": {"num_answers": [10] * 5, "cells": [[0, 1, 11]]}}, "counts 11 of 10 answers"),
    ],
)
def test_answers_that_cannot_be_are_refused(pair, change, message):
    values = json.loads(pair[0].to_json())
    values["answers"] |= change
    with pytest.raises(ConfigError, match=message):
        Evaluation.from_json(json.dumps(values))


def test_scenes_are_called_what_they_are_called():
    class Named(NoiseScenes):
        def name(self, index):
            return f"a/{index}\udcff.png"

    assert name_of(Subset(Named(), np.array([3, 4])), 1) == "a/4?.png"
    assert name_of(open_scenes("digits").val, 2) == "scene 2"
