"""The causal core: each glimpse encoded once gives what one masked pass over all of them gives."""

import json

import pytest
import torch
from agents import randomise, tiny_config
from sessions import feed, sensor_of

import stam
from stam.config import AgentConfig
from stam.errors import ConfigError
from stam.model.causal import CausalMemory
from stam.model.core import Core, Memory, OnePassCore
from stam.weights.opening import start_agent

GEOMETRIES = {
    "four patches a glimpse": {},
    "one patch a glimpse": {"glimpse_size": 4},
    "six patches a glimpse": {"image_size": (24, 24), "glimpse_size": (8, 12)},
    "one block": {"depth": 1},
}


def causal_agent(**settings) -> stam.Agent:
    agent = stam.Agent(tiny_config(core="causal", **settings))
    randomise(agent)
    return agent.eval()


def steps_one_by_one(agent, images, locations) -> torch.Tensor:
    memory, features = None, []
    for place in locations.unbind(1):
        memory = agent.remember(memory, agent.grid.cut(images, place[:, None])[:, 0], place)
        features.append(agent.core.read(memory))
    return torch.stack(features, dim=1)


def steps_at_once(agent, images, locations, drop_masks=None) -> torch.Tensor:
    beliefs = agent.believe_all(agent.grid.cut(images, locations), locations, drop_masks)
    return torch.stack([belief.state for belief in beliefs], dim=1).unflatten(2, (2, -1))


def some_scenes(agent, batch=3, count=7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(batch, 3, *agent.grid.image_size, generator=generator)
    most = agent.grid.num_locations
    orders = torch.stack([torch.randperm(most, generator=generator)[:count] for _ in range(batch)])
    return images, orders


def test_it_is_a_core():
    core = causal_agent().core
    assert isinstance(core, Core) and isinstance(core, OnePassCore)
    assert not isinstance(stam.Agent(tiny_config()).core, OnePassCore)


@pytest.mark.parametrize("settings", GEOMETRIES.values(), ids=GEOMETRIES)
@torch.no_grad()
def test_remembering_glimpse_by_glimpse_gives_what_one_pass_gives(settings):
    agent = causal_agent(**settings)
    images, locations = some_scenes(agent, count=min(7, agent.grid.num_locations))
    one_by_one, at_once = (step(agent, images, locations) for step in (steps_one_by_one, steps_at_once))
    torch.testing.assert_close(one_by_one, at_once, atol=1e-4, rtol=0)
    assert (at_once[:, 1:] - at_once[:, :-1]).abs().amax(dim=(0, 2, 3)).min() > 0.01  # every glimpse tells


@torch.no_grad()
def test_the_first_glimpse_is_read_as_by_the_faithful_core_and_later_ones_are_not():
    causal, faithful = causal_agent(), stam.Agent(tiny_config()).eval()
    faithful.load_state_dict(causal.state_dict())
    images, locations = some_scenes(causal, count=3)
    got, want = (steps_one_by_one(agent, images, locations) for agent in (causal, faithful))
    assert got[:, 0].equal(want[:, 0])
    assert (got[:, 1:] - want[:, 1:]).abs().amax(dim=(0, 2, 3)).min() > 1e-3


@torch.no_grad()
def test_no_step_depends_on_a_later_glimpse():
    agent = causal_agent()
    images, locations = some_scenes(agent)
    other = locations.clone()
    other[:, 4:] = other[:, 4:].flip(1)
    before, after = (steps_at_once(agent, images, places) for places in (locations, other))
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-5, rtol=0)
    assert (before[:, 4] - after[:, 4]).abs().max() > 0.01


@torch.no_grad()
def test_samples_at_different_steps_share_a_batch():
    """One sample has seen a glimpse, one four, one two; joined, all go on as they would alone."""
    agent = causal_agent()
    images, locations = some_scenes(agent, count=8)
    want = steps_at_once(agent, images, locations)
    counts = [1, 4, 2]
    memories = []
    for sample, count in enumerate(counts):
        memory = None
        for place in locations[sample, :count]:
            memory = agent.remember(memory, cut(agent, images, sample, place), place[None])
        memories.append(memory)
    joined = memories[0].join(memories)
    assert isinstance(joined, Memory) and isinstance(joined, CausalMemory)
    for further in range(3):
        wanted = torch.stack([want[sample, count + further - 1] for sample, count in enumerate(counts)])
        torch.testing.assert_close(agent.core.read(joined), wanted, atol=1e-4, rtol=0)
        places = torch.stack([locations[sample, count + further] for sample, count in enumerate(counts)])
        joined = agent.remember(joined, agent.grid.cut(images, places[:, None])[:, 0], places)
    # those that are left need no more padding than they have
    left = joined.select(torch.tensor([2, 0]))
    assert left.cache.shape[4] == 4 * 5 and left.padding.tolist() == [0, 4]
    alone = joined.select(torch.tensor([1]))
    assert alone.cache.shape[4] == 4 * 7 and alone.padding is None
    again = left.join([left, alone])
    places = torch.stack([locations[2, 5], locations[0, 4], locations[1, 7]])
    order = torch.tensor([2, 0, 1])
    again = agent.remember(again, agent.grid.cut(images[order], places[:, None])[:, 0], places)
    wanted = torch.stack([want[2, 5], want[0, 4], want[1, 7]])
    torch.testing.assert_close(agent.core.read(again), wanted, atol=1e-4, rtol=0)


@torch.no_grad()
def test_glimpses_that_are_tried_give_what_remembering_one_of_them_would():
    """After another number of glimpses in each sample, all of them in one pass."""
    agent = causal_agent()
    images, locations = some_scenes(agent, count=6)
    memory = None
    for place in locations.unbind(1):
        memory = agent.remember(memory, agent.grid.cut(images, place[:, None])[:, 0], place)
    counts, tried = torch.tensor([1, 5, 3]), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [11, 2, 9, 0]])
    belief = agent.believe_each(memory, counts, agent.grid.cut(images, tried), tried)
    wanted = []
    for sample, count in enumerate(counts.tolist()):
        for place in tried[sample]:
            path = torch.cat((locations[sample, :count], place[None]))[None]
            wanted.append(steps_one_by_one(agent, images[sample : sample + 1], path)[:, -1])
    torch.testing.assert_close(belief.state, torch.cat(wanted).flatten(1), atol=1e-4, rtol=0)


def cut(agent, images, sample, place) -> torch.Tensor:
    return agent.grid.cut(images[sample : sample + 1], place[None, None])[:, 0]


@torch.no_grad()
def test_drop_path_is_the_same_at_every_step_of_a_sample():
    agent = causal_agent(drop_path=0.5, depth=3).train()
    images, locations = some_scenes(agent)
    masks = agent.sample_drop_path(3, torch.Generator().manual_seed(1))
    everything_dropped = torch.zeros_like(masks)
    plain, dropped = steps_at_once(agent, images, locations), steps_at_once(agent, images, locations, masks)
    assert (plain - dropped).abs().max() > 0.1
    alike = steps_at_once(agent, images, locations, everything_dropped)
    torch.testing.assert_close(alike, alike[:1, :1].expand_as(alike))  # the read-out tokens as they began
    first = steps_at_once(agent, images, locations[:, :2], masks)
    torch.testing.assert_close(first, dropped[:, :2], atol=1e-5, rtol=0)


def test_gradients_of_all_steps_reach_the_core():
    agent = causal_agent()
    images, locations = some_scenes(agent)
    steps_at_once(agent, images, locations).square().sum().backward()
    ungraded = [name for name, p in agent.core.named_parameters() if p.grad is None or not p.grad.any()]
    assert all(name.startswith("head") for name in ungraded)


def test_looks_early_exit_and_sessions_say_the_same():
    agent = causal_agent()
    images, _ = some_scenes(agent)
    trace = agent.look(images, 12, first_location=5)
    assert trace.locations.sort().values.equal(torch.arange(12).expand(3, -1))
    session = agent.session(first_location=5)
    steps = feed(session, sensor_of(agent, images[0]), 12)
    said = torch.stack([step.probabilities for step in steps])
    torch.testing.assert_close(said, trace.probabilities[0], atol=1e-5, rtol=0)


def test_an_agent_is_saved_and_begun_from_a_faithful_one(tmp_path):
    faithful = stam.Agent(tiny_config())
    randomise(faithful)
    stam.weights.save_agent(faithful, tmp_path / "faithful")
    started = start_agent(str(tmp_path / "faithful"), tiny_config(core="causal"))
    assert started.config.core == "causal"
    assert all(value.equal(started.state_dict()[name]) for name, value in faithful.state_dict().items())
    stam.weights.save_agent(started, tmp_path / "causal")
    loaded = stam.load(tmp_path / "causal")
    images, _ = some_scenes(loaded)
    got, want = (agent.look(images, 4, first_location=1).probabilities for agent in (loaded, started.eval()))
    assert got.equal(want)


def test_a_configuration_without_a_core_is_the_papers():
    old = json.loads(tiny_config().to_json())
    assert old.pop("core") == "reencoding"
    assert AgentConfig.from_json(json.dumps(old)) == tiny_config()
    with pytest.raises(ConfigError, match="core 'cashed' is unknown: did you mean 'causal'"):
        tiny_config(core="cashed")
