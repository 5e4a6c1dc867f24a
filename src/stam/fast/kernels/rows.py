"""Batch norm over rows and ReLU, as the actor and the critic have them while they learn.

Rows may come in several groups, one after the other, each with statistics of its own: the steps of an
episode, whose norms are then computed by one launch and not by one a step.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Groups:
    """Groups of rows with batch norms of their own.

    A group has `samples` samples with equally many rows each: `widest` in the first group, `fewer` less in
    each after it.
    """

    samples: int
    widest: int = 1
    fewer: int = 0
    count: int = 1

    @property
    def rows(self) -> int:
        """The rows of all groups."""
        return self.samples * (self.count * self.widest - self.fewer * (self.count * (self.count - 1) // 2))

    @property
    def most(self) -> int:
        """The rows of the largest group."""
        return self.samples * self.widest

    @property
    def layout(self) -> tuple[int, int, int]:
        """What the kernels need to find a row."""
        return self.samples, self.widest, self.fewer


@triton.jit
def span(samples, widest, fewer):
    """Returns the group a program is for, where its rows begin and end, and how many a sample has."""
    group = tl.program_id(2)
    begin = samples * (group * widest - fewer * (group * (group - 1) // 2))
    count = widest - fewer * group
    return group, begin, begin + samples * count, count


@triton.jit
def _load(
    x, of_location, chosen, row, column, begin, end, width, group, samples, widest, count,
    summed: tl.constexpr,
):  # fmt: skip
    """Returns rows of x, or x[b] + of_location[chosen[b, k]], `count` rows for each b, if they are summed."""
    place, inside = cells(row, column, end, width)
    if summed:
        sample = group * samples + (row - begin) // count
        place = sample[:, None] * width + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if summed:
        location = tl.load(chosen + sample * widest + (row - begin) % count, mask=row < end, other=0)
        place = location[:, None] * width + column[None, :]
        values += tl.load(of_location + place, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _norm_relu_collect(
    x, of_location, chosen, running_mean, bias, sums, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, summed: tl.constexpr,
    has_bias: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Sums x - centre and its square; near the mean, the variance comes out of them without loss."""
    group, begin, end, count = span(samples, widest, fewer)
    column = tl.program_id(1) * block + tl.arange(0, block)
    middle = _centre(running_mean, bias, column, width, has_bias)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    start_here = begin + tl.program_id(0) * tile
    for start in tl.range(start_here, end, tl.num_programs(0) * tile, num_stages=stages):
        row = start + tl.arange(0, tile)
        values = _load(
            x, of_location, chosen, row, column, begin, end, width, group, samples, widest, count, summed
        )
        values = tl.where(row[:, None] < end, values - middle[None, :], 0.0)
        first += values
        second += values * values
    place = sums + (group * tl.num_programs(0) + tl.program_id(0)) * 2 * width + column
    tl.store(place, tl.sum(first, 0), mask=column < width)
    tl.store(place + width, tl.sum(second, 0), mask=column < width)


@triton.jit
def _centre(running_mean, bias, column, width, has_bias: tl.constexpr):
    """Returns about where the mean of a column lies; the bias of the layer before has not been added."""
    middle = of_column(running_mean, column, width)
    if has_bias:
        middle -= of_column(bias, column, width).to(tl.float32)
    return middle


@triton.jit(do_not_specialize=["parts", "samples", "widest", "fewer", "groups"])
def _norm_relu_statistics(
    sums, running_mean, running_variance, bias, tracked, found, parts, samples, widest, fewer, groups,
    momentum, eps, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr,
    alone: tl.constexpr,
):  # fmt: skip
    """Turns the sums into mean and inverse deviation, and moves the running statistics.

    Where there are several groups it leaves what moves them in `found`, for `_follow_groups`.
    """
    column = tl.program_id(0) * block + tl.arange(0, block)
    group, begin, end, _ = span(samples, widest, fewer)
    rows = end - begin
    sums += group * parts * 2 * width
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
    unbiased = variance * (rows / (rows - 1))
    real = column < width
    middle = _centre(running_mean, bias, column, width, has_bias)
    place = found + group * width + column
    tl.store(place, middle + offset, mask=real)
    tl.store(place + groups * width, 1 / tl.sqrt(variance + eps), mask=real)
    if alone:
        old = of_column(running_mean, column, width)
        tl.store(running_mean + column, old + momentum * offset, mask=real)
        old = of_column(running_variance, column, width)
        tl.store(running_variance + column, old + momentum * (unbiased - old), mask=real)
        if tl.program_id(0) == 0:
            tl.store(tracked, tl.load(tracked) + 1)
    else:
        tl.store(place + 2 * groups * width, unbiased, mask=real)


@triton.jit(do_not_specialize=["groups"])
def _follow_groups(
    found, running_mean, running_variance, bias, tracked, groups, momentum,
    width: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Moves the running statistics by those of one group after the other."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    mean = of_column(running_mean, column, width)
    variance = of_column(running_variance, column, width)
    shift = tl.zeros((block,), tl.float32)
    if has_bias:
        shift += of_column(bias, column, width).to(tl.float32)
    for group in range(groups):
        mean += momentum * (of_column(found + group * width, column, width) + shift - mean)
        variance += momentum * (of_column(found + (2 * groups + group) * width, column, width) - variance)
    tl.store(running_mean + column, mean, mask=column < width)
    tl.store(running_variance + column, variance, mask=column < width)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + groups)


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _norm_relu_apply(
    x, of_location, chosen, y, weight, bias, mean, inverse, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, summed: tl.constexpr,
):  # fmt: skip
    group, begin, end, count = span(samples, widest, fewer)
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = begin + tl.program_id(0) * tile + tl.arange(0, tile)
    place, inside = cells(row, column, end, width)
    factor = of_column(weight, column, width)
    factor *= of_column(inverse + group * width, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean + group * width, column, width)
    values = _load(
        x, of_location, chosen, row, column, begin, end, width, group, samples, widest, count, summed
    )
    values = tl.maximum((values - middle[None, :]) * factor[None, :] + offset[None, :], 0.0)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _result_of(row, group, begin, samples, widest, count):
    """Returns where the one number of a row lies: every sample has room for `widest`."""
    return (group * samples + (row - begin) // count) * widest + (row - begin) % count


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _norm_relu_dot(
    x, y, weight, bias, mean, inverse, final, final_bias, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Multiplies each rectified row by the final layer's one, and writes nothing else."""
    group, begin, end, count = span(samples, widest, fewer)
    row = begin + tl.program_id(0) * tile + tl.arange(0, tile)
    total = tl.zeros((tile, block), tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        place, inside = cells(row, column, end, width)
        factor = of_column(weight, column, width)
        factor *= of_column(inverse + group * width, column, width)
        offset = of_column(bias, column, width)
        middle = of_column(mean + group * width, column, width)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.maximum((values - middle[None, :]) * factor[None, :] + offset[None, :], 0.0)
        total += values * of_column(final, column, width).to(tl.float32)[None, :]
    place = y + _result_of(row, group, begin, samples, widest, count)
    tl.store(place, tl.sum(total, 1) + tl.load(final_bias).to(tl.float32), mask=row < end)


@triton.jit
def passed_on(values, given, weight, bias, mean, inverse):
    """Returns standardised rows, and of the gradient given what ReLU let through."""
    standard = (values - mean[None, :]) * inverse[None, :]
    return standard, tl.where(standard * weight[None, :] + bias[None, :] > 0, given, 0.0)


@triton.jit
def _given(
    dy, final, row, column, begin, end, width, group, samples, widest, count, dotted: tl.constexpr
):  # fmt: skip
    """Returns the gradient of rectified rows: as it is, or of their product with the final layer."""
    if dotted:
        place = dy + _result_of(row, group, begin, samples, widest, count)
        given = tl.load(place, mask=row < end, other=0.0)[:, None]
        given *= of_column(final, column, width).to(tl.float32)[None, :]
    else:
        place, inside = cells(row, column, end, width)
        given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    return given


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _norm_relu_collect_gradient(
    x, dy, final, weight, bias, mean, inverse, sums, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, dotted: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of bias, weight and, where rows were multiplied by it, of the final layer."""
    group, begin, end, count = span(samples, widest, fewer)
    column = tl.program_id(1) * block + tl.arange(0, block)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean + group * width, column, width)
    spread = of_column(inverse + group * width, column, width)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    third = tl.zeros((tile, block), tl.float32)
    start_here = begin + tl.program_id(0) * tile
    for start in tl.range(start_here, end, tl.num_programs(0) * tile, num_stages=stages):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, end, width)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        given = _given(dy, final, row, column, begin, end, width, group, samples, widest, count, dotted)
        standard, passed = passed_on(values, given, factor, offset, middle, spread)
        first += passed
        second += passed * standard
        if dotted:
            rectified = tl.maximum(standard * factor[None, :] + offset[None, :], 0.0)
            place = dy + _result_of(row, group, begin, samples, widest, count)
            third += rectified * tl.load(place, mask=row < end, other=0.0)[:, None]
    part = tl.program_id(0) * tl.num_programs(2) + group
    place = sums + part * (3 if dotted else 2) * width + column
    tl.store(place, tl.sum(first, 0), mask=column < width)
    tl.store(place + width, tl.sum(second, 0), mask=column < width)
    if dotted:
        tl.store(place + 2 * width, tl.sum(third, 0), mask=column < width)


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _norm_relu_apply_gradient(
    x, dy, final, weight, bias, mean, inverse, sums, dx, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, dotted: tl.constexpr,
):  # fmt: skip
    group, begin, end, count = span(samples, widest, fewer)
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = begin + tl.program_id(0) * tile + tl.arange(0, tile)
    place, inside = cells(row, column, end, width)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean + group * width, column, width)
    spread = of_column(inverse + group * width, column, width)
    sums += group * (3 if dotted else 2) * width
    first = of_column(sums, column, width) / (end - begin)
    second = of_column(sums + width, column, width) / (end - begin)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    given = _given(dy, final, row, column, begin, end, width, group, samples, widest, count, dotted)
    standard, given = passed_on(values, given, factor, offset, middle, spread)
    gradient = (given - first[None, :] - standard * second[None, :]) * (factor * spread)[None, :]
    tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=inside)


def norm_relu(rows: Tensor, norm: torch.nn.BatchNorm1d, groups: Groups | None = None) -> Tensor:
    """Returns ReLU(batch norm(rows)) by the statistics of the rows, at least two, and keeps running ones.

    With groups, each is normalised by its own statistics, and they move the running ones one after another.
    """
    return _NormRelu.apply(rows, norm.weight, norm.bias, None, norm, groups or Groups(len(rows)))


def linear_norm_relu(
    rows: Tensor, weight: Tensor, bias: Tensor, norm: torch.nn.BatchNorm1d, groups: Groups | None = None
) -> Tensor:
    """Returns ReLU(batch norm(W rows + b)).

    The norm takes away again what b adds: nothing depends on it but the running mean, and its gradient, which
    the plain operations compute as rounding errors around zero, is left out.
    """
    rows, weight = in_half(rows, weight)
    product = torch.nn.functional.linear(rows, weight)
    return _NormRelu.apply(product, norm.weight, norm.bias, bias.detach(), norm, groups or Groups(len(rows)))


def linear_norm_relu_dot(
    rows: Tensor,
    layer: tuple[Tensor, Tensor],
    norm: torch.nn.BatchNorm1d,
    final: tuple[Tensor, Tensor],
    groups: Groups | None = None,
) -> Tensor:
    """Returns w ReLU(batch norm(W rows + b)) + c, one number a row, in single precision.

    Between the product with W and that number nothing is written, nor is the gradient of it. The numbers are
    flat; with groups whose samples have fewer rows than others, those samples' last numbers are 0.

    Args:
        rows: (rows, any).
        layer: W and b; as in `linear_norm_relu`, b gets no gradient.
        norm: As there.
        final: w and c, of a layer with one output.
        groups: As in `norm_relu`.
    """
    weight, bias = layer
    rows, weight, *final_half = in_half(rows, weight, *final)
    product = torch.nn.functional.linear(rows, weight)
    groups = groups or Groups(len(rows))
    return _NormReluDot.apply(product, norm.weight, norm.bias, bias.detach(), norm, groups, *final_half)


def statistics_of(
    x: Tensor,
    of_location: Tensor | None,
    chosen: Tensor | None,
    groups: Groups,
    layer_bias: Tensor | None,
    norm: torch.nn.BatchNorm1d,
) -> Tensor:
    """Returns (2, groups, width) mean and inverse deviation of the rows, and moves the running ones."""
    width, count = x.shape[1], groups.count
    programs, blocks = shared_grid(groups.most, width, COLLECT["rows"], COLLECT["columns"], x.device)
    programs = triton.cdiv(programs, count)
    sums = torch.empty((count, programs, 2, width), device=x.device)
    has_bias, summed = layer_bias is not None, chosen is not None
    _norm_relu_collect[(programs, blocks, count)](
        x, of_location, chosen, norm.running_mean, layer_bias, sums, *groups.layout,
        width, COLLECT["rows"], COLLECT["columns"], summed, has_bias, COLLECT["stages"],
        num_warps=COLLECT["warps"],
    )  # fmt: skip
    found = torch.empty((3, count, width), device=x.device)
    running = norm.running_mean, norm.running_var, layer_bias, norm.num_batches_tracked
    _norm_relu_statistics[(triton.cdiv(width, 32), 1, count)](
        sums, *running, found, programs, *groups.layout, count, norm.momentum, norm.eps,
        width, 128, 32, has_bias, count == 1, num_warps=8,
    )  # fmt: skip
    if count > 1:
        _follow_groups[(triton.cdiv(width, 128),)](
            found, *running, count, norm.momentum, width, 128, has_bias, num_warps=4
        )
    return found[:2]


def normalise(
    x: Tensor,
    of_location: Tensor | None,
    chosen: Tensor | None,
    groups: Groups,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
) -> Tensor:
    """Returns rectified, normalised rows."""
    width = x.shape[1]
    y = x.new_empty(groups.rows, width)
    _norm_relu_apply[_tiles(groups, width)](
        x, of_location, chosen, y, weight, bias, *statistics, *groups.layout,
        width, _ROWS, _COLUMNS, chosen is not None, num_warps=4,
    )  # fmt: skip
    return y


def _tiles(groups: Groups, width: int) -> tuple[int, int, int]:
    return triton.cdiv(groups.most, _ROWS), triton.cdiv(width, _COLUMNS), groups.count


def collect_gradient(
    x: Tensor,
    dy: Tensor,
    final: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    groups: Groups,
) -> Tensor:
    """Returns (groups, 2 or 3, width) the gradients of bias and weight, and of the final layer, if any."""
    width, launch, count = x.shape[1], COLLECT_GRADIENT, groups.count
    programs, blocks = shared_grid(groups.most, width, launch["rows"], launch["columns"], x.device)
    programs = triton.cdiv(programs, count)
    parts = torch.empty((programs, count, 2 if final is None else 3, width), device=x.device)
    _norm_relu_collect_gradient[(programs, blocks, count)](
        x, dy, final, weight, bias, *statistics, parts, *groups.layout, width, launch["rows"],
        launch["columns"], final is not None, launch["stages"], num_warps=launch["warps"],
    )  # fmt: skip
    return add_up(parts)


def over_groups(sums: Tensor) -> Tensor:
    """Returns the sum of (groups, ...) over the groups."""
    return sums[0] if len(sums) == 1 else add_up(sums)


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer_bias: Tensor | None,
        norm: torch.nn.BatchNorm1d,
        groups: Groups,
    ) -> Tensor:
        x = x.contiguous()
        statistics = statistics_of(x, None, None, groups, layer_bias, norm)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.groups = groups
        return normalise(x, None, None, groups, weight, bias, statistics)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        dx, sums = _gradient(x, dy.contiguous(), None, weight, bias, statistics, ctx.groups)
        return dx, sums[1], sums[0], None, None, None


class _NormReluDot(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer_bias: Tensor,
        norm: torch.nn.BatchNorm1d,
        groups: Groups,
        final: Tensor,
        final_bias: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        statistics = statistics_of(x, None, None, groups, layer_bias, norm)
        ctx.save_for_backward(x, weight, bias, statistics, final)
        ctx.groups = groups
        new = torch.zeros if groups.fewer else torch.empty
        y = new(groups.count * groups.most, device=x.device)
        _norm_relu_dot[(triton.cdiv(groups.most, DOT["rows"]), 1, groups.count)](
            x, y, weight, bias, *statistics, final, final_bias, *groups.layout, x.shape[1], DOT["rows"],
            DOT["columns"], num_warps=DOT["warps"],
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, final = ctx.saved_tensors
        dx, sums = _gradient(x, dy.contiguous(), final, weight, bias, statistics, ctx.groups)
        dfinal = sums[2].to(final.dtype).view_as(final)
        return dx, sums[1], sums[0], None, None, None, dfinal, dy.sum().to(final.dtype).view(1)


def _gradient(
    x: Tensor,
    dy: Tensor,
    final: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    groups: Groups,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of rows, and the sums of `collect_gradient` over all groups."""
    width = x.shape[1]
    sums = collect_gradient(x, dy, final, weight, bias, statistics, groups)
    dx = torch.empty_like(x)
    _norm_relu_apply_gradient[_tiles(groups, width)](
        x, dy, final, weight, bias, *statistics, sums, dx, *groups.layout, width, _ROWS, _COLUMNS,
        final is not None, num_warps=4,
    )  # fmt: skip
    return dx, over_groups(sums)
