import pytest
import torch
from agents import randomise, tiny_config
from torch.nn.functional import linear

import stam
from stam.errors import SensorError, StamError
from stam.model.orders import centre_out_order
from stam.scene.sensor import ImageSensor


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_counts_of_the_small_agent():
    agent = stam.Agent(stam.AgentConfig.of_size("small", 1000))
    embedding = agent.actor.location_embedding.numel()
    assert count(agent.core) == 22_436_432
    assert count(agent.actor) - embedding == 10_768_385
    assert embedding == 18_816
    assert count(agent.add_critic()) == 922_625


def test_trace_shapes_and_no_location_twice(agent, images):
    trace = agent.look(images, 12)
    assert trace.locations.shape == (4, 12)
    assert trace.class_logits.shape == trace.distill_logits.shape == trace.probabilities.shape == (4, 12, 5)
    assert all(len(set(row)) == 12 for row in trace.locations.tolist())
    assert trace.predictions.equal(trace.probabilities.argmax(-1))
    assert trace.confidences.equal(trace.probabilities.amax(-1))


def test_probabilities_are_averaged_not_logits(agent, images):
    trace = agent.look(images, 3)
    mean_of_probabilities = (trace.class_logits.softmax(-1) + trace.distill_logits.softmax(-1)) / 2
    torch.testing.assert_close(trace.probabilities, mean_of_probabilities)
    of_mean_logits = ((trace.class_logits + trace.distill_logits) / 2).softmax(-1)
    assert (trace.probabilities - of_mean_logits).abs().max() > 1e-3


def test_only_the_glimpses_asked_for_are_read(agent, images):
    trace = agent.look(images, 5, first_location=3)
    hidden = torch.full_like(images, torch.nan)
    for b, row in enumerate(trace.locations.tolist()):
        for location in row:
            top, left, bottom, right = agent.grid.pixel_box(location)
            hidden[b, :, top:bottom, left:right] = images[b, :, top:bottom, left:right]
    again = agent.look(hidden, 5, first_location=3)
    assert again.locations.equal(trace.locations)
    assert again.probabilities.equal(trace.probabilities)


def test_first_location_given_or_random(agent, images):
    assert agent.look(images, 1, first_location=7).locations.tolist() == [[7]] * 4
    each = torch.tensor([0, 11, 5, 5])
    assert agent.look(images, 1, first_location=each).locations[:, 0].equal(each)
    assert agent.look(images[:2], 1, first_location=(2, 1)).locations.tolist() == [[9]] * 2, "row, column"
    draws = [agent.look(images, 1, generator=torch.Generator().manual_seed(9)).locations for _ in range(2)]
    assert draws[0].equal(draws[1])
    many = agent.look(images[:1].expand(3000, -1, -1, -1), 1, generator=torch.Generator().manual_seed(0))
    frequencies = torch.bincount(many.locations[:, 0], minlength=12) / 3000
    torch.testing.assert_close(frequencies, torch.full((12,), 1 / 12), atol=0.02, rtol=0)


def test_looking_in_training_mode_changes_nothing(agent, images):
    expected = agent.look(images, 4, first_location=2)
    agent.train()
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    got = agent.look(images, 4, first_location=2)
    assert got.probabilities.equal(expected.probabilities)
    assert agent.training and all(value.equal(before[name]) for name, value in agent.state_dict().items())


@pytest.mark.parametrize("policy", ["random", "plus", "spiral", "centre-out"])
def test_any_policy_can_drive_an_agent(agent, images, policy):
    assert agent.look(images, 12, policy=policy).locations.sort().values.equal(torch.arange(12).expand(4, -1))


def test_an_agent_trained_with_an_order_has_no_actor_and_follows_it(images):
    agent = stam.Agent(tiny_config(policy="spiral")).eval()
    assert agent.actor is None
    assert agent.look(images, 4, first_location=0).locations[0].tolist() == [0, 6, 7, 11]
    with pytest.raises(StamError, match="without an actor"):
        agent.look(images, 4, policy="learned")


def test_the_location_embedding_starts_from_the_positions():
    agent = stam.Agent(stam.AgentConfig.of_size("tiny", 2, actor_width=8))
    patches = agent.core.pos_embed[:, 2:].reshape(1, 14, 14, -1).permute(0, 3, 1, 2)
    want = torch.nn.functional.interpolate(patches, size=(7, 7), mode="bicubic", align_corners=False)
    torch.testing.assert_close(agent.actor.location_embedding, want.flatten(2)[0].T)


def test_the_factorised_actor_equals_the_plain_one(agent):
    state, candidates = torch.randn(2, 48), torch.tensor([[0, 3, 7], [2, 5, 11]])
    embedding = agent.actor.location_embedding[candidates]
    rows = torch.cat((state[:, None].expand(-1, 3, -1), embedding), dim=2).flatten(0, 1)
    want = agent.actor.after_first_layer(linear(rows, agent.actor.fc0.weight, agent.actor.fc0.bias)).view(
        2, 3
    )
    torch.testing.assert_close(agent.actor(state, candidates), want, atol=1e-5, rtol=1e-5)


def test_batch_norm_statistics_run_over_the_unobserved_rows(agent):
    state, candidates = torch.randn(3, 48), torch.tensor([[0, 1], [4, 2], [9, 11]])
    seen_rows = []
    agent.actor.bn0.register_forward_pre_hook(lambda module, args: seen_rows.append(args[0].shape[0]))
    agent.train().actor(state, candidates)
    assert seen_rows == [6]


def test_critic_initialisation():
    critic = stam.Agent(tiny_config(critic_width=512, width=48)).add_critic()
    bound = 1.2 * (6 / (96 + 512)) ** 0.5
    assert critic.fc0.weight.abs().max() <= bound and critic.fc0.weight.abs().max() > 0.95 * bound
    assert critic.fc0.bias.abs().max() == 0
    assert critic.fc_final.bias.tolist() == pytest.approx([0.58])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_glimpses": 13}, "num_glimpses must be 1 to 12 on a 3x4 grid, got 13"),
        ({"num_glimpses": 0}, "num_glimpses must be 1 to 12"),
        ({"num_glimpses": 2, "first_location": 12}, "location 12 is not on the grid"),
        ({"num_glimpses": 2, "first_location": (3, 0)}, "is not on the grid"),
        ({"num_glimpses": 2, "first_location": torch.tensor([1, 2])}, "each of the 4 scenes"),
        ({"num_glimpses": 2, "first_location": torch.tensor(3.9)}, "one location, or a tensor"),
        ({"num_glimpses": 2, "policy": "spirl"}, "did you mean 'spiral'"),
    ],
)
def test_bad_arguments_are_refused(agent, images, arguments, message):
    with pytest.raises(StamError, match=message):
        agent.look(images, **arguments)


def test_images_of_another_size_are_refused(agent):
    with pytest.raises(StamError, match="expected images"):
        agent.look(torch.zeros(1, 3, 24, 24), 1)


def test_a_session_says_what_look_says(agent, images):
    trace = agent.look(images[:1], 12, first_location=5)
    session = agent.session(first_location=5)
    sensor = ImageSensor(images[0], agent.grid)
    for n in range(12):
        assert session.location == agent.grid.row_column(int(trace.locations[0, n]))
        step = session.observe(sensor.sense(session.location))
        torch.testing.assert_close(step.probabilities, trace.probabilities[0, n])
        assert step.label == agent.labels[int(trace.predictions[0, n])]
        assert step.confidence == pytest.approx(float(trace.confidences[0, n]))
        assert step.num_glimpses == n + 1
    assert step.location is None and session.location is None and step.stop
    with pytest.raises(SensorError, match="every location has been seen"):
        session.observe(sensor.sense(0))


def test_a_session_stops_when_sure(agent, images):
    confidences = agent.look(images[:1], 12, first_location=5).confidences[0]
    threshold = float(confidences.sort().values[6])
    sure = int((confidences > threshold).nonzero()[0]) + 1
    sensor = ImageSensor(images[0], agent.grid)
    assert agent.session(first_location=5, threshold=threshold).run(sensor).num_glimpses == sure
    assert agent.session(first_location=5, threshold=1.0).run(sensor, max_glimpses=3).num_glimpses == 3
    with pytest.raises(StamError, match=r"call agent.eval\(\)"):
        agent.train().session()


def test_settings_that_parameters_depend_on_cannot_be_changed(agent):
    assert agent.configure(threshold=0.4).threshold == 0.4
    assert agent.labels == ("0", "1", "2", "3", "4")
    assert agent.configure(labels=tuple("abcde")).labels == tuple("abcde")
    with pytest.raises(StamError, match="only first_location, labels, policy, temperature, threshold"):
        agent.configure(width=48)


def test_temperature_flattens_the_probabilities(agent, images):
    sharp = agent.look(images, 2, first_location=0)
    flat = agent.configure(temperature=4.0).look(images, 2, first_location=0)
    want = ((sharp.class_logits / 4).softmax(-1) + (sharp.distill_logits / 4).softmax(-1)) / 2
    torch.testing.assert_close(flat.probabilities, want)


def test_an_order_can_take_over_from_the_learned_policy(agent, images):
    own = agent.look(images, 12, first_location=0).locations
    agent.configure(policy="learned:4")
    path = agent.look(images, 12, first_location=0).locations
    assert path[:, :4].equal(own[:, :4]) and not path.equal(own)
    centre_out = centre_out_order(agent.grid)
    for row in path.tolist():
        assert row[4:] == [place for place in centre_out if place not in row[:4]]
    session, sensor = agent.session(threshold=1.0, first_location=0), ImageSensor(images[0], agent.grid)
    for count, place in enumerate(path[0].tolist()):
        assert session.location == agent.grid.row_column(place)
        if count > 0:
            assert (session.policy_map().amax() == 1) == (count >= 4)
        session.observe(sensor.sense(session.location))


def test_half_of_the_samples_cannot_change_the_other_half(agent, images):
    randomise(agent, seed=4, scale=0.1)
    whole = agent.look(images, 6, first_location=1)
    part = agent.look(images[2:], 6, first_location=1)
    assert part.locations.equal(whole.locations[2:])
    torch.testing.assert_close(part.probabilities, whole.probabilities[2:], atol=1e-5, rtol=0)


def test_a_joint_actor_rates_a_location_alike_whatever_else_is_rated(tmp_path):
    config = tiny_config(actor="joint", actor_width=40)
    agent = stam.Agent(config)
    randomise(agent)
    state, every = torch.randn(3, 2 * config.width), torch.arange(12).expand(3, 12)
    some = torch.tensor([[3, 7], [0, 11], [5, 2]])
    rated = agent.eval().actor(state, every)
    assert agent.actor(state, some).equal(rated.gather(1, some)) and len(set(rated[0].tolist())) == 12
    stam.weights.save_agent(agent, tmp_path / "joint")
    again = stam.load(tmp_path / "joint")
    assert again.config.actor == "joint" and again.actor(state, every).equal(rated)
    with pytest.raises(stam.errors.ConfigError, match="actor"):
        tiny_config(actor="both")
