"""Packed weights say what the weights say, are packed again when those change, and leave no trace."""

import copy
import dataclasses

import pytest
import torch

import stam
from stam.fast.cpu import Linear, PackedWeights
from stam.learning.optimisation import make_optimiser

CONFIG = stam.AgentConfig(
    num_classes=5,
    image_size=32,
    glimpse_size=8,
    patch_size=4,
    width=192,
    depth=2,
    num_heads=3,
    actor_width=512,
    critic_width=8,
)

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN to pack for")


@packs
@torch.no_grad()
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (3, 100)])
def test_a_packed_layer_agrees_with_a_plain_one(rows):
    torch.manual_seed(0)
    layer = Linear(32, 48)
    x = torch.randn(*rows, 32)
    plain, activated = layer(x), layer.with_gelu(x)
    with PackedWeights(layer, least=0).in_use():
        assert layer.packed is not None
        torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.with_gelu(x), activated, atol=1e-5, rtol=1e-5)
    assert layer.packed is None


@packs
@torch.no_grad()
def test_weights_that_changed_are_packed_again():
    layer = Linear(8, 8)
    weights, x = PackedWeights(layer, least=0), torch.randn(3, 8)
    with weights.in_use():
        first = layer.packed
    with weights.in_use():
        assert layer.packed is first
    layer.weight.mul_(2)
    with weights.in_use():
        torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias, atol=1e-5, rtol=1e-5)


def test_nothing_is_packed_while_learning_or_in_half_precision():
    layer = Linear(8, 8)
    with PackedWeights(layer, least=0).in_use():
        assert layer.packed is None
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        PackedWeights(layer, least=0).in_use(),
    ):
        assert layer.packed is None


def test_small_layers_are_left_alone():
    layers = torch.nn.Sequential(Linear(8, 8), Linear(512, 512))
    with torch.no_grad(), PackedWeights(layers).in_use():
        assert [layer.packed is None for layer in layers] == [True, not torch.backends.mkldnn.is_available()]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_look_agrees_with_what_is_computed_without_packing(depth):
    torch.manual_seed(0)
    agent = train_norms(stam.Agent(dataclasses.replace(CONFIG, depth=depth)).eval())
    images = torch.randn(3, 3, 32, 32)
    trace = agent.look(images, 5)
    seen = torch.zeros(3, 16, dtype=torch.bool)
    for count in range(1, 6):
        locations = trace.locations[:, :count]
        patches = agent.grid.patches(agent.grid.cut(images, locations))
        with torch.no_grad():
            belief = agent.believe(stam.model.agent.Memory(locations, patches))
            seen = seen.scatter(1, locations, True)
            chosen = agent.policy().choose(belief.state, seen)
        torch.testing.assert_close(
            trace.class_logits[:, count - 1], belief.class_logits, atol=1e-5, rtol=1e-4
        )
        assert count == 5 or chosen.equal(trace.locations[:, count])


def train_norms(agent: stam.Agent) -> stam.Agent:
    """Gives the actor's norms something to do."""
    for norm in (agent.actor.bn0, agent.actor.bn1, agent.actor.bn2):
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.data.uniform_(0.5, 1.5)
    return agent


@packs
@torch.no_grad()
def test_packed_layers_include_the_norm_that_comes_next():
    torch.manual_seed(0)
    actor = train_norms(stam.Agent(CONFIG).eval()).actor
    weights, state = PackedWeights(actor), torch.randn(3, 2 * CONFIG.width)
    candidates = torch.arange(12).repeat(3, 1)
    plain = actor(state, candidates)
    with weights.in_use(), actor.thinking():
        assert actor.fc1.packed_with_norm is not None
        torch.testing.assert_close(actor(state, candidates), plain, atol=1e-5, rtol=1e-4)
    actor.bn2.running_mean.add_(1)
    moved = actor(state, candidates)
    assert not torch.allclose(moved, plain)
    with weights.in_use(), actor.thinking():
        torch.testing.assert_close(actor(state, candidates), moved, atol=1e-5, rtol=1e-4)
    actor.train()  # a norm that is trained is not included
    learning = copy.deepcopy(actor)(state, candidates)
    with weights.in_use(), actor.thinking():
        assert actor.fc1.packed_with_norm is None
        torch.testing.assert_close(actor(state, candidates), learning, atol=1e-5, rtol=1e-4)


@packs
@torch.no_grad()
def test_what_was_begun_with_other_weights_is_not_gone_on_with():
    torch.manual_seed(0)
    agent = stam.Agent(CONFIG).eval()
    glimpses, locations = torch.randn(2, 2, 3, 8, 8), torch.tensor([[3, 5], [6, 2]])
    with agent.thinking():
        memory = agent.remember(None, glimpses[0], locations[0])
        assert agent.core.can_go_on(memory.started)
    for parameter in agent.parameters():
        parameter.mul_(1.1)
    with agent.thinking():
        memory = agent.remember(memory, glimpses[1], locations[1])
        assert memory.started is None
        found = agent.believe(memory).class_logits
    plain = agent.remember(agent.remember(None, glimpses[0], locations[0]), glimpses[1], locations[1])
    assert plain.started is None
    torch.testing.assert_close(found, agent.believe(plain).class_logits, atol=1e-5, rtol=1e-4)


def test_an_agent_that_is_trained_after_a_look_looks_with_its_new_weights():
    torch.manual_seed(0)
    agent = stam.Agent(CONFIG).eval()
    images, first = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    before = agent.look(images, 3, first)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = agent.look(images, 3, first)
    assert not torch.allclose(before.class_logits, after.class_logits)
    fresh = stam.Agent(CONFIG).eval()
    fresh.load_state_dict(agent.state_dict())
    torch.testing.assert_close(fresh.look(images, 3, first).class_logits, after.class_logits)


def test_an_agent_in_training_looks_with_the_weights_of_its_last_update():
    """A fused optimiser leaves no trace on the weights that it changes."""
    torch.manual_seed(0)
    agent = stam.Agent(CONFIG).train()
    rates = {"core": torch.tensor(0.01)}
    optimiser = make_optimiser({"core": agent.core.named_parameters()}, 0.0, rates)
    images, first = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    agent.look(images, 3, first)
    for parameter in agent.core.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    fresh = stam.Agent(CONFIG).eval()
    fresh.load_state_dict(agent.state_dict())
    torch.testing.assert_close(
        agent.look(images, 3, first).class_logits, fresh.look(images, 3, first).class_logits
    )


def test_an_agent_that_looked_can_be_copied_and_saved():
    agent = stam.Agent(CONFIG).eval()
    agent.look(torch.randn(1, 3, 32, 32), 2)
    twin = copy.deepcopy(agent)
    assert all("packed" not in name for name in agent.state_dict())
    first = torch.zeros(1, dtype=torch.long)
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(
        twin.look(image, 2, first).class_logits, agent.look(image, 2, first).class_logits
    )
