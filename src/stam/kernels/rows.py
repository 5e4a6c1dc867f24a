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
def _norm_relu_collect(x, centre, sums, rows, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr):
    """Sums x - centre and its square; near the mean, the variance comes out of them without loss."""
    column = tl.program_id(1) * block + tl.arange(0, block)
    middle = of_column(centre, column, width)
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
    return _NormRelu.apply(rows, norm.weight, norm.bias, _running(norm), norm)


def linear_norm_relu(rows: Tensor, weight: Tensor, bias: Tensor, norm: torch.nn.BatchNorm1d) -> Tensor:
    """Returns ReLU(batch norm(W rows + b)).

    The norm takes away again what b adds: nothing depends on it but the running mean, and its gradient, which
    the plain operations compute as rounding errors around zero, is left out.
    """
    rows, weight = in_half(rows, weight)
    centre = _running(norm) - bias.detach().float()
    return _NormRelu.apply(torch.nn.functional.linear(rows, weight), norm.weight, norm.bias, centre, norm)


def _running(norm: torch.nn.BatchNorm1d) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, centre: Tensor, norm: torch.nn.BatchNorm1d
    ) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        programs, blocks = shared_grid(rows, width, _ROWS, _COLUMNS, x.device)
        sums = torch.empty((programs, 2, width), device=x.device)
        _norm_relu_collect[(programs, blocks)](x, centre, sums, rows, width, _ROWS, _COLUMNS, num_warps=4)
        offset, square = add_up(sums) / rows
        variance = (square - offset * offset).clamp_min_(0)
        mean, inverse = centre + offset, (variance + norm.eps).rsqrt_()
        _keep_running(norm, offset, variance * (rows / (rows - 1)))
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


def _keep_running(norm: torch.nn.BatchNorm1d, offset: Tensor, variance: Tensor) -> None:
    """Moves the running statistics; `offset` is the batch's mean less the running one."""
    assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    norm.running_mean.add_(offset, alpha=norm.momentum)
    norm.running_var.lerp_(variance, norm.momentum)
