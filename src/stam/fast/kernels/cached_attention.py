"""A linear layer and attention of new tokens to each other and to others whose keys and values are kept.

A head of a sample is one program: it reads the new tokens' queries, keys and values as they lie in the
projection, goes through the kept ones in blocks, and writes the new ones behind them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import in_half

# kept tokens read at a time, and warps that share them; `benchmarks/kernels.py` tries others
FORWARD = {"block": 32, "warps": 1}


@triton.jit
def _mix_in(query, key, value, is_there, scale, top, total, mixed):
    """Returns the largest score, the sum of the weights and the mixed values with some keys more."""
    scores = tl.where(is_there, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
    return higher, total * shrink + tl.sum(weights, 1), mixed


@triton.jit(do_not_specialize=["room"])
def _cached_attention(
    qkv, rows, owners, lengths, out, room, scale,
    new: tl.constexpr, readout: tl.constexpr, heads: tl.constexpr, head_width: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    sample, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    token, column = tl.arange(0, tile), tl.arange(0, head_width)
    stride: tl.constexpr = heads * head_width
    inside = (token < new)[:, None]
    place = qkv + sample.to(tl.int64) * new * 3 * stride + head * head_width
    place += token[:, None] * 3 * stride + column[None, :]
    query = tl.load(place, mask=inside, other=0.0)
    key = tl.load(place + stride, mask=inside, other=0.0)
    value = tl.load(place + 2 * stride, mask=inside, other=0.0)
    owner, past = tl.load(owners + sample), tl.load(lengths + sample)
    kept = rows + owner.to(tl.int64) * room * 2 * stride + head * head_width + column[None, :]
    if keep:
        goal = kept + (past + token - readout)[:, None] * 2 * stride
        is_patch = inside & (token >= readout)[:, None]
        tl.store(goal, key, mask=is_patch)
        tl.store(goal + stride, value, mask=is_patch)
    scale *= 1.4426950408889634  # log2(e), for exp2
    # their own tokens come first: every query sees one, so no sum is empty
    scores = tl.where((token < new)[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - top[:, None])
    total = tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value.dtype), value)
    for start in range(0, past, block):
        number = start + tl.arange(0, block)
        source, is_there = kept + number[:, None] * 2 * stride, number < past
        old_key = tl.load(source, mask=is_there[:, None], other=0.0)
        old_value = tl.load(source + stride, mask=is_there[:, None], other=0.0)
        top, total, mixed = _mix_in(query, old_key, old_value, is_there[None, :], scale, top, total, mixed)
    mixed = mixed / total[:, None]
    place = out + sample.to(tl.int64) * new * stride + head * head_width
    tl.store(place + token[:, None] * stride + column[None, :], mixed.to(value.dtype), mask=inside)


@dataclass(frozen=True)
class Kept:
    """Keys and values that new tokens attend to, and may be added to.

    Attributes:
        rows: Keys and values (places, room, 2 width) in half precision.
        owners: At which place those of a sample lie, (B,), 32-bit integers.
        lengths: How many of them it attends to, (B,), 32-bit integers.
        num_readout: How many of the new tokens, the first, are never kept.
        grows: Whether to write the others' keys and values behind those that are kept.
    """

    rows: Tensor
    owners: Tensor
    lengths: Tensor
    num_readout: int
    grows: bool


def fits(head_width: int) -> bool:
    """Tells whether heads are of a width that a tile can have."""
    return head_width >= 16 and head_width & (head_width - 1) == 0


def linear_cached_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_heads: int,
    kept: Kept,
) -> Tensor:
    """Returns softmax(q k' / sqrt(d)) v of each head, with q, k and v from a linear layer; without gradient.

    Args:
        x: The new tokens (B, tokens, width), read-out tokens first.
        weight: (3 width, width).
        bias: (3 width,).
        num_heads: See `fits`.
        kept: What they attend to beside each other.
    """
    x, weight, bias = in_half(x, weight, bias)
    qkv = torch.addmm(bias, x.flatten(0, 1), weight.t())
    batch, new, width = x.shape
    out, head = torch.empty_like(x), width // num_heads
    tile = max(16, triton.next_power_of_2(new))
    _cached_attention[(batch * num_heads,)](
        qkv, kept.rows, kept.owners, kept.lengths, out, kept.rows.shape[1], head**-0.5,
        new, kept.num_readout, num_heads, head, tile, FORWARD["block"], kept.grows,
        num_warps=FORWARD["warps"],
    )  # fmt: skip
    return out
