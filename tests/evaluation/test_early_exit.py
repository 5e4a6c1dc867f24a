"""Early exit: exact sweeps, fitted thresholds, and samples that really leave the batch."""

import math

import numpy as np
import pytest
import torch
from evaluating import NoiseScenes, fast_plan, make_agent
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stam.errors import ConfigError, StamError
from stam.evaluation import evaluate, fit_threshold, look_until_sure, sweep
from stam.evaluation.early_exit import ExitCurve, TimedBatch, exit_counts, time_early_exit
from stam.evaluation.scenes import first_locations, random_orders
from stam.scene.sensor import ImageSensor


@pytest.fixture
def scenes() -> torch.Tensor:
    return torch.randn(16, 3, 24, 32, generator=torch.Generator().manual_seed(5))


def exits_by_hand(trace, threshold):
    """The first glimpse whose confidence is above the threshold, or the last."""
    above = trace.confidences > threshold
    above[:, -1] = True
    return above.int().argmax(dim=1) + 1


@pytest.mark.parametrize("policy", ["learned", "random", "spiral"])
def test_looking_until_sure_is_looking_and_stopping(scenes, policy):
    agent = make_agent()
    first = first_locations(agent.grid, np.arange(16), 0)
    chosen = random_orders(agent.grid, np.arange(16), 0) if policy == "random" else agent.policy(policy)
    trace = agent.look(scenes, 12, first, chosen)
    for threshold in (0.0, float(trace.confidences.median()), math.inf):
        found = look_until_sure(agent, scenes, threshold, first, chosen)
        counts = exits_by_hand(trace, threshold)
        assert found.num_glimpses.equal(counts)
        last = trace.probabilities[torch.arange(16), counts - 1]
        torch.testing.assert_close(found.probabilities, last, atol=1e-5, rtol=0)
        assert found.predictions.equal(last.argmax(1))
        for row, count in enumerate(counts):
            assert found.locations[row, :count].equal(trace.locations[row, :count])
            assert (found.locations[row, count:] == -1).all()


def test_whoever_is_sure_leaves_the_batch(scenes):
    agent, rows = make_agent(), []
    agent.core.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    first = first_locations(agent.grid, np.arange(16), 0)
    threshold = float(agent.look(scenes, 12, first).confidences[:, 4].median())
    rows.clear()
    found = look_until_sure(agent, scenes, threshold, first, agent.policy())
    assert sum(rows) == int(found.num_glimpses.sum())
    assert rows[0] == 16 and rows == sorted(rows, reverse=True) and rows[-1] < 16


def test_a_limit_on_glimpses_holds(scenes):
    agent = make_agent()
    first = torch.zeros(16, dtype=torch.long)
    assert (look_until_sure(agent, scenes, math.inf, first, agent.policy(), 3).num_glimpses == 3).all()
    with pytest.raises(StamError, match="num_glimpses must be 1 to 12"):
        look_until_sure(agent, scenes, 0.5, first, agent.policy(), 13)


def test_temperature_makes_it_stop_later(scenes):
    agent = make_agent()
    first = torch.zeros(16, dtype=torch.long)
    sharp, flat = (
        look_until_sure(agent, scenes, 0.4, first, agent.policy(), temperature=temperature).num_glimpses
        for temperature in (1.0, 5.0)
    )
    assert flat.sum() > sharp.sum()


def test_a_live_session_stops_where_evaluation_does(scenes):
    agent = make_agent().configure(threshold=0.45, temperature=0.8)
    first = first_locations(agent.grid, np.arange(16), 0)
    found = look_until_sure(agent, scenes, 0.45, first, agent.policy(), temperature=0.8)
    for row in range(4):
        step = agent.session(int(first[row])).run(ImageSensor(scenes[row], agent.grid))
        assert step.num_glimpses == found.num_glimpses[row]
        assert step.label == agent.labels[int(found.predictions[row])]


CONFIDENCES = arrays(np.float32, (7, 5), elements=st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]))


@given(CONFIDENCES, arrays(np.bool_, (7, 5)), st.sampled_from([0.0, 0.2, 0.3, 0.5, 0.69, 0.9, 1.0]))
def test_the_curve_is_exact_at_any_threshold(confidences, correct, threshold):
    trace = type("T", (), {"confidences": torch.from_numpy(confidences)})
    counts = exits_by_hand(trace, np.float32(threshold)).numpy()
    accuracy, glimpses = ExitCurve(confidences, correct).at([np.float32(threshold)])
    assert glimpses[0] == pytest.approx(counts.mean())
    assert accuracy[0] == pytest.approx(correct[np.arange(7), counts - 1].mean())
    assert exit_counts(confidences, float(np.float32(threshold))).tolist() == counts.tolist()


def looks(seed: int, scenes: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """An agent that grows surer and righter, and means what it says: two seeds, ten glimpses."""
    random = np.random.default_rng(seed)
    sure = np.clip(np.linspace(0.2, 0.95, 10) + 0.2 * random.standard_normal((scenes, 2, 10)), 0.05, 0.999)
    return sure.astype(np.float32), random.random(sure.shape) < sure


def test_a_threshold_for_an_accuracy_is_the_earliest_that_reaches_it():
    fit = fit_threshold(*looks(0), *looks(1), target_accuracy=0.8)
    assert fit.goal == "accuracy" and fit.reached and fit.fitted.accuracy >= 0.8
    earlier = ExitCurve(*(part.reshape(-1, 10) for part in looks(0))).at([fit.threshold - 0.02])
    assert earlier[0][0] < 0.8 and earlier[1][0] < fit.fitted.mean_glimpses
    assert fit.reported.accuracy == pytest.approx(0.8, abs=0.05)
    assert sum(fit.exits) == 800
    mean = np.average(np.arange(1, 11), weights=fit.exits)
    assert mean == pytest.approx(fit.reported.mean_glimpses)


def test_a_threshold_for_a_budget_uses_it_up():
    fit = fit_threshold(*looks(0), *looks(1), budget=3.5)
    assert fit.goal == "budget" and fit.reached
    assert 3.4 < fit.fitted.mean_glimpses <= 3.5
    assert fit.reported.mean_glimpses == pytest.approx(3.5, abs=0.3)


def test_an_accuracy_out_of_reach_is_said_to_be():
    fit = fit_threshold(*looks(0), *looks(1), target_accuracy=1.0)
    assert not fit.reached and fit.goal_value == 1.0
    accuracy, _ = ExitCurve(*(part.reshape(-1, 10) for part in looks(0))).at(np.linspace(0, 1, 1001))
    assert fit.fitted.accuracy >= accuracy.max()


def test_the_default_goal_is_a_point_below_every_glimpse():
    confidences, correct = looks(0)
    fit = fit_threshold(confidences, correct, *looks(1))
    assert fit.goal_value == pytest.approx(correct[..., -1].mean() - 0.01)


def test_the_reported_half_has_no_say():
    one, other = (fit_threshold(*looks(0), *looks(seed), target_accuracy=0.75) for seed in (1, 2))
    assert one.threshold == other.threshold and one.fitted == other.fitted
    assert one.reported != other.reported


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"budget": 0.5}, "budget must be 1 to 10 glimpses, got 0.5"),
        ({"budget": 2, "target_accuracy": 0.5}, "not both"),
        ({"target_accuracy": 0.0}, "target accuracy must be above 0"),
    ],
)
def test_a_goal_that_makes_no_sense_is_refused(goal, message):
    with pytest.raises(ConfigError, match=message):
        fit_threshold(*looks(0), *looks(1), **goal)


def test_the_sweep_runs_from_one_glimpse_to_all():
    confidences, correct = looks(0)
    found = sweep(confidences, correct)
    assert found.thresholds[0] == 0 and found.thresholds[-1] == 1
    assert found.mean_glimpses[0] == 1 and found.mean_glimpses[-1] == 10
    assert list(found.mean_glimpses) == sorted(found.mean_glimpses)
    assert found.accuracy[0] == pytest.approx(correct[..., 0].mean())
    assert found.accuracy[-1] == pytest.approx(correct[..., -1].mean())
    assert sweep(confidences[:, :1], correct[:, :1]).accuracy_std == (0.0,) * len(found.thresholds)


def test_timing_takes_the_same_scenes_both_ways(scenes):
    agent = make_agent().prepared()
    first = first_locations(agent.grid, np.arange(16), 0)
    trace = agent.look(scenes, 12, first)
    labels = trace.predictions[:, -1]
    threshold = float(trace.confidences[:, 3].median())
    batches = [
        TimedBatch(scenes[part], labels[part], first[part], agent.policy())
        for part in (slice(0, 10), slice(10, 16))
    ]
    found = time_early_exit(agent, batches, threshold, 12)
    assert (found.num_scenes, found.batch_size, found.device) == (16, 10, "cpu")
    assert found.all_glimpses == 12 and found.all_accuracy == 1
    assert found.early_glimpses == pytest.approx(float(exits_by_hand(trace, threshold).float().mean()))
    assert found.all_seconds > 0 and found.early_seconds > 0
    assert found.time_saved == pytest.approx(1 - found.early_seconds / found.all_seconds)
    assert found.glimpses_saved == pytest.approx(1 - found.early_glimpses / 12)


def test_an_evaluation_times_the_half_it_reports_on():
    found = evaluate(make_agent(), NoiseScenes(20), fast_plan(most_timed=10, num_seeds=1)).early_exit
    assert found.timing.num_scenes == 10
    assert found.timing.early_glimpses == pytest.approx(found.fit.reported.mean_glimpses)
    assert found.timing.early_accuracy == pytest.approx(found.fit.reported.accuracy)
