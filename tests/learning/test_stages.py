"""A training in stages: cores learn alone and are averaged, then the actor learns."""

import copy
import dataclasses
import re

import pytest
import torch
from learners import AGENT
from torch import Tensor

from stam.config import AgentConfig
from stam.errors import ConfigError
from stam.evaluation.speed import make_learner, random_batch
from stam.learning import one_pass
from stam.learning.exploration import noisy_orders
from stam.learning.loop import Place
from stam.learning.training import AgentLearner
from stam.model.orders import centre_out_order
from stam.scene.grid import Grid
from stam.settings import RunConfig, Stage, TrainingConfig

CAUSAL = dataclasses.replace(AGENT, core="causal", actor="joint", drop_path=0.2)
EPOCHS = 6


def config(agent: AgentConfig = CAUSAL, **training) -> RunConfig:
    settings = {
        "num_glimpses": 4,
        "batch_size": 16,
        "device": "cpu",
        "epochs": EPOCHS,
        "core_fraction": 2 / 3,
    }
    settings |= {"actor_objective": "gains", "base_lr": 1e-2, "actor_lr": 5e-2, "actor_steps": 2}
    return RunConfig(agent=agent, training=TrainingConfig(**(settings | training)))


def learner(**training) -> AgentLearner:
    torch.manual_seed(0)
    return make_learner(config(**training))


def learn(made: AgentLearner, *epochs: int) -> None:
    """Takes epochs of one batch each, as the training loop does."""
    torch.manual_seed(1)
    images, labels = random_batch(made)
    for epoch in epochs:
        made.learn_from(images, labels, Place(epoch, 0, True))
        made.position = (epoch + 1, 0)
        made.end_epoch(epoch)


def part(made: AgentLearner, name: str, used: bool = False) -> dict[str, Tensor]:
    agent = made.agent_to_use if used else made.agent
    return {key: value.clone() for key, value in getattr(agent, name).state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(value.equal(other[key]) for key, value in one.items())


def test_stages_follow_one_another():
    both = TrainingConfig(epochs=10)
    assert both.stages == (Stage("both", 0, 10),)
    apart = TrainingConfig(epochs=10, core_fraction=0.7, num_cores=2)
    assert apart.stages == (Stage("core", 0, 3), Stage("core", 3, 7), Stage("actor", 7, 10))
    assert [apart.stage(epoch).begin for epoch in range(10)] == [0, 0, 0, 3, 3, 3, 3, 7, 7, 7]
    assert TrainingConfig(epochs=10, core_fraction=1.0).stages == (Stage("core", 0, 10),)
    assert TrainingConfig(epochs=10, core_fraction=0.99).stages[-1] == Stage("actor", 9, 10)
    assert TrainingConfig(epochs=10, core_fraction=0.01).stages[0] == Stage("core", 0, 1)


def test_schedules_begin_anew_in_each_stage():
    apart = TrainingConfig(epochs=12, core_fraction=2 / 3, num_cores=2, min_lr=0, large_crop_fraction=0.25)
    rates = [apart.learning_rate(1.0, epoch) for epoch in range(12)]
    assert rates[:4] == rates[4:8] == rates[8:] and rates[0] == 8 and rates[3] < 2
    assert [epoch for epoch in range(12) if apart.has_large_crops(epoch)] == [3, 7, 11]


def test_a_shorter_training_has_no_more_cores_than_epochs_for_them():
    apart = TrainingConfig(epochs=30, core_fraction=0.5, num_cores=3)
    assert apart.with_epochs(60).num_cores == 3
    assert apart.with_epochs(4).num_cores == 2
    assert apart.with_epochs(1).stages == (Stage("both", 0, 1),)


def test_a_training_that_goes_on_for_more_epochs_has_a_longer_last_stage():
    apart = TrainingConfig(epochs=10, core_fraction=0.7, num_cores=2)
    assert apart.extended(15).stages == (*apart.stages[:2], Stage("actor", 7, 15))
    assert TrainingConfig(epochs=10, core_fraction=1.0).extended(15).stages == (Stage("core", 0, 15),)
    assert TrainingConfig(epochs=10).extended(15).stages == (Stage("both", 0, 15),)


def test_weights_are_averaged_over_as_much_of_each_stage():
    apart = TrainingConfig(epochs=14, core_fraction=12 / 14, num_cores=2, ema_batches=90)
    assert [apart.ema_batches_of(stage) for stage in apart.stages] == [90, 90, 30]
    made = learner(epochs=14, core_fraction=12 / 14, ema_batches=90)
    learn(made, 11)
    assert made.averaged.num_batches == 90
    learn(made, 12)
    assert made.averaged.num_batches == 15 and int(made.averaged.n_averaged) == 1


def test_the_best_agent_is_one_whose_actor_has_learned():
    made = learner()
    learn(made, 0)
    made.best = 0.9
    learn(made, 1, 2, 3)
    assert made.best == 0.9
    learn(made, 4)
    assert made.best == -1


def test_rates_of_what_does_not_learn_are_not_told():
    made = learner()
    told = []
    for epoch in (0, 4):
        learn(made, epoch)
        told.append({name for name in made.end_epoch(epoch) if name.startswith("lr/")})
    assert told == [{"lr/core"}, {"lr/actor"}]


def test_an_actor_that_learns_from_gains_has_a_rate_of_its_own_batches():
    rates = [learner(batch_size=size).learning_rates(4) for size in (16, 32)]
    assert rates[0]["actor"] == rates[1]["actor"] == pytest.approx(5e-2 * 256 / 512)
    assert rates[0]["core"] == pytest.approx(rates[1]["core"] / 2)


@pytest.mark.parametrize("epochs", range(5, 12))
@pytest.mark.parametrize("num_cores", [1, 2])
def test_stages_follow_one_another_also_where_the_number_of_epochs_changes(epochs, num_cores):
    """The last epoch that is done may lie before a boundary of the new stages, at it or behind it."""
    made = learner(epochs=12, core_fraction=0.75, num_cores=num_cores, ema_batches=2)
    start = part(made, "core")
    learn(made, 0, 1, 2)
    first = part(made, "core", used=True)
    made.change_epochs(epochs)
    learn(made, *range(3, epochs))
    assert made.learning_part == "actor" and made.stage_is_over
    assert same(part(made, "core"), part(made, "core", used=True))
    found = part(made, "core")
    assert not same(found, start)
    if num_cores == 2:
        assert int(made.soup.state_dict()["n_averaged"]) == 2
    elif made.settings.core_epochs <= 3:
        assert same(found, first)  # what was learned before is not lost


def test_first_the_core_learns_then_the_actor():
    made = learner()
    core, actor = part(made, "core"), part(made, "actor")
    learn(made, 0, 1, 2, 3)
    assert not same(core, part(made, "core")) and same(actor, part(made, "actor"))
    core = part(made, "core")
    learn(made, 4, 5)
    assert same(core, part(made, "core")) and not same(actor, part(made, "actor"))


def test_where_the_actor_learns_alone_nothing_is_learned_from_again(monkeypatch):
    """Its episodes are looked through once, without short ones."""
    made, retraced = learner(short_episodes=2), []
    retrace = one_pass.retrace
    monkeypatch.setattr(one_pass, "retrace", lambda *given: retraced.append(given) or retrace(*given))
    learn(made, 0)
    assert len(retraced) == 2  # the short ones together, and the whole one
    learn(made, 4)
    assert len(retraced) == 2 and list(made.replay.kept) == [16]


def test_a_core_that_learns_alone_follows_orders_and_is_not_asked_where_to_look(monkeypatch):
    made = learner()
    asked = []
    monkeypatch.setattr(made.agent.actor, "forward", lambda *given: asked.append(given))
    learn(made, 0)
    assert not asked and not made.replay.kept


def test_nothing_is_dropped_while_the_actor_learns():
    states = []
    for rate in (0.0, 0.5):
        torch.manual_seed(0)
        given = config(core_fraction=1 / 6)
        made = make_learner(dataclasses.replace(given, agent=dataclasses.replace(CAUSAL, drop_path=rate)))
        start = part(made, "core")
        learn(made, 0)
        made.agent.core.load_state_dict(start)
        made.agent_to_use.core.load_state_dict(start)
        learn(made, 1)
        states.append(next(iter(made.replay.kept.values()))[0])
    assert states[0].equal(states[1])


@pytest.mark.parametrize("ema_batches", [1, 3])
def test_the_actor_learns_with_the_average_of_cores_that_began_alike(ema_batches):
    made = learner(num_cores=2, ema_batches=ema_batches)
    start = part(made, "core")
    learn(made, 0, 1)
    first = part(made, "core", used=True)
    alone = learner(num_cores=2, ema_batches=ema_batches)
    alone.stage_number = 1
    learn(alone, 2, 3)  # the second, with nothing before it
    second = part(alone, "core", used=True)
    assert not same(first, start) and not same(first, second)
    learn(made, 2, 3)
    soup = part(made, "core", used=True)
    for name, value in soup.items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    learn(made, 4, 5)
    assert same(soup, part(made, "core")) and same(soup, part(made, "core", used=True))


def test_the_actor_learns_with_the_average_over_the_last_batches():
    made = learner(ema_batches=3)
    learn(made, 0, 1, 2, 3)
    averaged = part(made, "core", used=True)
    assert not same(averaged, part(made, "core"))
    learn(made, 4)
    assert same(averaged, part(made, "core")) and same(averaged, part(made, "core", used=True))


@pytest.mark.parametrize("stopped_after", range(EPOCHS - 1))
@pytest.mark.parametrize("ema_batches", [1, 3])
def test_a_training_in_stages_goes_on_exactly(stopped_after, ema_batches):
    whole, broken, resumed = (learner(num_cores=2, ema_batches=ema_batches) for _ in range(3))
    learn(whole, *range(EPOCHS))
    learn(broken, *range(stopped_after + 1))
    resumed.load_state_dict(copy.deepcopy(broken.state_dict()))
    learn(resumed, *range(stopped_after + 1, EPOCHS))
    for made, other in ((whole.agent, resumed.agent), (whole.agent_to_use, resumed.agent_to_use)):
        assert same(made.state_dict(), other.state_dict())


def test_orders_begin_at_the_first_location_and_stray_in_half_of_the_scenes():
    grid = Grid(56, 8, 4)
    first = torch.arange(400) % grid.num_locations
    found = noisy_orders(grid, first, 12, torch.Generator().manual_seed(0))
    assert found[:, 0].equal(first)
    assert all(len(set(row)) == 12 for row in found.tolist())
    orders = [
        [location, *(each for each in centre_out_order(grid) if each != location)] for location in first
    ]
    faithful = [row == order[:12] for row, order in zip(found.tolist(), orders, strict=True)]
    assert 0.4 < sum(faithful) / 400 < 0.65
    assert len(set(found[:, 11].tolist())) > 30  # some stray far


@pytest.mark.parametrize(
    ("agent", "training", "message"),
    [
        ({"core": "reencoding"}, {"actor_objective": "actor-critic"}, "pass --core causal, not reencoding"),
        ({"policy": "plus"}, {"actor_objective": "actor-critic"}, "pass --core-fraction 1 or 0"),
        ({}, {"actor_objective": "actor-critic"}, "pass --actor-objective gains, or --core-fraction 0"),
        ({}, {"core_fraction": 1.5}, "core_fraction must be from 0 to 1, got 1.5"),
        ({}, {"core_fraction": 1.0}, "leaves no epoch for the actor of policy learned"),
        ({}, {"num_cores": 5}, "pass a larger --core-fraction than 0.666667, or more --epochs than 6"),
        ({}, {"num_cores": 2, "core_fraction": 0.0}, "num_cores 2 needs as many epochs"),
        ({}, {"num_cores": 0}, "num_cores must be at least 1"),
    ],
)
def test_stages_that_cannot_be_are_refused(agent, training, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(dataclasses.replace(CAUSAL, **agent), **training)


def test_an_agent_without_an_actor_is_a_core_that_learned_alone():
    agent = dataclasses.replace(CAUSAL, policy="spiral")
    torch.manual_seed(0)
    made = make_learner(config(agent, core_fraction=1.0, num_cores=2, actor_objective="actor-critic"))
    learn(made, *range(EPOCHS))
    assert made.agent.actor is None
    assert same(part(made, "core"), part(made, "core", used=True))
