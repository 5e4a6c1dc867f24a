"""A linear layer or an MLP, the residual sum it is added to, and the layer norm of that sum."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.gelu import gelu, gelu_backward
from stam.fast.kernels.launching import cells, in_half, num_programs, of_column, padded
from stam.fast.kernels.sums import add_up

# Rows in a tile, warps that share it, loads ahead, programs a processor: `benchmarks/kernels.py` tries
# others. Several warps would share each row, and wait for each other at every sum.
FORWARD = {"rows": 2, "warps": 1}
BACKWARD = {"rows": 2, "warps": 1, "stages": 3, "programs": 8}


@triton.jit
def _standardise(values, inside, width, eps):
    """Returns rows with zero mean and unit variance, and what they were divided by, inverted."""
    mean = tl.sum(values, 1) / width
    centred = tl.where(inside, values - mean[:, None], 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred * inverse[:, None], inverse


@triton.jit(do_not_specialize=["rows", "tokens"])
def _add_norm(
    x, branch, scale, weight, bias, total, normed, rows, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    has_branch: tl.constexpr, has_scale: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, block)
    place, inside = cells(row, column, rows, width)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if has_branch:
        added = tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        if has_scale:
            added *= tl.load(scale + row // tokens, mask=row < rows, other=0.0)[:, None]
        values += added
        tl.store(total + place, values.to(total.dtype.element_ty), mask=inside)
    standard, _ = _standardise(values, inside, width, eps)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    result = standard * factor[None, :] + offset[None, :]
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _add_norm_backward(
    total, scale, weight, dtotal, dnormed, dx, dbranch, sums, rows, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    has_dtotal: tl.constexpr, has_branch: tl.constexpr, has_scale: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block)
    factor = of_column(weight, column, width)
    dweight = tl.zeros((tile, block), tl.float32)
    dbias = tl.zeros((tile, block), tl.float32)
    dbranch_sum = tl.zeros((tile, block), tl.float32)
    for start in tl.range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile, num_stages=stages):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, rows, width)
        values = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(dnormed + place, mask=inside, other=0.0).to(tl.float32)
        standard, inverse = _standardise(values, inside, width, eps)
        dweight += given * standard
        dbias += given
        given *= factor[None, :]
        along = tl.sum(given * standard, 1) / width
        mean = tl.sum(given, 1) / width
        gradient = (given - standard * along[:, None] - mean[:, None]) * inverse[:, None]
        if has_dtotal:
            gradient += tl.load(dtotal + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(inside, gradient, 0.0)
        tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)
        if has_branch:
            if has_scale:
                gradient *= tl.load(scale + row // tokens, mask=row < rows, other=0.0)[:, None]
            rounded = gradient.to(dbranch.dtype.element_ty)
            tl.store(dbranch + place, rounded, mask=inside)
            dbranch_sum += rounded.to(tl.float32)
    place = sums + tl.program_id(0) * 3 * width + column
    tl.store(place, tl.sum(dweight, 0), mask=column < width)
    tl.store(place + width, tl.sum(dbias, 0), mask=column < width)
    tl.store(place + 2 * width, tl.sum(dbranch_sum, 0), mask=column < width)


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns rows of the residual stream (B, tokens, width) as they are, and their layer norm in half.

    Going on with the first lets both gradients be summed in one pass.
    """
    return _AddAndNorm.apply(x, None, None, None, None, None, None, weight, bias, eps)


def linear_add_norm(
    x: Tensor,
    inputs: Tensor,
    layers: tuple[tuple[Tensor, Tensor], ...],
    scale: Tensor | None,
    norm: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns x + scale (W inputs + b) and its layer norm, in half precision.

    Args:
        x: (B, tokens, width), of the residual stream.
        inputs: (B, tokens, any).
        layers: W and b; before them those of another layer with GELU, where the branch is an MLP.
        scale: One number a sample, with as many dimensions as `x`.
        norm: Weight and bias of the layer norm.
        eps: Of the layer norm.
    """
    first = in_half(*layers[0]) if len(layers) > 1 else (None, None)
    (half,) = in_half(inputs)
    return _AddAndNorm.apply(x, half, *first, *in_half(*layers[-1]), scale, *norm, eps)


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        inputs: Tensor | None,
        first: Tensor | None,
        first_bias: Tensor | None,
        matrix: Tensor | None,
        layer_bias: Tensor | None,
        scale: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        branch = hidden = before = None
        if inputs is not None and matrix is not None and layer_bias is not None:
            inputs = hidden = inputs.flatten(0, 1)
            if first is not None and first_bias is not None:
                before = torch.addmm(first_bias, inputs, first.t())
                hidden = gelu(before)
            branch = torch.addmm(layer_bias, hidden, matrix.t())
        total, normed = add_norm(x.contiguous(), branch, scale, weight, bias, eps)
        ctx.save_for_backward(total, inputs, first, before, hidden, matrix, scale, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        total, inputs, first, before, hidden, matrix, scale, weight = ctx.saved_tensors
        dtotal = None if dtotal is None else dtotal.contiguous()
        dx, dbranch, parts = add_norm_backward(
            total, scale, weight, dtotal, dnormed.contiguous(), ctx.eps, inputs is not None
        )
        dweight, dbias, dlayer_bias = add_up(parts)
        if dbranch is None:
            return dx, None, None, None, None, None, None, dweight, dbias, None
        dfirst = dfirst_bias = None
        if first is None:
            dinputs = dbranch @ matrix
        else:
            dbefore, parts = gelu_backward(before, dbranch @ matrix)
            dinputs = dbefore @ first
            if ctx.needs_input_grad[2]:  # a core may be trained in part
                dfirst = dbefore.t() @ inputs
            if ctx.needs_input_grad[3]:
                dfirst_bias = add_up(parts, first.dtype)
        dmatrix = dbranch.t() @ hidden if ctx.needs_input_grad[4] else None
        dinputs = dinputs.view(*total.shape[:2], -1)
        dlayer_bias = dlayer_bias.to(dnormed.dtype)
        return dx, dinputs, dfirst, dfirst_bias, dmatrix, dlayer_bias, None, dweight, dbias, None


def add_norm(
    x: Tensor, branch: Tensor | None, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns x + scale branch, as precise as x, and its layer norm; branch is in half, (B tokens, width)."""
    tokens, width = x.shape[1:]
    rows, block = x.shape[0] * tokens, padded(width)
    tile = FORWARD["rows"]
    total = x.view_as(x) if branch is None else torch.empty_like(x)
    half = torch.get_autocast_dtype("cuda") if branch is None else branch.dtype
    normed = torch.empty_like(x, dtype=half)
    _add_norm[(triton.cdiv(rows, tile),)](
        x, branch, scale, weight, bias, total, normed, rows, tokens, eps,
        width, block, tile, branch is not None, scale is not None, num_warps=FORWARD["warps"],
    )  # fmt: skip
    return total, normed


def add_norm_backward(
    total: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    dtotal: Tensor | None,
    dnormed: Tensor,
    eps: float,
    has_branch: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the gradients of x and the branch, and those of weight, bias and branch's bias in parts.

    The parts, (programs, 3, width), are to be added up.
    """
    tokens, width = total.shape[1:]
    rows, block = total.shape[0] * tokens, padded(width)
    tile = BACKWARD["rows"]
    programs = num_programs(triton.cdiv(rows, tile), BACKWARD["programs"], total.device)
    dx = torch.empty_like(total)
    dbranch = dnormed.new_empty(rows, width) if has_branch else None
    sums = torch.empty((programs, 3, width), device=total.device)
    _add_norm_backward[(programs,)](
        total, scale, weight, dtotal, dnormed, dx, dbranch, sums, rows, tokens, eps, width, block, tile,
        dtotal is not None, has_branch, scale is not None, BACKWARD["stages"], num_warps=BACKWARD["warps"],
    )  # fmt: skip
    return dx, dbranch, sums
