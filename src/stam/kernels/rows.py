"""Batch norm over rows and ReLU, as the actor and the critic have them while they learn."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.kernels.launching import cells, in_half, of_column, shared_grid
from stam.kernels.sums import add_up

_ROWS, _COLUMNS = 16, 128


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_collect(
    x, running_mean, bias, sums, rows,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Sums x - centre and its square; near the mean, the variance comes out of them without loss."""
    column = tl.program_id(1) * block + tl.arange(0, block)
    middle = _centre(running_mean, bias, column, width, has_bias)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    for start in range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, rows, width)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        values = tl.where(inside, values, 0.0)
        first += values
        second += values * values
    place = sums + tl.program_id(0) * 2 * width + column
    tl.store(place, tl.sum(first, 0), mask=column < width)
    tl.store(place + width, tl.sum(second, 0), mask=column < width)


@triton.jit
def _centre(running_mean, bias, column, width, has_bias: tl.constexpr):
    """Returns about where the mean of a column lies; the bias of the layer before has not been added."""
    middle = of_column(running_mean, column, width)
    if has_bias:
        middle -= of_column(bias, column, width).to(tl.float32)
    return middle


@triton.jit(do_not_specialize=["parts", "rows"])
def _norm_relu_statistics(
    sums, running_mean, running_variance, bias, tracked, mean, inverse, parts, rows, momentum, eps,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Turns the sums into mean and inverse deviation, and moves the running statistics."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    for start in range(0, parts, tile):
        part = start + tl.arange(0, tile)
        inside = (part[:, None] < parts) & (column[None, :] < width)
        place = sums + part[:, None] * 2 * width + column[None, :]
        first += tl.load(place, mask=inside, other=0.0)
        second += tl.load(place + width, mask=inside, other=0.0)
    offset = tl.sum(first, 0) / rows
    variance = tl.maximum(tl.sum(second, 0) / rows - offset * offset, 0.0)
    real = column < width
    middle = _centre(running_mean, bias, column, width, has_bias)
    tl.store(mean + column, middle + offset, mask=real)
    tl.store(inverse + column, 1 / tl.sqrt(variance + eps), mask=real)
    old = of_column(running_mean, column, width)
    tl.store(running_mean + column, old + momentum * offset, mask=real)
    old = of_column(running_variance, column, width)
    unbiased = variance * (rows / (rows - 1))
    tl.store(running_variance + column, old + momentum * (unbiased - old), mask=real)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_apply(
    x, y, weight, bias, mean, inverse, rows, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr
):
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    place, inside = cells(row, column, rows, width)
    factor = of_column(weight, column, width)
    factor *= of_column(inverse, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean, column, width)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    values = tl.maximum((values - middle[None, :]) * factor[None, :] + offset[None, :], 0.0)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _passed(x, dy, place, inside, weight, bias, mean, inverse):
    """Returns standardised rows, and the gradient of what ReLU let through."""
    standard = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    standard = (standard - mean[None, :]) * inverse[None, :]
    given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    return standard, tl.where(standard * weight[None, :] + bias[None, :] > 0, given, 0.0)


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_collect_gradient(
    x, dy, weight, bias, mean, inverse, sums, rows,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * block + tl.arange(0, block)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean, column, width)
    spread = of_column(inverse, column, width)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    for start in range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, rows, width)
        standard, given = _passed(x, dy, place, inside, factor, offset, middle, spread)
        first += given
        second += given * standard
    place = sums + tl.program_id(0) * 2 * width + column
    tl.store(place, tl.sum(first, 0), mask=column < width)
    tl.store(place + width, tl.sum(second, 0), mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_apply_gradient(
    x, dy, weight, bias, mean, inverse, sums, dx, rows,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    place, inside = cells(row, column, rows, width)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean, column, width)
    spread = of_column(inverse, column, width)
    first = of_column(sums, column, width) / rows
    second = of_column(sums + width, column, width) / rows
    standard, given = _passed(x, dy, place, inside, factor, offset, middle, spread)
    gradient = (given - first[None, :] - standard * second[None, :]) * (factor * spread)[None, :]
    tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)


def norm_relu(rows: Tensor, norm: torch.nn.BatchNorm1d) -> Tensor:
    """Returns ReLU(batch norm(rows)) by the statistics of the rows, at least two, and keeps running ones."""
    return _NormRelu.apply(rows, norm.weight, norm.bias, None, norm)


def linear_norm_relu(rows: Tensor, weight: Tensor, bias: Tensor, norm: torch.nn.BatchNorm1d) -> Tensor:
    """Returns ReLU(batch norm(W rows + b)).

    The norm takes away again what b adds: nothing depends on it but the running mean, and its gradient, which
    the plain operations compute as rounding errors around zero, is left out.
    """
    rows, weight = in_half(rows, weight)
    product = torch.nn.functional.linear(rows, weight)
    return _NormRelu.apply(product, norm.weight, norm.bias, bias.detach(), norm)


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer_bias: Tensor | None,
        norm: torch.nn.BatchNorm1d,
    ) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        programs, blocks = shared_grid(rows, width, _ROWS, _COLUMNS, x.device)
        sums = torch.empty((programs, 2, width), device=x.device)
        has_bias = layer_bias is not None
        _norm_relu_collect[(programs, blocks)](
            x, norm.running_mean, layer_bias, sums, rows, width, _ROWS, _COLUMNS, has_bias, num_warps=4
        )
        mean, inverse = torch.empty((2, width), device=x.device)
        _norm_relu_statistics[(triton.cdiv(width, 32),)](
            sums, norm.running_mean, norm.running_var, layer_bias, norm.num_batches_tracked, mean, inverse,
            programs, rows, norm.momentum, norm.eps, width, 128, 32, has_bias, num_warps=8,
        )  # fmt: skip
        y = torch.empty_like(x)
        _norm_relu_apply[(triton.cdiv(rows, _ROWS), blocks)](
            x, y, weight, bias, mean, inverse, rows, width, _ROWS, _COLUMNS, num_warps=4
        )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        dy = dy.contiguous()
        rows, width = x.shape
        programs, blocks = shared_grid(rows, width, _ROWS, _COLUMNS, x.device)
        parts = torch.empty((programs, 2, width), device=x.device)
        _norm_relu_collect_gradient[(programs, blocks)](
            x, dy, weight, bias, mean, inverse, parts, rows, width, _ROWS, _COLUMNS, num_warps=4
        )
        sums = add_up(parts)
        dx = torch.empty_like(x)
        _norm_relu_apply_gradient[(triton.cdiv(rows, _ROWS), blocks)](
            x, dy, weight, bias, mean, inverse, sums, dx, rows, width, _ROWS, _COLUMNS, num_warps=4
        )
        return dx, sums[1], sums[0], None, None
