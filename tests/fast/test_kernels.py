import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stam.fast import kernels


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch for GPUs")
def test_kernels_agree_with_plain_operations():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    check = Path(__file__).parent / "kernels_check.py"
    done = subprocess.run([sys.executable, check], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_are_for_a_gpu_in_half_precision():
    assert not kernels.usable(torch.zeros(1))
