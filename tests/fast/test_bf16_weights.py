"""Weights rounded once an update compute what autocast computes."""

import copy

import pytest
import torch
from torch import nn

from stam.fast.bf16_weights import Bf16Weights


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 2), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 4), nn.Linear(4, 2)
    )


def test_the_same_losses_and_gradients_as_autocast():
    plain = make_model()
    rounded = copy.deepcopy(plain)
    weights, images = Bf16Weights(rounded), torch.randn(5, 3, 3, 3)
    for step in range(2):  # the second with weights that have changed
        with torch.autocast("cpu", torch.bfloat16):
            wanted = plain(images).square().mean()
        with torch.autocast("cpu", torch.bfloat16), weights.in_use():
            got = rounded(images).square().mean()
        wanted.backward()
        got.backward()
        weights.hand_over_gradients()
        assert torch.equal(got, wanted), step
        for one, other in zip(rounded.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and one.dtype == one.grad.dtype == torch.float32
            assert torch.equal(one.grad, other.grad)
            with torch.no_grad():
                one -= 0.1 * one.grad
                other -= 0.1 * other.grad
        rounded.zero_grad(), plain.zero_grad()


def test_parameters_stay_who_they_are():
    model = make_model()
    before = dict(model.named_parameters())
    weights = Bf16Weights(model)
    with pytest.raises(RuntimeError, match="stop"), weights.in_use():
        assert model[3].weight.dtype == torch.bfloat16
        raise RuntimeError("stop")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(make_model().state_dict())


def test_a_weight_without_a_gradient_gets_none():
    model = make_model()
    weights = Bf16Weights(model)
    with weights.in_use():
        model[4](torch.randn(3, 4, dtype=torch.bfloat16)).sum().backward()
    weights.hand_over_gradients()
    assert model[4].weight.grad is not None and model[3].weight.grad is None
    weights.hand_over_gradients()  # nothing left
    assert model[4].weight.grad is not None
