"""The actor learns from what every location would have told, instead of sampled returns."""

import dataclasses
import re

import pytest
import torch
from learners import AGENT
from torch.nn.functional import nll_loss

from stam.errors import ConfigError
from stam.evaluation.speed import batches_from, make_learner
from stam.learning import one_pass
from stam.learning.gains import (
    SHARPNESS,
    Gains,
    Replay,
    SoftmaxPolicy,
    actor_loss,
    try_locations,
)
from stam.learning.training import AgentLearner
from stam.model.agent import Agent
from stam.model.belief import Belief
from stam.model.policy import OrderPolicy
from stam.settings import RunConfig, TrainingConfig

CAUSAL = dataclasses.replace(AGENT, core="causal", drop_path=0.0)


def gains_learner(actor: str = "pairwise", **training) -> AgentLearner:
    torch.manual_seed(0)
    defaults = {"num_glimpses": 4, "batch_size": 16, "device": "cpu", "actor_objective": "gains"}
    agent = dataclasses.replace(CAUSAL, actor=actor)
    return make_learner(RunConfig(agent=agent, training=TrainingConfig(**(defaults | training))))


@torch.no_grad()
def test_the_gain_of_a_location_is_what_looking_there_brings():
    """Nearer to the teacher by KL(p || q) and to the label by its cross-entropy, both alike."""
    torch.manual_seed(1)
    agent = Agent(CAUSAL).eval()
    images, labels, log_q = (
        torch.randn(4, 3, 32, 32),
        torch.tensor([0, 1, 2, 3]),
        torch.randn(4, 5).log_softmax(1),
    )
    generator = torch.Generator().manual_seed(2)
    policy = SoftmaxPolicy(agent.actor)
    path = one_pass.explore(agent, images, torch.arange(4), policy, generator, 5, 5)
    gains = try_locations(agent, images, path, labels, log_q, generator)
    counts = gains.seen.sum(dim=1)
    assert len(counts.unique()) > 1

    def look(sample: int, locations: torch.Tensor) -> Belief:
        memory = None
        for here in locations:
            glimpse = agent.grid.cut(images[sample : sample + 1], here[None, None])[:, 0]
            memory = agent.remember(memory, glimpse, here[None])
        return agent.believe(memory)

    for sample in range(4):
        before = path.locations[sample, : counts[sample]]
        assert gains.seen[sample].nonzero().squeeze(1).tolist() == sorted(before.tolist())
        torch.testing.assert_close(gains.state[sample], look(sample, before).state[0], atol=1e-4, rtol=1e-4)
        for place in (3, 9, 15):
            belief = look(sample, torch.cat((before, torch.tensor([place]))))
            from_teacher = belief.divergence_from(log_q[sample : sample + 1])
            from_label = nll_loss(belief.log_probabilities(), labels[sample : sample + 1])
            assert gains.values[sample, place] == pytest.approx(
                float(-(from_teacher + from_label) / 2), abs=1e-4
            )


def test_locations_are_tried_after_any_number_of_glimpses_but_after_few_more_often():
    torch.manual_seed(0)
    agent = Agent(CAUSAL).eval()
    images, labels = torch.randn(300, 3, 32, 32), torch.zeros(300, dtype=torch.long)
    policy, generator = agent.policy("random"), torch.Generator().manual_seed(2)
    path = one_pass.explore(agent, images, torch.zeros(300, dtype=torch.long), policy, generator, 6, 6)
    gains = try_locations(agent, images, path, labels, torch.zeros(300, 5), generator)
    counts = gains.seen.sum(dim=1).bincount(minlength=6)
    assert counts[0] == 0 and len(counts) == 6 and int(counts.sum()) == 300
    assert counts[1] > 1.5 * counts[5] > 0


def test_the_actor_learns_to_look_where_most_is_to_be_learned():
    torch.manual_seed(0)
    actor = Agent(CAUSAL).train().actor
    values, seen = torch.randn(12, 16), torch.rand(12, 16) < 0.3
    state = torch.stack([torch.randn(12, 64) for _ in range(4)])[torch.arange(12) % 3, torch.arange(12)]
    optimiser = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    for _ in range(600):
        loss = actor_loss(actor, Gains(state, seen, values))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    logits = actor(state, torch.arange(16).expand(12, -1)).masked_fill(seen, -torch.inf)
    chosen = values.gather(1, logits.argmax(1, keepdim=True))
    best = values.masked_fill(seen, -torch.inf).amax(1, keepdim=True)
    assert (best - chosen).max() < 0.2  # nats: what is nearly as good as the best will do


def test_the_loss_is_the_expected_advantage_of_what_the_actor_would_draw():
    values = torch.tensor([[1.0, 3.0, 9.0, 2.0]])
    seen = torch.tensor([[False, False, True, False]])
    state, spread = torch.zeros(1, 8), (2 / 3) ** 0.5  # of -1, 1, 0

    def loss(*logits: float) -> float:
        return float(actor_loss(lambda state, locations: torch.tensor([logits]), Gains(state, seen, values)))

    assert loss(0, 0, 50, 0) == pytest.approx(0, abs=1e-6)  # what was seen is never drawn
    assert loss(0, 9, 0, 0) == pytest.approx(-1 / spread, rel=1e-3)
    assert loss(9, 0, 0, 0) == pytest.approx(1 / spread, rel=1e-3)
    half = torch.tensor([0.0, 0.0, 1.0]).mul(SHARPNESS).softmax(0)
    assert loss(0, 0, 0, 1) == pytest.approx(float(half[0] - half[1]) / spread, rel=1e-3)


def test_an_agent_draws_locations_from_the_softmax_of_its_actor():
    logits = torch.tensor([[0.0, 0.3, 9.0, 0.1]]).expand(4000, -1)
    seen = torch.tensor([[False, False, True, False]]).expand(4000, -1)
    policy = SoftmaxPolicy(lambda state, locations: logits)
    likely = policy.probabilities(torch.zeros(4000, 8), seen)
    wanted = (SHARPNESS * torch.tensor([0.0, 0.3, 0.1])).softmax(0)
    assert likely[0, [0, 1, 3]].tolist() == pytest.approx(wanted.tolist()) and likely[0, 2] == 0
    decision = policy.decide(torch.zeros(4000, 8), seen, torch.Generator().manual_seed(0))
    drawn = torch.bincount(decision.location, minlength=4) / 4000
    assert drawn[[0, 1, 3]].tolist() == pytest.approx(wanted.tolist(), abs=0.03) and drawn[2] == 0
    assert decision.log_probability is None


def test_maps_of_an_agent_show_what_it_drew_from():
    made = gains_learner(ema_batches=3)
    for agent in (made.agent, made.agent_to_use):
        assert agent.config.sharpness == SHARPNESS
    policy, state = made.agent_to_use.eval().policy(), torch.randn(3, 2 * AGENT.width)
    seen = torch.zeros(3, made.agent.grid.num_locations, dtype=torch.bool)
    seen[:, 2] = True
    drawn = SoftmaxPolicy(made.agent_to_use.actor).probabilities(state, seen)
    torch.testing.assert_close(policy.probabilities(state, seen), drawn)
    again = dataclasses.replace(made.config, training=TrainingConfig(num_glimpses=4, device="cpu"))
    assert make_learner(again).agent.config.sharpness is None


@pytest.mark.parametrize("objective", ["gains", "actor-critic"])
@pytest.mark.parametrize("actor", ["pairwise", "joint"])
def test_core_actor_and_critic_learn(actor, objective):
    made = gains_learner(actor, base_lr=1e-2, short_episodes=1, actor_objective=objective)
    before = {name: value.clone() for name, value in made.agent.named_parameters()}
    for _ in batches_from(made, None, 2):  # a joint actor's last layer begins at zero
        pass
    learning = {"core", "actor"} | ({"critic"} if objective == "actor-critic" else set())
    assert set(made.rates) == learning
    assert made.meter.means().keys() - {"reward"} == {"supervised", "consistency"} | learning - {"core"}
    same = {name for name, value in made.agent.named_parameters() if value.equal(before[name])}
    assert all(re.fullmatch(r"(actor|critic)\.fc\d\.bias", name) for name in same)  # a norm takes it away
    assert made.agent.training


def test_the_core_does_not_learn_from_the_actor():
    """On the same path another actor changes nothing of it."""
    cores = []
    for factor in (1.0, 50.0):
        made = gains_learner(base_lr=1e-2, num_glimpses=2)
        with torch.no_grad():
            made.agent.actor.fc_final.weight.mul_(factor)
        made.policy = lambda: OrderPolicy(list(range(16)))
        for _ in batches_from(made, None, 1):
            pass
        cores.append(torch.cat([part.detach().flatten() for part in made.agent.core.parameters()]))
    assert cores[0].equal(cores[1])


def test_rows_of_the_rollout_leave_the_running_statistics_alone():
    """The actor explores as it will be used; its statistics are those of the states it learns from."""
    made = gains_learner()
    for _ in batches_from(made, None, 1):
        pass
    assert made.agent.actor.bn0.num_batches_tracked == made.settings.actor_steps


def test_a_joint_actor_begins_as_the_order_centre_out():
    made = gains_learner("joint")
    images = torch.randn(3, 3, 32, 32)
    first = torch.tensor([0, 7, 15])
    made.agent.eval()
    learned, order = (made.agent.look(images, 9, first, policy).locations for policy in (None, "centre-out"))
    assert learned.equal(order)


def test_steps_of_the_actor_change_it_alone():
    made = gains_learner(actor_steps=5)
    for _ in batches_from(made, None, 1):
        pass
    steps = {
        name: {int(made.optimiser.state[p]["step"]) for p in group["params"] if p in made.optimiser.state}
        for group in made.optimiser.param_groups
        for name in [group["part"]]
    }
    assert steps == {"core": {1}, "actor": {5}}


def test_the_last_batches_are_kept_and_drawn_from(monkeypatch):
    monkeypatch.setattr("stam.learning.gains._KEPT_BATCHES", 3)
    replay, seen = Replay(), torch.zeros(2, 4, dtype=torch.bool)
    places = set()
    for number in range(5):
        values = torch.full((2, 4), float(number))
        assert replay.add(Gains(10 * values, seen, values)) == 2
        places.add(tuple(part.data_ptr() for part in replay.kept[2]))
        one = Gains(torch.zeros(1, 4), seen[:1], torch.full((1, 4), 9.0))
        replay.add(one)  # a batch of another size is kept apart
    assert len(places) == 1
    drawn = replay.draw(2, torch.Generator().manual_seed(0))
    assert len(drawn.state) == len(drawn.seen) == 256 and drawn.state.equal(10 * drawn.values)
    assert set(drawn.values.unique().tolist()) == {2.0, 3.0, 4.0}
    assert replay.kept[2][2][:, 0, 0].tolist() == [4.0, 3.0, 2.0]
    assert replay.kept[1][2].flatten().tolist() == [9.0] * 12


def test_a_training_goes_on_from_what_was_tried():
    made, other = gains_learner(), gains_learner()
    for _ in batches_from(made, None, 2):
        pass
    other.load_state_dict(made.state_dict())
    assert list(other.replay.kept) == [16]
    pairs = zip(other.replay.kept[16], made.replay.kept[16], strict=True)
    assert all(kept.equal(saved) for kept, saved in pairs)


def test_a_core_that_cannot_try_locations_cheaply_is_refused():
    with pytest.raises(ConfigError, match="actor_objective gains needs .* pass --core causal"):
        RunConfig(agent=AGENT, training=TrainingConfig(actor_objective="gains", num_glimpses=4))
    with pytest.raises(ConfigError, match="needs at least 2 glimpses"):
        RunConfig(agent=CAUSAL, training=TrainingConfig(actor_objective="gains", num_glimpses=1))
    with pytest.raises(ConfigError, match="actor_objective 'gain' is unknown: did you mean 'gains'"):
        TrainingConfig(actor_objective="gain")
