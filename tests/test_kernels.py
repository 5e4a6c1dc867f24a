"""The kernels agree with the plain operations, where Triton is installed (it comes with torch for GPUs)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stam import kernels
from stam.kernels.aside import aside, gradients_aside, second_stream


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch for GPUs")
def test_kernels_agree_with_plain_operations():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    check = Path(__file__).parent / "kernels_check.py"
    done = subprocess.run([sys.executable, check], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_are_for_a_gpu_in_half_precision():
    assert not kernels.usable(torch.zeros(1))


def test_kernels_can_be_switched_off_and_are_on_again_after():
    with kernels.switched(False):
        assert kernels._switched_off
        with kernels.switched(True):
            assert not kernels._switched_off
        assert kernels._switched_off
    assert not kernels._switched_off


class Doubled(torch.autograd.Function):
    made = 0

    @staticmethod
    def forward(ctx, weight):
        return 2 * weight

    @staticmethod
    def backward(ctx, gradient):
        found = torch.full((3,), 2.0)
        Doubled.made = found.data_ptr()
        return found


def test_autograd_hands_a_gradient_to_a_weight_as_it_is():
    """Else it would read what a second stream has not written yet; see `kernels.aside`."""
    weight = torch.nn.Parameter(torch.ones(3))
    Doubled.apply(weight).sum().backward()
    assert weight.grad.data_ptr() == Doubled.made


def test_without_a_gpu_there_is_one_stream():
    with gradients_aside(False), second_stream(False) as join:
        assert aside(torch.add, torch.ones(1), torch.ones(1)) == 2
    join()
