"""The running average of weights: what it is, where it is used, and that it survives a restart."""

import torch
from test_training import learner
from torch import nn

from stam.agent import evaluating
from stam.averaging import AveragedWeights
from stam.benchmark import batches_from
from stam.weights import load_agent


def test_the_first_count_alike_then_older_ones_fade():
    model = nn.Linear(1, 1, bias=False)
    averaged = AveragedWeights(model, span=3)
    for value in (3.0, 5.0, 7.0, 11.0):
        nn.init.constant_(model.weight, value)
        averaged.update()
    with averaged.in_use():
        assert model.weight.item() == 5 + (11 - 5) / 3
    assert model.weight.item() == 11
    averaged.settle()
    assert model.weight.item() == 7


def test_nothing_seen_yet_is_the_model_as_it_is():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with AveragedWeights(model, span=5).in_use():
        assert model.weight.equal(before)


def test_running_statistics_are_averaged_and_counters_and_parts_left_out_are_not():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    averaged = AveragedWeights(model, span=2, leave_out=("1.",))
    for _ in range(2):
        model(torch.randn(8, 2) + 3)
        averaged.update()
    latest, counted, weight = model[0].running_mean.clone(), 2, model[1].weight.clone()
    with averaged.in_use():
        assert not model[0].running_mean.equal(latest)
        assert model[0].num_batches_tracked.item() == counted and model[1].weight.equal(weight)


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
    made = learner(base_lr=1e-2, averaged_batches=4)
    for _ in batches_from(made, None, 2):
        pass
    state = made.state_dict()
    other = learner(base_lr=1e-2, averaged_batches=4)
    other.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    looks = []
    for one in (made, other):
        assert one.averaged is not None
        with one.averaged.in_use(), evaluating(one.agent):
            looks.append(one.agent.look(images, 2, first_location=0).class_logits)
    assert looks[0].equal(looks[1])
