"""How far two classifiers together are from a teacher, where nothing is learned from it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import padded


@triton.jit
def softmax_of(logits, sample, column, inside, width, temperature=1.0):
    """Returns the softmax of a row of logits."""
    values = tl.load(logits + sample * width + column, mask=inside, other=float("-inf")).to(tl.float32)
    values /= temperature
    exponentials = tl.exp(values - tl.max(values, 0))
    return exponentials / tl.sum(exponentials, 0)


@triton.jit
def _ensemble_divergence(one, other, log_q, result, least, width: tl.constexpr, block: tl.constexpr):
    sample, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = column < width
    mean = softmax_of(one, sample, column, inside, width) + softmax_of(other, sample, column, inside, width)
    mean *= 0.5
    wanted = tl.maximum(tl.load(log_q + sample * width + column, mask=inside, other=0.0), least)
    distance = mean * (tl.log(tl.maximum(mean, 1e-38)) - wanted)  # nothing times a large number is nothing
    tl.store(result + sample, tl.sum(tl.where(inside, distance, 0.0), 0))


def ensemble_divergence(one: Tensor, other: Tensor, log_q: Tensor, least: float) -> Tensor:
    """Returns KL(p || q), p the mean of two softmaxes of logits (B, classes), log q at least `least`."""
    (batch, width), result = one.shape, torch.empty(len(one), device=one.device)
    _ensemble_divergence[(batch,)](
        one.contiguous(), other.contiguous(), log_q.contiguous(), result, least, width, padded(width),
        num_warps=4,
    )  # fmt: skip
    return result
