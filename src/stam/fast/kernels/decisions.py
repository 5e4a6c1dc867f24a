"""What a learned policy does around its actor, where nothing is learned from it: candidates, and a draw."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import padded


@triton.jit
def _unseen(seen, candidates, count, locations: tl.constexpr, block: tl.constexpr):
    """Writes the unseen locations of a sample in ascending order."""
    sample, location = tl.program_id(0), tl.arange(0, block)
    inside = location < locations
    was_seen = tl.load(seen + sample * locations + location, mask=inside, other=1).to(tl.int32)
    place = tl.cumsum(1 - was_seen, 0) - 1
    tl.store(candidates + sample * count + place, location.to(tl.int64), mask=inside & (was_seen == 0))


def unseen(seen: Tensor, count: int) -> Tensor:
    """Returns the unseen locations (B, count) of samples that have seen (B, locations) equally many."""
    candidates = torch.empty((len(seen), count), dtype=torch.long, device=seen.device)
    locations = seen.shape[1]
    given = seen.contiguous().view(torch.uint8)
    _unseen[(len(seen),)](given, candidates, count, locations, padded(locations), num_warps=1)
    return candidates


@triton.jit
def _draw(
    logits, candidates, noise, tau, drawn, log_probability, least_norm, least_noise,
    count, locations: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    sample, number = tl.program_id(0), tl.arange(0, block)
    inside = number < count
    values = tl.load(logits + sample * count + number, mask=inside, other=0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(values * values, 0)), least_norm)
    values = tl.where(inside, values / norm * tl.load(tau), float("-inf"))
    location = tl.load(candidates + sample * count + number, mask=inside, other=0)
    uniform = tl.load(noise + sample * locations + location, mask=inside, other=0.5)
    gumbel = -tl.log(-tl.log(tl.maximum(uniform, least_noise)))
    best = tl.argmax(tl.where(inside, values + gumbel, float("-inf")), 0)
    tl.store(drawn + sample, tl.load(candidates + sample * count + best))
    top = tl.max(values, 0)
    total = tl.sum(tl.exp(values - top), 0)
    chosen = tl.sum(tl.where(number == best, values, 0.0), 0)
    tl.store(log_probability + sample, chosen - top - tl.log(total))


def draw(logits: Tensor, candidates: Tensor, noise: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one candidate for each sample, drawn by the Gumbel-max trick, and its log-probability.

    Args:
        logits: (B, K), in single precision; the policy is the softmax of tau times them over their norm.
        candidates: (B, K).
        noise: (B, locations), uniform.
        tau: A single number.
    """
    batch, count = candidates.shape
    drawn = torch.empty(batch, dtype=torch.long, device=logits.device)
    log_probability = torch.empty(batch, device=logits.device)
    _draw[(batch,)](
        logits.contiguous(), candidates, noise, tau, drawn, log_probability, 1e-6, 1e-20,
        count, noise.shape[1], max(16, padded(count)), num_warps=1,
    )  # fmt: skip
    return drawn, log_probability
