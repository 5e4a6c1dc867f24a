"""The moving average of weights: what it is, where it is used, and that it survives a restart."""

import torch
from learners import learner
from torch import nn

from stam.evaluation.speed import batches_from
from stam.learning.averaging import MovingAverage
from stam.weights import load_agent


def test_the_first_count_alike_then_older_ones_fade():
    model = nn.Linear(1, 1, bias=False)
    averaged = MovingAverage(model, 3)
    for value in (3.0, 5.0, 7.0, 11.0):
        with torch.no_grad():
            model.weight.fill_(value)
        averaged.update_parameters(model)
    assert averaged.module.weight.item() == 5 + (11 - 5) / 3
    assert model.weight.item() == 11


def test_statistics_are_averaged_and_counts_are_the_latest():
    model = nn.BatchNorm1d(1)
    averaged = MovingAverage(model, 2)
    for value in (1.0, 3.0):
        model.running_mean.fill_(value)
        model.num_batches_tracked.add_(1)
        averaged.update_parameters(model)
    assert averaged.module.running_mean.item() == 2
    assert averaged.module.num_batches_tracked.item() == 2


def test_no_average_is_kept_where_none_is_asked_for():
    made = learner()
    assert made.averaged is None and made.agent_to_use is made.agent


def test_what_is_saved_is_averaged_and_learning_goes_on_from_the_latest(tmp_path):
    plain, averaging = learner(base_lr=1e-2), learner(base_lr=1e-2, ema_batches=3)
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
    made, other = (learner(base_lr=1e-2, ema_batches=4) for _ in range(2))
    for _ in batches_from(made, None, 2):
        pass
    other.load_state_dict(made.state_dict())
    images = torch.randn(2, 3, 32, 32)
    looks = [one.agent_to_use.look(images, 2, first_location=0).class_logits for one in (made, other)]
    assert looks[0].equal(looks[1])
    assert other.averaged.n_averaged == 2


def test_the_average_goes_with_the_number_of_epochs():
    made = learner(epochs=10, tau_epochs=4, ema_batches=6)
    made.change_epochs(5)
    assert (made.settings.tau_epochs, made.settings.ema_batches, made.averaged.num_batches) == (2, 3, 3)
