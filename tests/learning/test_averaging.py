"""The running average of weights: what it is, where it is used, and that it survives a restart."""

import pytest
import torch
from learners import learner

from stam.errors import ConfigError
from stam.evaluation.speed import batches_from
from stam.learning.averaging import AveragedWeights
from stam.model.agent import evaluating
from stam.settings import TrainingConfig
from stam.weights import load_agent


def test_the_first_count_alike_then_older_ones_fade():
    weight = torch.zeros(1)
    averaged = AveragedWeights({"weight": weight}, span=3)
    for value in (3.0, 5.0, 7.0, 11.0):
        weight.fill_(value)
        averaged.update()
    with averaged.in_use():
        assert weight.item() == 5 + (11 - 5) / 3
    assert weight.item() == 11
    averaged.settle()
    assert weight.item() == 7


def test_nothing_seen_yet_is_the_model_as_it_is():
    weight = torch.randn(3)
    before = weight.clone()
    with AveragedWeights({"weight": weight}, span=5, start_share=0.5, pretrained=["weight"]).in_use():
        assert weight.equal(before)


def test_a_share_of_the_start_comes_back_where_it_is_asked_for():
    core, head = torch.ones(1), torch.ones(1)
    averaged = AveragedWeights({"core": core, "head": head}, span=1, start_share=0.25, pretrained=["core"])
    for weight in (core, head):
        weight.fill_(9)
    averaged.update()
    with averaged.in_use():
        assert (core.item(), head.item()) == (0.75 * 9 + 0.25, 9)
    assert (core.item(), head.item()) == (9, 9)


def test_an_agents_core_starts_from_what_was_pretrained_its_classifiers_and_actor_do_not():
    made = learner(base_lr=1e-2, start_share=0.5)
    names = ("core.blocks.0.mlp.fc1.weight", "core.head.weight", "core.head_dist.bias", "actor.fc1.weight")
    before = {name: value.clone() for name, value in made.agent.state_dict().items()}
    for _ in batches_from(made, None, 1):
        pass
    latest = {name: value.clone() for name, value in made.agent.state_dict().items()}
    assert made.averaged is not None
    made.averaged.settle()
    state = made.agent.state_dict()
    torch.testing.assert_close(state[names[0]], (before[names[0]] + latest[names[0]]) / 2)
    assert not latest[names[0]].equal(before[names[0]])
    for name in names[1:]:
        assert state[name].equal(latest[name]), name


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match="start_share must be at least 0 and below 1"):
        TrainingConfig(start_share=share)


def test_no_average_is_kept_where_none_is_asked_for():
    assert learner().averaged is None


def test_running_statistics_are_averaged_and_what_only_trains_is_not():
    made = learner(averaged_batches=2)
    assert made.averaged is not None
    names = made.averaged.state_dict()["average"].keys()
    assert "actor.bn0.running_mean" in names and "core.head.weight" in names
    assert not any(name.startswith("critic.") or "num_batches" in name for name in names)


def test_what_is_saved_is_averaged_and_learning_goes_on_from_the_latest(tmp_path):
    plain, averaging = learner(base_lr=1e-2), learner(base_lr=1e-2, averaged_batches=3)
    seen = []
    for made in (plain, averaging):
        for _ in batches_from(made, None, 3):
            if made is plain:
                seen.append(made.agent.core.head.weight.detach().clone())
        made.save(tmp_path / str(made is averaging))
    latest, saved = (load_agent(tmp_path / name).core.head.weight for name in ("False", "True"))
    assert averaging.agent.core.head.weight.equal(plain.agent.core.head.weight)
    assert latest.equal(seen[-1])
    torch.testing.assert_close(saved, torch.stack(seen).mean(0))


def test_a_restored_learner_has_the_average():
    made = learner(base_lr=1e-2, averaged_batches=4, start_share=0.2)
    for _ in batches_from(made, None, 2):
        pass
    state = made.state_dict()
    other = learner(base_lr=1e-2, averaged_batches=4, start_share=0.2)
    assert other.averaged is not None
    for value in other.averaged.state_dict()["start"].values():
        value.zero_()
    other.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    looks = []
    for one in (made, other):
        assert one.averaged is not None
        with one.averaged.in_use(), evaluating(one.agent):
            looks.append(one.agent.look(images, 2, first_location=0).class_logits)
    assert looks[0].equal(looks[1])
