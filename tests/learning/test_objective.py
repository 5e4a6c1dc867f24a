"""Each numbered fact of the method about one training batch."""

import math

import pytest
import torch
from agents import randomise, tiny_config
from episodes import training_episode

import stam
from stam.errors import ConfigError, StamError
from stam.learning.objective import (
    Objective,
    ValueNormaliser,
    feature_distances,
    normalise_rewards,
)
from stam.model.belief import Belief, kl_divergence
from stam.model.episode import rollout, sense_images
from stam.model.policy import RandomPolicy, SampledPolicy
from stam.model.teacher import TeacherOutput

NUM_GLIMPSES = 4


@pytest.fixture
def learner(agent) -> stam.Agent:
    agent.add_critic()
    randomise(agent.critic)
    return agent.train()


def run(agent, images, consistency="soft", log_q=None, num_glimpses=NUM_GLIMPSES, policy=None, **kwargs):
    batch = images.shape[0]
    log_q = torch.randn(batch, 5).log_softmax(1) if log_q is None else log_q
    values = kwargs.pop("values", ValueNormaliser(num_glimpses))
    return training_episode(
        agent,
        Objective(num_glimpses, consistency),
        values,
        images,
        torch.arange(batch) % 5,
        log_q,
        torch.arange(batch) % agent.grid.num_locations,
        policy or SampledPolicy(agent.actor, 4.0),
        torch.Generator().manual_seed(0),
    )


def reached(agent, loss) -> set[str]:
    agent.zero_grad()
    loss.backward(retain_graph=True)
    touched = {name for name, p in agent.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    return {
        name.split(".")[0] if not name.startswith("core.head") else name.split(".")[1] for name in touched
    }


def test_which_loss_reaches_which_part(learner, images):
    step = next(run(learner, images))
    assert reached(learner, step.parts["critic"]) == {"critic"}
    assert reached(learner, step.parts["actor"]) == {"core", "actor"}
    assert reached(learner, step.parts["supervised"]) == {"core", "head"}
    assert reached(learner, step.parts["consistency"]) == {"core", "head_dist"}
    learner.zero_grad()
    step.parts["actor"].backward()
    assert learner.actor.location_embedding.grad.abs().sum() > 0


def test_nothing_flows_through_the_look_ahead(learner, images):
    policy = SampledPolicy(learner.actor, 4.0)
    first = torch.zeros(4, dtype=torch.long)

    step = next(rollout(learner, sense_images(images, learner.grid), 3, first, policy))
    ahead = learner.believe(step.next_memory, step.drop_masks)  # with gradient, to see whether it is used
    ahead.state.retain_grad()
    ahead.class_logits.retain_grad()
    parts = Objective(3).actor_critic(
        step, ahead, learner.critic, ValueNormaliser(3), torch.randn(4, 5).log_softmax(1)
    )
    (parts["actor"] + parts["critic"]).backward()
    assert ahead.state.grad is None and ahead.class_logits.grad is None


def test_the_last_glimpse_has_only_classification(learner, images):
    steps = list(run(learner, images))
    assert [set(step.parts) for step in steps[:-1]] == [
        {"supervised", "consistency", "actor", "critic", "reward"}
    ] * (NUM_GLIMPSES - 1)
    assert set(steps[-1].parts) == {"supervised", "consistency"}
    assert [step.num_glimpses for step in steps] == [1, 2, 3, 4]


def test_totals_weigh_the_parts(learner, images):
    for step in run(learner, images):
        p = step.parts
        want = (p["supervised"] + p["consistency"]) / 2 + p.get("actor", 0) + p.get("critic", 0)
        torch.testing.assert_close(step.total, torch.as_tensor(want))


def test_no_location_is_visited_twice(learner, images):
    path = torch.stack([step.location for step in run(learner, images, num_glimpses=12)], dim=1)
    assert path.sort().values.equal(torch.arange(12).expand(4, -1))


def test_kl_weighs_by_its_first_argument():
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    got = kl_divergence(p.log(), q.log())
    assert got.item() == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), abs=1e-6)
    assert kl_divergence(q.log(), p.log()).item() != pytest.approx(got.item(), abs=0.05)


def test_consistency_has_the_student_on_the_left():
    belief = Belief(torch.zeros(1, 4), torch.zeros(1, 2), torch.tensor([[0.9, 0.1]]).log())
    q = torch.tensor([[0.5, 0.5]])
    parts = Objective(2).classification(belief, torch.tensor([0]), TeacherOutput(q.log()))
    assert parts["consistency"].item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-6)


def test_the_three_consistency_variants():
    class_logits, distill_logits = torch.randn(3, 4), torch.randn(3, 4)
    belief = Belief(torch.zeros(3, 2), class_logits, distill_logits)
    labels, log_q = torch.tensor([1, 0, 3]), torch.randn(3, 4).log_softmax(1)
    hard = Objective(2, "hard").classification(belief, labels, TeacherOutput(log_q))
    want = torch.nn.functional.cross_entropy(distill_logits, log_q.argmax(1))
    torch.testing.assert_close(hard["consistency"].mean(), want)
    none = Objective(2, "none").classification(belief, labels, TeacherOutput(log_q))
    ensemble = (class_logits.softmax(1) + distill_logits.softmax(1)) / 2
    torch.testing.assert_close(none["supervised"], -ensemble[range(3), labels].log())
    torch.testing.assert_close(Objective(2, "none").total(none), none["supervised"])
    with pytest.raises(ConfigError, match="did you mean 'soft'"):
        Objective(2, "sofft")


def test_features_are_compared_by_their_directions():
    goal = torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]])  # a plain teacher has one token
    state = torch.tensor([[2.0, 0.0, 0.0, 1.0], [0.0, 5.0, 0.0, -1.0]])  # cosines 1 and 0, 1 and -1
    assert feature_distances(state, goal).mean().item() == pytest.approx(1 - (1 + 0 + 1 - 1) / 4)
    two = torch.cat((goal, goal.flip(2)), dim=1)  # a distilled one has two
    assert feature_distances(state, two).mean().item() == pytest.approx(1 - (1 + 1 + 1 + 0) / 4)


@pytest.mark.parametrize("consistency", ["soft", "hard", "none"])
def test_features_join_the_losses_with_their_weight(learner, images, consistency):
    goal, log_q = torch.randn(4, 2, learner.config.width), torch.zeros(4, 5).log_softmax(1)
    given = torch.arange(4), log_q, torch.arange(4), SampledPolicy(learner.actor, 4.0)
    steps = [
        next(
            training_episode(
                learner,
                Objective(NUM_GLIMPSES, consistency, feature_weight=weight),
                ValueNormaliser(NUM_GLIMPSES),
                images,
                *given,
                torch.Generator().manual_seed(0),
                features,
            )
        )
        for weight, features in ((0.0, None), (3.0, goal))
    ]
    plain, followed = steps
    assert plain.parts.keys() == followed.parts.keys() - {"features"}
    torch.testing.assert_close(followed.total, plain.total + 3 * followed.parts["features"])
    assert reached(learner, followed.parts["features"]) == {"core"}


def test_rewards_have_zero_mean_and_unit_biased_variance():
    rewards = normalise_rewards(torch.randn(7) * 5 - 3)
    assert rewards.mean().item() == pytest.approx(0, abs=1e-6)
    assert rewards.var(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    assert normalise_rewards(torch.full((5,), -2.0)).tolist() == [0.0] * 5


def one_step(num_glimpses, count, agent, images, values, log_q):
    policy = SampledPolicy(agent.actor, 4.0)
    first = torch.zeros(images.shape[0], dtype=torch.long)

    sense = sense_images(images, agent.grid)
    for step in rollout(agent, sense, num_glimpses, first, policy, torch.Generator().manual_seed(1)):
        if step.num_glimpses == count:
            with torch.no_grad():
                ahead = agent.believe(step.next_memory, step.drop_masks)
            parts = Objective(num_glimpses).actor_critic(step, ahead, agent.critic, values, log_q)
            return step, ahead, parts
    raise AssertionError


@pytest.mark.parametrize(("count", "terminal"), [(1, False), (2, True)])
def test_the_terminal_target_has_no_value_to_come(learner, images, count, terminal):
    log_q = torch.randn(4, 5).log_softmax(1)
    values = ValueNormaliser(3)
    values.mean.copy_(torch.tensor([0.3, -0.2]))
    start_mean, start_second = values.mean.clone(), values.second_moment.clone()
    _, ahead, _ = one_step(3, count, learner, images, values, log_q)
    with torch.no_grad():
        target = normalise_rewards(-kl_divergence(ahead.log_probabilities(), log_q))
        if not terminal:
            sigma = (start_second[1] - start_mean[1] ** 2).sqrt().float()
            target = target + sigma * learner.critic(ahead.state) + start_mean[1]
    k = count - 1
    assert values.mean[k].item() == pytest.approx(
        0.99 * start_mean[k].item() + 0.01 * target.mean().item(), abs=1e-6
    )
    want = 0.99 * start_second[k].item() + 0.01 * target.square().mean().item()
    assert values.second_moment[k].item() == pytest.approx(want, abs=1e-6)
    assert values.mean[1 - k].item() == start_mean[1 - k].item()


def test_value_statistics_start_and_survive_saving():
    values = ValueNormaliser(5)
    assert values.mean.tolist() == [0, 0, 0, 0]
    assert values.second_moment.tolist() == [4, 3, 2, 1]
    values.update(torch.tensor([1.0, 3.0]), 2)
    again = ValueNormaliser(5)
    again.load_state_dict(values.state_dict())
    assert again.mean[2] == pytest.approx(0.02) and again.second_moment[2] == pytest.approx(0.99 * 2 + 0.05)
    torch.testing.assert_close(
        again.denormalise(again.normalise(torch.tensor([0.4]), 2), 2), torch.tensor([0.4])
    )


def test_the_look_ahead_uses_the_same_masks_and_mode(images):
    agent = stam.Agent(tiny_config(drop_path=0.5)).train()
    agent.add_critic()
    calls = []
    believe = agent.believe

    def watched(memory, drop_masks=None):
        calls.append((memory.positions.shape[1] // 4, drop_masks, agent.training, torch.is_grad_enabled()))
        return believe(memory, drop_masks)

    agent.believe = watched
    list(run(agent, images, num_glimpses=3))
    assert [(count, with_gradient) for count, _, _, with_gradient in calls] == [
        (1, True),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ]
    assert calls[0][1] is calls[1][1] and calls[2][1] is calls[3][1]
    assert not calls[1][1].equal(calls[2][1])
    assert all(training for _, _, training, _ in calls)


def test_orders_train_the_classifiers_alone(images):
    agent = stam.Agent(tiny_config(policy="random")).train()
    for step in run(agent, images, policy=RandomPolicy(), values=None):
        assert set(step.parts) == {"supervised", "consistency"}
        step.total.backward()


def test_learning_to_look_needs_a_critic(agent, images):
    with pytest.raises(StamError, match=r"call agent.add_critic\(\)"):
        next(run(agent, images))


def all_finite(agent, images, **kwargs):
    for step in run(agent, images, **kwargs):
        agent.zero_grad()
        step.total.backward()
        assert torch.isfinite(step.total)
        assert all(torch.isfinite(p.grad).all() for p in agent.parameters() if p.grad is not None)


@pytest.mark.parametrize("consistency", ["soft", "hard", "none"])
class TestDegenerateInputStaysFinite:
    def test_a_batch_of_one(self, learner, images, consistency):
        before = learner.critic.bn0.running_mean.clone()
        all_finite(learner, images[:1], consistency=consistency)
        assert learner.critic.bn0.running_mean.equal(before)  # one row has no statistics to learn from

    def test_equal_rewards(self, learner, images, consistency):
        all_finite(learner, images[:1].expand(3, -1, -1, -1), consistency=consistency)

    def test_equal_logits(self, learner, images, consistency):
        for layer in (learner.actor.fc_final, learner.critic.fc_final, learner.core.head):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        all_finite(learner, images, consistency=consistency)

    def test_one_unobserved_location_left(self, learner, images, consistency):
        all_finite(learner, images, consistency=consistency, num_glimpses=12)
        all_finite(learner, images[:1], consistency=consistency, num_glimpses=12)

    def test_a_certain_teacher(self, learner, images, consistency):
        certain = torch.full((4, 5), -torch.inf).scatter(1, torch.tensor([[0], [4], [1], [1]]), 0.0)
        all_finite(learner, images, consistency=consistency, log_q=certain)

    def test_a_certain_student(self, learner, images, consistency):
        with torch.no_grad():
            learner.core.head.weight.mul_(1e4)
            learner.core.head_dist.weight.mul_(1e4)
        all_finite(learner, images, consistency=consistency)
