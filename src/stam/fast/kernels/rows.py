"""Batch norm over rows and ReLU, as the actor and the critic have them while they learn."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import cells, in_half, of_column, shared_grid
from stam.fast.kernels.sums import add_up

_ROWS, _COLUMNS = 16, 128
# rows and columns of a tile, warps that share it, loads ahead; `benchmarks/kernels.py` tries others
COLLECT = {"rows": 16, "columns": 128, "warps": 4, "stages": 3}
COLLECT_GRADIENT = {"rows": 16, "columns": 128, "warps": 4, "stages": 3}
DOT = {"rows": 16, "columns": 256, "warps": 4}


@triton.jit
def _load(x, of_location, chosen, row, column, rows, width, count, summed: tl.constexpr):
    """Returns rows of x, or x[b] + of_location[chosen[b, k]], `count` rows for each b, if they are summed."""
    place, inside = cells(row, column, rows, width)
    if summed:
        place = (row // count)[:, None] * width + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if summed:
        location = tl.load(chosen + row, mask=row < rows, other=0)
        place = location[:, None] * width + column[None, :]
        values += tl.load(of_location + place, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["rows", "count"])
def _norm_relu_collect(
    x, of_location, chosen, running_mean, bias, sums, rows, count,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, summed: tl.constexpr,
    has_bias: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Sums x - centre and its square; near the mean, the variance comes out of them without loss."""
    column = tl.program_id(1) * block + tl.arange(0, block)
    middle = _centre(running_mean, bias, column, width, has_bias)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    for start in tl.range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile, num_stages=stages):
        row = start + tl.arange(0, tile)
        values = _load(x, of_location, chosen, row, column, rows, width, count, summed)
        values = tl.where(row[:, None] < rows, values - middle[None, :], 0.0)
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


@triton.jit(do_not_specialize=["rows", "count"])
def _norm_relu_apply(
    x, of_location, chosen, y, weight, bias, mean, inverse, rows, count,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, summed: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    place, inside = cells(row, column, rows, width)
    factor = of_column(weight, column, width)
    factor *= of_column(inverse, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean, column, width)
    values = _load(x, of_location, chosen, row, column, rows, width, count, summed)
    values = tl.maximum((values - middle[None, :]) * factor[None, :] + offset[None, :], 0.0)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_dot(
    x, y, weight, bias, mean, inverse, final, final_bias, rows,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Multiplies each rectified row by the final layer's one, and writes nothing else."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    total = tl.zeros((tile, block), tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        place, inside = cells(row, column, rows, width)
        factor = of_column(weight, column, width)
        factor *= of_column(inverse, column, width)
        offset = of_column(bias, column, width)
        middle = of_column(mean, column, width)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.maximum((values - middle[None, :]) * factor[None, :] + offset[None, :], 0.0)
        total += values * of_column(final, column, width).to(tl.float32)[None, :]
    tl.store(y + row, tl.sum(total, 1) + tl.load(final_bias).to(tl.float32), mask=row < rows)


@triton.jit
def passed_on(values, given, weight, bias, mean, inverse):
    """Returns standardised rows, and of the gradient given what ReLU let through."""
    standard = (values - mean[None, :]) * inverse[None, :]
    return standard, tl.where(standard * weight[None, :] + bias[None, :] > 0, given, 0.0)


@triton.jit
def _given(dy, final, row, column, rows, width, dotted: tl.constexpr):
    """Returns the gradient of rectified rows: as it is, or of their product with the final layer."""
    if dotted:
        given = tl.load(dy + row, mask=row < rows, other=0.0)[:, None]
        given *= of_column(final, column, width).to(tl.float32)[None, :]
    else:
        place, inside = cells(row, column, rows, width)
        given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    return given


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_collect_gradient(
    x, dy, final, weight, bias, mean, inverse, sums, rows,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, dotted: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of bias, weight and, where rows were multiplied by it, of the final layer."""
    column = tl.program_id(1) * block + tl.arange(0, block)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean, column, width)
    spread = of_column(inverse, column, width)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    third = tl.zeros((tile, block), tl.float32)
    for start in tl.range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile, num_stages=stages):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, rows, width)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        given = _given(dy, final, row, column, rows, width, dotted)
        standard, passed = passed_on(values, given, factor, offset, middle, spread)
        first += passed
        second += passed * standard
        if dotted:
            rectified = tl.maximum(standard * factor[None, :] + offset[None, :], 0.0)
            third += rectified * tl.load(dy + row, mask=row < rows, other=0.0)[:, None]
    place = sums + tl.program_id(0) * (3 if dotted else 2) * width + column
    tl.store(place, tl.sum(first, 0), mask=column < width)
    tl.store(place + width, tl.sum(second, 0), mask=column < width)
    if dotted:
        tl.store(place + 2 * width, tl.sum(third, 0), mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _norm_relu_apply_gradient(
    x, dy, final, weight, bias, mean, inverse, sums, dx, rows,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, dotted: tl.constexpr,
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
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    given = _given(dy, final, row, column, rows, width, dotted)
    standard, given = passed_on(values, given, factor, offset, middle, spread)
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


def linear_norm_relu_dot(
    rows: Tensor, layer: tuple[Tensor, Tensor], norm: torch.nn.BatchNorm1d, final: tuple[Tensor, Tensor]
) -> Tensor:
    """Returns w ReLU(batch norm(W rows + b)) + c, one number a row, in single precision.

    Between the product with W and that number nothing is written, nor is the gradient of it.

    Args:
        rows: (rows, any).
        layer: W and b; as in `linear_norm_relu`, b gets no gradient.
        norm: As there.
        final: w and c, of a layer with one output.
    """
    weight, bias = layer
    rows, weight, *final_half = in_half(rows, weight, *final)
    product = torch.nn.functional.linear(rows, weight)
    return _NormReluDot.apply(product, norm.weight, norm.bias, bias.detach(), norm, *final_half)


def statistics_of(
    x: Tensor,
    of_location: Tensor | None,
    chosen: Tensor | None,
    rows: int,
    layer_bias: Tensor | None,
    norm: torch.nn.BatchNorm1d,
) -> Tensor:
    """Returns (2, width) mean and inverse deviation of the rows, and moves the running ones."""
    width = x.shape[1]
    programs, blocks = shared_grid(rows, width, COLLECT["rows"], COLLECT["columns"], x.device)
    sums = torch.empty((programs, 2, width), device=x.device)
    has_bias, summed, count = layer_bias is not None, chosen is not None, _count(chosen)
    _norm_relu_collect[(programs, blocks)](
        x, of_location, chosen, norm.running_mean, layer_bias, sums, rows, count,
        width, COLLECT["rows"], COLLECT["columns"], summed, has_bias, COLLECT["stages"],
        num_warps=COLLECT["warps"],
    )  # fmt: skip
    found = torch.empty((2, width), device=x.device)
    _norm_relu_statistics[(triton.cdiv(width, 32),)](
        sums, norm.running_mean, norm.running_var, layer_bias, norm.num_batches_tracked, found[0], found[1],
        programs, rows, norm.momentum, norm.eps, width, 128, 32, has_bias, num_warps=8,
    )  # fmt: skip
    return found


def normalise(
    x: Tensor,
    of_location: Tensor | None,
    chosen: Tensor | None,
    rows: int,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
) -> Tensor:
    """Returns rectified, normalised rows."""
    width = x.shape[1]
    y = x.new_empty(rows, width)
    _norm_relu_apply[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
        x, of_location, chosen, y, weight, bias, *statistics, rows, _count(chosen),
        width, _ROWS, _COLUMNS, chosen is not None, num_warps=4,
    )  # fmt: skip
    return y


def collect_gradient(
    x: Tensor, dy: Tensor, final: Tensor | None, weight: Tensor, bias: Tensor, statistics: Tensor
) -> Tensor:
    """Returns (2 or 3, width) the gradients of bias and weight, and of the final layer, if there is one."""
    rows, width, launch = dy.shape[0], x.shape[1], COLLECT_GRADIENT
    programs, blocks = shared_grid(rows, width, launch["rows"], launch["columns"], x.device)
    parts = torch.empty((programs, 2 if final is None else 3, width), device=x.device)
    _norm_relu_collect_gradient[(programs, blocks)](
        x, dy, final, weight, bias, *statistics, parts, rows, width, launch["rows"], launch["columns"],
        final is not None, launch["stages"], num_warps=launch["warps"],
    )  # fmt: skip
    return add_up(parts)


def _count(chosen: Tensor | None) -> int:
    """Returns how many rows a sample has."""
    return 1 if chosen is None else chosen.shape[1]


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
        statistics = statistics_of(x, None, None, len(x), layer_bias, norm)
        ctx.save_for_backward(x, weight, bias, statistics)
        return normalise(x, None, None, len(x), weight, bias, statistics)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        dx, sums = _gradient(x, dy.contiguous(), None, weight, bias, statistics)
        return dx, sums[1], sums[0], None, None


class _NormReluDot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer_bias: Tensor,
        norm: torch.nn.BatchNorm1d,
        final: Tensor,
        final_bias: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        statistics = statistics_of(x, None, None, rows, layer_bias, norm)
        ctx.save_for_backward(x, weight, bias, statistics, final)
        y = torch.empty(rows, device=x.device)
        _norm_relu_dot[(triton.cdiv(rows, DOT["rows"]),)](
            x, y, weight, bias, *statistics, final, final_bias, rows, width, DOT["rows"], DOT["columns"],
            num_warps=DOT["warps"],
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, final = ctx.saved_tensors
        dx, sums = _gradient(x, dy.contiguous(), final, weight, bias, statistics)
        dfinal = sums[2].to(final.dtype).view_as(final)
        return dx, sums[1], sums[0], None, None, dfinal, dy.sum().to(final.dtype).view(1)


def _gradient(
    x: Tensor, dy: Tensor, final: Tensor | None, weight: Tensor, bias: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of rows, and what `collect_gradient` returns."""
    rows, width = x.shape
    sums = collect_gradient(x, dy, final, weight, bias, statistics)
    dx = torch.empty_like(x)
    _norm_relu_apply_gradient[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
        x, dy, final, weight, bias, *statistics, sums, dx, rows, width, _ROWS, _COLUMNS, final is not None,
        num_warps=4,
    )  # fmt: skip
    return dx, sums
