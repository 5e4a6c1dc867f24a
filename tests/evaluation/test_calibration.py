"""One temperature that makes confidence mean accuracy."""

import numpy as np
import pytest
import torch
from evaluating import NoiseScenes, fast_plan, make_agent

from stam.evaluation import evaluate
from stam.evaluation.calibration import TemperatureSearch, reliability
from stam.model.episode import Trace
from stam.scene.grid import Grid


def trace_of(logits: torch.Tensor) -> Trace:
    locations = torch.zeros(logits.shape[:2], dtype=torch.long)
    return Trace(locations, logits, logits, logits.softmax(-1), Grid(24, 8, 4))


@pytest.mark.parametrize("true_temperature", [0.4, 1.0, 2.7])
def test_the_temperature_is_found(true_temperature):
    generator = torch.Generator().manual_seed(0)
    honest = 1.5 * torch.randn(6000, 2, 6, generator=generator)
    labels = torch.multinomial(honest[:, 0].softmax(-1), 1, generator=generator)[:, 0]
    honest[:, 1] = honest[:, 0]
    search = TemperatureSearch()
    for part, truth in zip((true_temperature * honest).split(2000), labels.split(2000), strict=True):
        search.add(trace_of(part), truth)
    assert search.best() == pytest.approx(true_temperature, rel=0.05)


def test_an_agent_that_is_never_right_gets_the_highest_temperature():
    search = TemperatureSearch()
    search.add(trace_of(torch.tensor([[[9.0, 0.0, 0.0]]])), torch.tensor([1]))
    assert search.best() == pytest.approx(10)


def test_the_calibration_error_by_hand():
    confidences = np.array([0.95, 0.95, 0.95, 0.95, 0.3, 0.3], dtype=np.float32)
    correct = np.array([1, 1, 1, 0, 0, 0], dtype=bool)
    found = reliability(confidences, correct, np.ones(6, dtype=np.float32))
    assert found.ece == pytest.approx((4 * (0.95 - 0.75) + 2 * 0.3) / 6)
    assert found.nll == 1 and sum(found.counts) == 6
    assert (found.counts[14], found.counts[4]) == (4, 2)
    assert found.accuracy[14] == pytest.approx(0.75) and found.confidence[4] == pytest.approx(0.3)
    assert reliability(np.array([1.0, 0.0], np.float32), correct[:2], np.ones(2, np.float32)).counts[14] == 1


def test_calibration_lowers_the_loss_of_an_overconfident_agent():
    agent = make_agent()
    with torch.no_grad():
        for head in (agent.core.head, agent.core.head_dist):
            head.weight *= 4
    found = evaluate(agent, NoiseScenes(60), fast_plan()).calibration
    assert found.temperature > 2
    assert found.after.nll < found.before.nll and found.after.ece < found.before.ece
    assert found.num_fitted == found.num_reported == 30
    assert sum(found.after.counts) == 30 * 2 * 12


def test_a_stored_temperature_does_not_change_the_evaluation():
    agent, scenes = make_agent(), NoiseScenes(12)
    before = evaluate(agent, scenes, fast_plan())
    after = evaluate(agent.configure(temperature=3.0, threshold=0.2), scenes, fast_plan())
    assert after == before
