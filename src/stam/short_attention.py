"""Attention over few tokens on a GPU: a whole head of a sample in one tile, forward and backward.

Glimpses are few tokens, 6 to 86 in the paper's episodes, and the usual kernels are made for long sequences:
they pad short ones, keep statistics for a second pass, and want queries, keys and values rearranged. Here
they are read from the projection as it lies, and their gradients are written so. Triton comes with torch's
GPU builds; without it nobody calls this.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# warps that share a tile, by its side; `benchmarks/training.py attention` tries others
WARPS = {"forward": {32: 4, 64: 4, 128: 8}, "backward": {32: 4, 64: 4, 128: 8}}


@triton.jit
def _probabilities(query, key, tokens, rows, scale):
    """Returns the softmax of scaled products, (block, block), zero beyond the last token."""
    scores = tl.dot(query, tl.trans(key)) * scale
    scores = tl.where(rows[None, :] < tokens, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _forward(qkv, out, tokens, scale, heads: tl.constexpr, head_width: tl.constexpr, block: tl.constexpr):
    sample, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns = tl.arange(0, block), tl.arange(0, head_width)
    stride = heads * head_width
    real = rows[:, None] < tokens
    place = qkv + sample.to(tl.int64) * tokens * 3 * stride + head * head_width
    place += rows[:, None] * 3 * stride + columns[None, :]
    query = tl.load(place, mask=real, other=0.0)
    key = tl.load(place + stride, mask=real, other=0.0)
    value = tl.load(place + 2 * stride, mask=real, other=0.0)
    weights = _probabilities(query, key, tokens, rows, scale * 1.4426950408889634)  # log2(e), for exp2
    mixed = tl.dot(weights.to(value.dtype), value)
    place = out + sample.to(tl.int64) * tokens * stride + head * head_width
    tl.store(place + rows[:, None] * stride + columns[None, :], mixed.to(value.dtype), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    qkv, dout, dqkv, tokens, scale, heads: tl.constexpr, head_width: tl.constexpr, block: tl.constexpr
):
    sample, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns = tl.arange(0, block), tl.arange(0, head_width)
    stride = heads * head_width
    real = rows[:, None] < tokens
    start = sample.to(tl.int64) * tokens * 3 * stride + head * head_width
    inside = rows[:, None] * 3 * stride + columns[None, :]
    query = tl.load(qkv + start + inside, mask=real, other=0.0)
    key = tl.load(qkv + start + inside + stride, mask=real, other=0.0)
    value = tl.load(qkv + start + inside + 2 * stride, mask=real, other=0.0)
    place = dout + sample.to(tl.int64) * tokens * stride + head * head_width
    dmixed = tl.load(place + rows[:, None] * stride + columns[None, :], mask=real, other=0.0)
    weights = _probabilities(query, key, tokens, rows, scale * 1.4426950408889634)
    dvalue = tl.dot(tl.trans(weights.to(value.dtype)), dmixed)
    tl.store(dqkv + start + inside + 2 * stride, dvalue.to(value.dtype), mask=real)
    dweights = tl.dot(dmixed, tl.trans(value))
    dscores = weights * (dweights - tl.sum(weights * dweights, 1)[:, None]) * scale
    dscores = dscores.to(value.dtype)
    tl.store(dqkv + start + inside, tl.dot(dscores, key).to(value.dtype), mask=real)
    dkey = tl.dot(tl.trans(dscores), query)
    tl.store(dqkv + start + inside + stride, dkey.to(value.dtype), mask=real)


@torch.library.custom_op("stam::short_attention", mutates_args=())
def short_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Returns softmax(q k' / sqrt(d)) v for each head.

    Args:
        qkv: (B, tokens, 3 * width), half precision: queries, keys and values, each head by head.
        num_heads: Heads; the width of one must be a power of two, at least 16.
    """
    qkv = qkv.contiguous()
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = qkv.new_empty(batch, tokens, width)
    head = width // num_heads
    block = _block(tokens)
    _forward[(batch * num_heads,)](
        qkv, out, tokens, head**-0.5, num_heads, head, block, num_warps=WARPS["forward"][block]
    )
    return out


@torch.library.custom_op("stam::short_attention_backward", mutates_args=())
def short_attention_backward(qkv: Tensor, dout: Tensor, num_heads: int) -> Tensor:
    """Returns the gradient of `qkv`, laid out like it."""
    qkv, dout = qkv.contiguous(), dout.contiguous()
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    dqkv = torch.empty_like(qkv)
    head = width // num_heads
    block = _block(tokens)
    _backward[(batch * num_heads,)](
        qkv, dout, dqkv, tokens, head**-0.5, num_heads, head, block, num_warps=WARPS["backward"][block]
    )
    return dqkv


def _block(tokens: int) -> int:
    return max(min(WARPS["forward"]), triton.next_power_of_2(tokens))  # few sizes: each is compiled


@short_attention.register_fake
def _(qkv: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)


@short_attention_backward.register_fake
def _(qkv: Tensor, dout: Tensor, num_heads: int) -> Tensor:
    return torch.empty_like(qkv)


def _keep(ctx, inputs, output):
    qkv, ctx.num_heads = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx, dout):
    (qkv,) = ctx.saved_tensors
    return short_attention_backward(qkv, dout, ctx.num_heads), None


short_attention.register_autograd(_differentiate, setup_context=_keep)
