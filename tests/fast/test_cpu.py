"""A snapshot with packed weights says what the agent says, and is never stale."""

import copy
import dataclasses
import pickle

import pytest
import torch

import stam
from stam.fast import prepare
from stam.fast.cpu import PackedLooker
from stam.fast.cpu_layers import PackedLinear
from stam.learning.optimisation import make_optimiser
from stam.live.session import observe_all
from stam.model.agent import PlainLooker
from stam.scene.sensor import ImageSensor

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
FIRST = torch.tensor([0, 5, 9])


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32)


def make_agent(**settings) -> stam.Agent:
    """An agent whose norms have something to do."""
    agent = stam.Agent(dataclasses.replace(CONFIG, **settings)).eval()
    norms = [part for part in agent.modules() if isinstance(part, (torch.nn.BatchNorm1d, torch.nn.LayerNorm))]
    for norm in norms:
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5)
    return agent


@torch.no_grad()
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (3, 100)])
@pytest.mark.parametrize("width", [32, 512])
def test_a_packed_layer_agrees_with_a_plain_one(rows, width):
    plain, x, total = torch.nn.Linear(width, width), torch.randn(*rows, width), torch.randn(*rows, width)
    packed = PackedLinear(plain.weight, plain.bias)
    flat, written = total.flatten(0, -2).clone(), torch.empty(x[..., 0].numel(), width)
    packed.add_to(flat, x.flatten(0, -2))
    packed.write(x.flatten(0, -2), written)
    for got, want in (
        (packed(x), plain(x)),
        (packed.gelu(x), torch.nn.functional.gelu(plain(x))),
        (packed.relu(x), plain(x).relu()),
        (packed.added_to(total, x), total + plain(x)),
        (flat.view(total.shape), total + plain(x)),
        (written.view(total.shape), plain(x)),
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


CAUSAL = {"core": "causal"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"depth": 1},
        {"depth": 3},
        {"width": 24},
        {"policy": "spiral"},
        CAUSAL,
        CAUSAL | {"depth": 1},
        CAUSAL | {"width": 24, "policy": "spiral"},
        CAUSAL | {"actor": "joint", "actor_width": 40},
        {"actor": "joint", "policy": "learned:8"},
    ],
)
def test_a_snapshot_looks_as_the_plain_modules_do(images, settings):
    agent = make_agent(**settings)
    packed, plain = (prepare(agent, fast) for fast in (True, False))
    assert isinstance(packed, PackedLooker) and isinstance(plain, PlainLooker)
    got, want = (looker.look(images, 16, FIRST) for looker in (packed, plain))
    assert got.locations.equal(want.locations)
    torch.testing.assert_close(got.class_logits, want.class_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.distill_logits, want.distill_logits, atol=1e-4, rtol=1e-4)
    assert agent.look(images, 16, FIRST).class_logits.equal(got.class_logits)


@pytest.mark.parametrize("core", ["reencoding", "causal"])
def test_no_scenes_give_no_answers(images, core):
    assert make_agent(core=core).look(images[:0], 3, first_location=0).locations.shape[0] == 0


@torch.no_grad()
@pytest.mark.parametrize("core", ["reencoding", "causal"])
def test_memories_are_selected_and_joined(images, core):
    looker = prepare(make_agent(core=core))
    glimpses = images[:, :, :8, :8]
    whole = looker.remember(looker.remember(None, glimpses, FIRST), glimpses, FIRST + 1)
    parts = [whole.select(torch.tensor([index])) for index in range(3)]
    for memory in (whole.join(parts), whole.select(torch.arange(3))):
        torch.testing.assert_close(
            looker.believe(memory).class_logits, looker.believe(whole).class_logits, atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
def test_samples_at_different_steps_go_on_together_in_a_causal_snapshot(images):
    agent = make_agent(**CAUSAL)
    looker, plain = prepare(agent), prepare(agent, fast=False)
    glimpse, wanted, memories = images[:1, :, :8, :8], [], []
    for count in (1, 4, 2):
        memory = other = None
        for place in range(count):
            memory = looker.remember(memory, glimpse, torch.tensor([place]))
            other = plain.remember(other, glimpse, torch.tensor([place]))
        memories.append(memory)
        other = plain.remember(other, glimpse + 1, torch.tensor([9]))
        wanted.append(plain.believe(other).state)
    joined = memories[0].join(memories)
    together = looker.remember(joined, (glimpse + 1).expand(3, -1, -1, -1), torch.tensor([9, 9, 9]))
    torch.testing.assert_close(looker.believe(together).state, torch.cat(wanted), atol=1e-4, rtol=1e-4)
    last = together.select(torch.tensor([2]))
    assert [cache.count for cache in last.caches] == [12] and last.caches[0] is together.caches[2]


@torch.no_grad()
def test_memories_that_go_on_from_the_same_one_do_not_disturb_each_other(images):
    """They share the room behind it: whoever comes second must not write over the first."""
    looker = prepare(make_agent(**CAUSAL))
    glimpse = images[:, :, :8, :8]
    begun = looker.remember(None, glimpse, FIRST)
    one = looker.remember(begun, glimpse, FIRST + 1)
    alone = looker.believe(looker.remember(one, glimpse, FIRST + 2)).state
    other = looker.remember(begun, 3 * glimpse, FIRST + 3)
    again = looker.believe(looker.remember(one, glimpse, FIRST + 2)).state
    assert again.equal(alone)
    assert not looker.believe(looker.remember(other, glimpse, FIRST + 2)).state.allclose(alone, atol=1e-3)


@torch.no_grad()
def test_a_memory_joined_with_itself_goes_on_in_two_ways(images):
    """Both would write behind the same cached patches."""
    looker = prepare(make_agent(**CAUSAL))
    glimpse, other = images[:1, :, :8, :8], images[1:2, :, :8, :8]
    begun = looker.remember(None, glimpse, FIRST[:1])
    wanted = [looker.remember(begun, each, torch.tensor([7])) for each in (glimpse, other)]
    both = looker.remember(begun.join([begun, begun]), torch.cat((glimpse, other)), torch.tensor([7, 7]))
    both = looker.remember(both, torch.cat((glimpse, glimpse)), torch.tensor([8, 8]))
    wanted = [looker.believe(looker.remember(memory, glimpse, torch.tensor([8]))).state for memory in wanted]
    torch.testing.assert_close(looker.believe(both).state, torch.cat(wanted), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_live_sessions_that_meet_copy_no_cache(images):
    agent = make_agent(**CAUSAL)
    sensors = [ImageSensor(image, agent.grid) for image in images]
    sessions = [agent.session(first_location=0, threshold=1.0) for _ in sensors]
    sessions[1].observe(sensors[1].sense(0), 0)  # one glimpse ahead of the others
    caches = []
    for _ in range(3):
        glimpses = [s.sense(session.location) for s, session in zip(sensors, sessions, strict=True)]
        observe_all(sessions, glimpses)
        caches.append([session.snapshot.memory.caches for session in sessions])
    assert all(len(own) == 1 and len(own[0]) == 1 for step in caches[1:] for own in step)
    for before, after in zip(*caches[1:], strict=True):
        assert after[0].rows is before[0].rows


def change_in_place(agent):
    with torch.no_grad():
        for parameter in agent.core.parameters():
            parameter.mul_(1.1)


def change_data(agent):
    agent.core.blocks[1].mlp.fc1.weight.data[0, 0] += 3.0


def change_by_numpy(agent):
    agent.core.blocks[0].attn.qkv.weight.detach().numpy()[5] *= -2


def change_statistics(agent):
    agent.actor.bn2.running_mean.data.add_(10 * torch.randn(512))


def change_by_fused_optimiser(agent):
    optimiser = make_optimiser({"core": agent.core.named_parameters()}, 0.0, {"core": torch.tensor(0.01)})
    for parameter in agent.core.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()


def change_by_loading(agent):
    agent.load_state_dict(make_agent().state_dict())


def change_a_module(agent):
    agent.core.blocks[0].mlp = copy.deepcopy(agent.core.blocks[1].mlp)


CHANGES = [
    change_in_place,
    change_data,
    change_by_numpy,
    change_statistics,
    change_by_fused_optimiser,
    change_by_loading,
    change_a_module,
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_by_any_means_are_looked_with(images, change, training):
    agent = make_agent().train(training)
    before = agent.look(images, 6, FIRST)
    change(agent)
    after = agent.look(images, 6, FIRST)
    with stam.model.agent.evaluating(agent):
        want = PlainLooker(agent).look(images, 6, FIRST)
        session = agent.prepared().session(first_location=0, threshold=1.0)
    assert after.locations.equal(want.locations)
    torch.testing.assert_close(after.class_logits, want.class_logits, atol=1e-4, rtol=1e-4)
    sensor = ImageSensor(images[0], agent.grid)
    steps = [session.observe(sensor.sense(session.location)) for _ in range(6)]
    torch.testing.assert_close(steps[-1].probabilities, want.probabilities[0, -1], atol=1e-4, rtol=1e-4)
    assert not (
        before.locations.equal(after.locations) and torch.allclose(before.class_logits, after.class_logits)
    )


def test_the_same_snapshot_serves_while_nothing_changes(images):
    agent = make_agent()
    first = agent.prepared()
    agent.look(images, 2)
    assert agent.prepared() is first
    agent.configure(threshold=0.3)
    assert agent.prepared() is not first and agent.prepared().threshold == 0.3


def test_a_snapshot_keeps_the_weights_it_was_made_from(images):
    agent = make_agent()
    looker, session = agent.prepared(), agent.session(first_location=0, threshold=1.0)
    before = looker.look(images[:1], 3, 0)
    change_in_place(agent)
    assert looker.look(images[:1], 3, 0).class_logits.equal(before.class_logits)
    sensor = ImageSensor(images[0], agent.grid)
    steps = [session.observe(sensor.sense(session.location)) for _ in range(3)]
    torch.testing.assert_close(steps[-1].probabilities, before.probabilities[0, -1])


def test_a_live_session_computes_what_a_patch_alone_decides_only_once(images, monkeypatch):
    agent = make_agent()
    session, sensor = agent.session(first_location=0, threshold=1.0), ImageSensor(images[0], agent.grid)
    embedded, embed = [], session.agent.core.embed

    def watched(patches):
        embedded.append(patches.shape[1])
        return embed(patches)

    monkeypatch.setattr(session.agent.core, "embed", watched)
    for _ in range(4):
        session.observe(sensor.sense(session.location))
    assert embedded == [4, 4, 4, 4]


@pytest.mark.parametrize("core", ["reencoding", "causal"])
def test_parts_that_are_not_as_built_are_left_to_their_modules(images, core):
    def without_bias(agent):
        linear = agent.core.blocks[0].mlp.fc1
        agent.core.blocks[0].mlp.fc1 = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)

    def without_weights(agent):
        agent.core.norm = torch.nn.LayerNorm(agent.config.width, elementwise_affine=False)

    def other_method(agent):
        agent.core.classify = lambda features: (features[:, 0, :5], features[:, 1, :5])

    for change in (without_bias, without_weights, other_method):
        agent = make_agent(core=core)
        before = agent.look(images, 3, FIRST).class_logits
        change(agent)
        assert isinstance(prepare(agent), PlainLooker), change.__name__
        assert not agent.look(images, 3, FIRST).class_logits.allclose(before)


def test_agents_that_compute_otherwise_are_left_to_their_modules(images):
    assert isinstance(prepare(make_agent().double()), PlainLooker)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(prepare(make_agent()), PlainLooker)


def test_an_agent_that_looked_can_be_copied_pickled_and_saved(images):
    agent = make_agent()
    want = agent.look(images, 2, FIRST).class_logits
    for twin in (copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
        torch.testing.assert_close(twin.look(images, 2, FIRST).class_logits, want)
        change_in_place(twin)
        assert not torch.allclose(twin.look(images, 2, FIRST).class_logits, want)
    assert agent.look(images, 2, FIRST).class_logits.equal(want)
    assert set(agent.state_dict()) == set(make_agent().state_dict())
