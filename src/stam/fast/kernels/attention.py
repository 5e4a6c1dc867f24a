"""A linear layer and attention over few tokens: a whole head of a sample in one tile.

Glimpses are few tokens, 6 to 86 in the paper's episodes, and the usual kernels are made for long sequences:
they pad short ones, keep statistics for a second pass, and want queries, keys and values rearranged. Here
they are read from the projection as it lies, and their gradients are written so.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import in_half
from stam.fast.kernels.sums import add_up

MOST_TOKENS = 128

# warps that share a tile, by its side; `benchmarks/kernels.py` tries others
WARPS = {"forward": {32: 1, 64: 4, 128: 8}, "backward": {32: 1, 64: 4, 128: 4}}


@triton.jit
def _exponentials(query, key, mask, tokens, rows, scale, block: tl.constexpr, masked: tl.constexpr):
    """Returns what softmax divides by its sum, (block, block), zero where nothing is seen, and that sum."""
    scores = tl.dot(query, tl.trans(key))
    scores = tl.where(rows[None, :] < tokens, scores, float("-inf"))
    if masked:  # rows beyond the last token see the first, lest one be empty
        is_seen = tl.load(mask + rows[:, None] * block + rows[None, :]) != 0
        scores = tl.where(is_seen, scores, float("-inf"))
    scale *= 1.4426950408889634  # log2(e), for exp2
    weights = tl.exp2(scores * scale - (tl.max(scores, 1) * scale)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit(do_not_specialize=["tokens"])
def _attention(
    qkv, mask, out, tokens, scale,
    heads: tl.constexpr, head_width: tl.constexpr, block: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    sample, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns = tl.arange(0, block), tl.arange(0, head_width)
    stride = heads * head_width
    real = rows[:, None] < tokens
    place = qkv + sample.to(tl.int64) * tokens * 3 * stride + head * head_width
    place += rows[:, None] * 3 * stride + columns[None, :]
    query = tl.load(place, mask=real, other=0.0)
    key = tl.load(place + stride, mask=real, other=0.0)
    value = tl.load(place + 2 * stride, mask=real, other=0.0)
    weights, total = _exponentials(query, key, mask, tokens, rows, scale, block, masked)
    mixed = tl.dot(weights.to(value.dtype), value) * (1 / total)[:, None]
    place = out + sample.to(tl.int64) * tokens * stride + head * head_width
    tl.store(place + rows[:, None] * stride + columns[None, :], mixed.to(value.dtype), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _attention_backward(
    qkv, mask, dout, dqkv, sums, tokens, scale,
    heads: tl.constexpr, head_width: tl.constexpr, block: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    sample, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns = tl.arange(0, block), tl.arange(0, head_width)
    stride = heads * head_width
    real = rows[:, None] < tokens
    start = sample.to(tl.int64) * tokens * 3 * stride + head * head_width
    inside = rows[:, None] * 3 * stride + columns[None, :]
    sums += sample * 3 * stride + head * head_width + columns
    query = tl.load(qkv + start + inside, mask=real, other=0.0)
    key = tl.load(qkv + start + inside + stride, mask=real, other=0.0)
    value = tl.load(qkv + start + inside + 2 * stride, mask=real, other=0.0)
    place = dout + sample.to(tl.int64) * tokens * stride + head * head_width
    dmixed = tl.load(place + rows[:, None] * stride + columns[None, :], mask=real, other=0.0)
    weights, total = _exponentials(query, key, mask, tokens, rows, scale, block, masked)
    weights *= (1 / total)[:, None]
    dvalue = tl.dot(tl.trans(weights.to(value.dtype)), dmixed).to(value.dtype)
    tl.store(dqkv + start + inside + 2 * stride, dvalue, mask=real)
    tl.store(sums + 2 * stride, tl.sum(dvalue.to(tl.float32), 0))  # gradients beyond the last token are 0
    dweights = tl.dot(dmixed, tl.trans(value))
    dscores = weights * (dweights - tl.sum(weights * dweights, 1)[:, None]) * scale
    dscores = dscores.to(value.dtype)
    dquery = tl.dot(dscores, key).to(value.dtype)
    tl.store(dqkv + start + inside, dquery, mask=real)
    tl.store(sums, tl.sum(dquery.to(tl.float32), 0))
    dkey = tl.dot(tl.trans(dscores), query).to(value.dtype)
    tl.store(dqkv + start + inside + stride, dkey, mask=real)
    tl.store(sums + stride, tl.sum(dkey.to(tl.float32), 0))


def fits(head_width: int, tokens: int) -> bool:
    """Tells whether heads are of a width, and tokens few enough, for one tile."""
    return tokens <= MOST_TOKENS and head_width >= 16 and head_width & (head_width - 1) == 0


def linear_attention(
    x: Tensor, weight: Tensor, bias: Tensor, num_heads: int, tile: Tensor | None = None
) -> Tensor:
    """Returns softmax(q k' / sqrt(d)) v of each head, with q, k and v from one linear layer.

    Args:
        x: (B, tokens, width).
        weight: (3 width, width).
        bias: (3 width,).
        num_heads: See `fits`.
        tile: Which tokens see which, `tile_of` a mask; all by default.
    """
    return _LinearAttention.apply(*in_half(x, weight, bias), num_heads, tile)


def tile_of(mask: Tensor) -> Tensor:
    """Returns which tokens (rows) see which (columns), as large as the kernel's tile.

    Rows beyond the last token see the first: none is empty.
    """
    tokens, block = len(mask), _block(len(mask))
    tile = mask.new_zeros((block, block), dtype=torch.int8)
    tile[:tokens, :tokens] = mask
    tile[tokens:, 0] = 1
    return tile


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, num_heads: int, mask: Tensor | None
    ) -> Tensor:
        qkv = torch.addmm(bias, x.flatten(0, 1), weight.t())
        ctx.save_for_backward(x, weight, qkv, mask)
        ctx.num_heads = num_heads
        return attention(qkv, x.shape[0], num_heads, mask)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, qkv, mask = ctx.saved_tensors
        dqkv, parts = attention_backward(qkv, dout.contiguous(), ctx.num_heads, mask)
        dweight = dqkv.t() @ x.flatten(0, 1)
        dbias = add_up(parts, weight.dtype)
        return (dqkv @ weight).view_as(x), dweight, dbias, None, None


def attention(qkv: Tensor, batch: int, num_heads: int, mask: Tensor | None = None) -> Tensor:
    """Returns the mixed values (B, tokens, width) of projected rows (B tokens, 3 width)."""
    tokens, width = qkv.shape[0] // batch, qkv.shape[1] // 3
    out, block = qkv.new_empty(batch, tokens, width), _block(tokens)
    head = width // num_heads
    _attention[(batch * num_heads,)](
        qkv, qkv if mask is None else mask, out, tokens, head**-0.5,
        num_heads, head, block, mask is not None, num_warps=WARPS["forward"][block],
    )  # fmt: skip
    return out


def attention_backward(
    qkv: Tensor, dout: Tensor, num_heads: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the projected rows, laid out like them, and its sums over rows in parts.

    The parts, one a sample, are to be added up.
    """
    batch, tokens, width = dout.shape
    dqkv, block = torch.empty_like(qkv), _block(tokens)
    sums = torch.empty((batch, 3 * width), device=qkv.device)
    head = width // num_heads
    _attention_backward[(batch * num_heads,)](
        qkv, qkv if mask is None else mask, dout, dqkv, sums, tokens, head**-0.5,
        num_heads, head, block, mask is not None, num_warps=WARPS["backward"][block],
    )  # fmt: skip
    return dqkv, sums


def _block(tokens: int) -> int:
    return max(min(WARPS["forward"]), triton.next_power_of_2(tokens))  # few sizes: each is compiled
