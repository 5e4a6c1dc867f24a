"""A core that reads all steps in one pass learns from a batch what it would step by step, in one update."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from learners import AGENT

from stam.evaluation.speed import batches_from, make_learner
from stam.fast.cuda import fuse
from stam.learning import one_pass
from stam.learning.objective import Objective, ValueNormaliser
from stam.learning.training import AgentLearner
from stam.model.agent import Agent
from stam.model.episode import rollout, sense_images
from stam.model.policy import SampledPolicy, rate_one_by_one
from stam.model.teacher import TeacherOutput
from stam.settings import RunConfig, TrainingConfig

CAUSAL = dataclasses.replace(AGENT, core="causal", drop_path=0.0)


def causal_learner(agent=CAUSAL, **training) -> AgentLearner:
    torch.manual_seed(0)
    settings = TrainingConfig(**({"num_glimpses": 4, "batch_size": 16, "device": "cpu"} | training))
    return make_learner(RunConfig(agent=agent, training=settings))


def num_updates(learner: AgentLearner) -> float:
    return next(iter(learner.optimiser.state.values()))["step"].item()


@pytest.fixture
def scenes() -> tuple[torch.Tensor, torch.Tensor, TeacherOutput, torch.Tensor]:
    torch.manual_seed(1)
    log_q = torch.randn(6, 5).log_softmax(1)
    target = TeacherOutput(log_q, torch.randn(6, 2, 32))
    return torch.randn(6, 3, 32, 32), torch.arange(6) % 5, target, torch.arange(6)


@pytest.mark.parametrize("num_steps", [5, 3])
def test_losses_and_gradients_are_those_of_learning_step_by_step(scenes, num_steps):
    """The mean of all losses, each with the reward of the step after it, but without T backward passes."""
    images, labels, target, first = scenes
    torch.manual_seed(2)
    agent = Agent(CAUSAL).train()
    agent.add_critic()
    objective, total_of, values_of, gradients_of = Objective(5, feature_weight=0.5), [], [], []
    for in_one_pass in (False, True):
        learner, generator = copy.deepcopy(agent), torch.Generator().manual_seed(3)
        policy, values = SampledPolicy(learner.actor, 2.0), ValueNormaliser(5)
        if in_one_pass:
            path = one_pass.explore(learner, images, first, policy, generator, num_steps, 5)
            taken = one_pass.retrace(learner, images, path, policy, None)
            parts = one_pass.path_losses(objective, learner, taken, labels, target, values)
            padded = {name: F.pad(part, (0, num_steps - len(part))) for name, part in parts.items()}
            losses = objective.total(padded)
        else:
            sense = sense_images(images, learner.grid)
            episode = rollout(learner, sense, 5, first, policy, generator)
            steps = [next(episode) for _ in range(num_steps)]
            losses = torch.stack(
                [objective.losses(learner, step, labels, target, values).total for step in steps]
            )
        losses.mean().backward()
        total_of.append(losses.detach())
        values_of.append((values.mean, values.second_moment))
        gradients_of.append({n: p.grad for n, p in learner.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*total_of, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*values_of, atol=1e-5, rtol=1e-4)
    assert gradients_of[0].keys() == gradients_of[1].keys()
    torch.testing.assert_close(*gradients_of, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("short_episodes", [0, 2])
@pytest.mark.parametrize("policy", ["learned", "spiral"])
def test_a_batch_is_one_update(short_episodes, policy):
    made = causal_learner(
        dataclasses.replace(CAUSAL, policy=policy), short_episodes=short_episodes, base_lr=1e-2
    )
    before = copy.deepcopy(made.agent.state_dict())
    for _ in batches_from(made, None, 1):
        pass
    assert num_updates(made) == 1
    assert all(
        not value.equal(before[name]) for name, value in made.agent.core.named_parameters(prefix="core")
    )
    wanted = {"supervised", "consistency"} | ({"actor", "critic", "reward"} if policy == "learned" else set())
    assert made.meter.means().keys() == wanted


def test_short_episodes_count_as_more_steps():
    """Their losses are not logged, but learned from, with the same weight."""
    plain, more = (causal_learner(short_episodes=count, base_lr=1e-2) for count in (0, 3))
    for made in (plain, more):
        for _ in batches_from(made, None, 1):
            pass
    assert not plain.agent.core.head.weight.equal(more.agent.core.head.weight)


def test_drop_path_is_drawn_once_an_episode_and_not_for_the_rollout(monkeypatch):
    made = causal_learner(dataclasses.replace(CAUSAL, drop_path=0.5), short_episodes=1)
    drawn, used = [], []
    draw, read_all = made.agent.core.sample_drop_path, made.agent.core.read_all
    monkeypatch.setattr(
        made.agent.core, "sample_drop_path", lambda *given: drawn.append(draw(*given)) or drawn[-1]
    )
    monkeypatch.setattr(made.agent.core, "read_all", lambda *given: used.append(given[2]) or read_all(*given))
    for _ in batches_from(made, None, 1):
        pass
    masks = [each for each in drawn if each is not None]
    assert len(masks) == 2 and all(mask is mine for mask, mine in zip(used, masks, strict=True))
    assert made.agent.training and made.agent.core.training


def test_half_precision_trains_all_that_single_trains():
    """Weights rounded in the rollout, without gradient, are not those of the pass."""
    moved = []
    for precision in ("float32", "bfloat16"):
        made = causal_learner(base_lr=1e-2, precision=precision)
        before = {name: value.clone() for name, value in made.agent.named_parameters()}
        for _ in batches_from(made, None, 1):
            pass
        moved.append({n for n, value in made.agent.named_parameters() if not value.equal(before[n])})
    assert moved[0] == moved[1]


@pytest.mark.parametrize(("num_steps", "encoded"), [(5, 4), (3, 3), (1, 1)])
def test_exploring_encodes_only_what_a_decision_follows(scenes, monkeypatch, num_steps, encoded):
    """Neither the last glimpse nor what the classifiers would say changes where an episode looks."""
    images, _, _, first = scenes
    torch.manual_seed(2)
    agent = Agent(CAUSAL).train()
    policy = SampledPolicy(agent.actor, 2.0)
    sense = sense_images(images, agent.grid)
    with torch.no_grad():
        episode = list(rollout(agent, sense, 5, first, policy, torch.Generator().manual_seed(3)))
    remembered, classified = [], []
    remember = agent.core.remember
    monkeypatch.setattr(agent.core, "remember", lambda *given: remembered.append(1) or remember(*given))
    monkeypatch.setattr(agent.core, "classify", lambda *given: classified.append(1))
    generator = torch.Generator().manual_seed(3)
    path = one_pass.explore(agent, images, first, policy, generator, num_steps, 5)
    assert len(remembered) == encoded and not classified
    visited = torch.stack([step.location for step in episode], dim=1)
    assert path.locations.equal(visited[:, : min(num_steps + 1, 5)])
    assert path.memory.cache.shape[4] == encoded * agent.grid.patches_per_glimpse


def test_actor_and_critic_are_asked_once_for_all_steps_where_they_can_answer(scenes):
    images, labels, target, first = scenes
    torch.manual_seed(2)
    agent = Agent(CAUSAL).train()
    agent.add_critic()
    asked = []

    class AtOnce:
        def __init__(self, name, module):
            self.name, self.module = name, module

        def __call__(self, *given):
            return self.module(*given)

        def at_each_step(self, states, candidates=None):
            asked.append((self.name, len(states)))
            if candidates is None:
                return torch.stack([self.module(state) for state in states])
            return rate_one_by_one(self.module, states, candidates)

    policy = SampledPolicy(AtOnce("actor", agent.actor), 2.0)
    path = one_pass.explore(agent, images, first, policy, torch.Generator(), 5, 5)
    taken = one_pass.retrace(agent, images, path, policy, None)
    looker = fuse(agent)
    looker.critic = AtOnce("critic", Agent(CAUSAL).train().add_critic())
    one_pass.path_losses(Objective(5), looker, taken, labels, target, ValueNormaliser(5))
    assert asked == [("actor", 4), ("critic", 4)]
