"""What a GPU does between the matrix products of a training step, one Triton kernel each way.

Every function here is a linear layer with what follows it, or a normalisation, and has its own gradient:
what is read once is used for everything that needs it, sums over the rows for biases among it. They take and
give half precision, the residual stream too, and compute in single. Triton comes with torch's GPU builds;
without it, or without autocast to half precision, `usable` says no and the plain operations run.
"""

import importlib.util

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Tells whether the kernels can compute what is about to be computed from `x`."""
    return _HAS_TRITON and x.is_cuda and torch.is_autocast_enabled("cuda")
