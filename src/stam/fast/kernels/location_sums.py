"""Batch norm and ReLU of sums, one part for a sample and one for a location: the actor's first layer.

The sums are made where they are needed, from two small tables. Neither they nor their gradients are written:
what they are made of gets its gradient from two readings of the one that comes in, first sample by sample,
which also gives batch norm's own sums, then location by location.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import cells, of_column, where_chosen
from stam.fast.kernels.rows import Groups, normalise, over_groups, passed_on, span, statistics_of
from stam.fast.kernels.sums import add_up

_TILE, _BLOCK = 16, 128
# rows and columns of a tile, warps that share it, loads ahead, and into how many parts samples are cut;
# `benchmarks/kernels.py` tries others
COLLECT = {"rows": 4, "columns": 512, "warps": 2, "stages": 3}
SHARE = {"rows": 16, "columns": 128, "warps": 4, "stages": 2, "parts": 3}


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _sum_norm_relu_collect_gradient(
    of_sample, of_location, chosen, dy, weight, bias, mean, inverse, sums, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Sums, over the rows of a sample, what ReLU let through, that times the standardised rows, and those."""
    group, begin, _, count = span(samples, widest, fewer)
    sample = group * samples + tl.program_id(0)
    begin += tl.program_id(0) * count
    column = tl.program_id(1) * block + tl.arange(0, block)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean + group * width, column, width)
    spread = of_column(inverse + group * width, column, width)
    mine = of_column(of_sample + sample * width, column, width).to(tl.float32)
    first = tl.zeros((tile, block), tl.float32)
    second = tl.zeros((tile, block), tl.float32)
    third = tl.zeros((tile, block), tl.float32)
    for start in tl.range(0, count, tile, num_stages=stages):
        place = start + tl.arange(0, tile)
        real = place < count
        inside = real[:, None] & (column[None, :] < width)
        location = tl.load(chosen + sample * widest + place, mask=real, other=0)
        values = tl.load(of_location + location[:, None] * width + column[None, :], mask=inside, other=0.0)
        values = mine[None, :] + values.to(tl.float32)
        row = (begin.to(tl.int64) + place)[:, None] * width + column[None, :]
        given = tl.load(dy + row, mask=inside, other=0.0).to(tl.float32)
        standard, passed = passed_on(values, given, factor, offset, middle, spread)
        first += passed
        second += passed * standard
        third += tl.where(inside, standard, 0.0)
    goal = sums + (tl.program_id(0) * tl.num_programs(2) + group) * 3 * width + column
    tl.store(goal, tl.sum(first, 0), mask=column < width)
    tl.store(goal + width, tl.sum(second, 0), mask=column < width)
    tl.store(goal + 2 * width, tl.sum(third, 0), mask=column < width)


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _share_with_samples(
    of_samples, sums, weight, inverse, dof_sample, samples, widest, fewer,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Turns a sample's sums, and those over all samples, into the gradient of its part."""
    group, _, _, count = span(samples, widest, fewer)
    sample = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * block + tl.arange(0, block)
    place, inside = cells(sample, column, samples, width)
    own = of_samples + (sample * tl.num_programs(2) + group)[:, None] * 3 * width + column[None, :]
    sums += group * 3 * width
    first = of_column(sums, column, width) / samples  # what count rows of the mean come to
    second = of_column(sums + width, column, width) / (samples * count)
    factor = of_column(weight, column, width) * of_column(inverse + group * width, column, width)
    dof_sample += group.to(tl.int64) * samples * width
    passed = tl.load(own, mask=inside, other=0.0)
    standard = tl.load(own + 2 * width, mask=inside, other=0.0)
    gradient = (passed - first[None, :] - standard * second[None, :]) * factor[None, :]
    tl.store(dof_sample + place, gradient.to(dof_sample.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["samples", "widest", "fewer"])
def _share_with_locations(
    of_sample, of_location, places, dy, weight, bias, mean, inverse, sums, parts, samples, widest, fewer,
    num_parts, locations: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Adds up the gradient of one location's part, over some of the samples.

    `places` says where a location stands among those chosen for a sample: at `count` or beyond if it is not.
    """
    location = tl.program_id(0) // num_parts
    group, begin, _, count = span(samples, widest, fewer)
    column = tl.program_id(1) * block + tl.arange(0, block)
    factor = of_column(weight, column, width)
    offset = of_column(bias, column, width)
    middle = of_column(mean + group * width, column, width)
    spread = of_column(inverse + group * width, column, width)
    rows = samples * count
    sums += group * 3 * width
    first = of_column(sums, column, width) / rows
    second = of_column(sums + width, column, width) / rows
    own = of_column(of_location + location * width, column, width).to(tl.float32)
    total = tl.zeros((tile, block), tl.float32)
    part = tl.program_id(0) % num_parts
    places += group * samples * locations
    of_sample += group.to(tl.int64) * samples * width
    start, step = part * tile, num_parts * tile
    for start_sample in tl.range(start, samples, step, num_stages=stages):
        sample = start_sample + tl.arange(0, tile)
        stands = tl.load(places + sample * locations + location, mask=sample < samples, other=count)
        among = (stands < count)[:, None] & (column[None, :] < width)
        row = (begin + sample.to(tl.int64) * count + stands)[:, None] * width + column[None, :]
        given = tl.load(dy + row, mask=among, other=0.0).to(tl.float32)
        place = sample[:, None] * width + column[None, :]
        values = own[None, :] + tl.load(of_sample + place, mask=among, other=0.0).to(tl.float32)
        standard, given = passed_on(values, given, factor, offset, middle, spread)
        total += tl.where(among, given - first[None, :] - standard * second[None, :], 0.0)
    goal = parts + ((group * num_parts + part) * locations + location) * width + column
    tl.store(goal, tl.sum(total, 0) * factor * spread, mask=column < width)


def sum_norm_relu(
    of_sample: Tensor,
    of_location: Tensor,
    chosen: Tensor,
    norm: torch.nn.BatchNorm1d,
    groups: Groups | None = None,
) -> Tensor:
    """Returns ReLU(batch norm(of_sample[b] + of_location[chosen[b, k]])), a row for each b and k.

    Args:
        of_sample: (B, width).
        of_location: (L, width).
        chosen: (B, K), no location twice in a row.
        norm: Whose statistics are those of the B K rows, and which keeps running ones.
        groups: As in `norm_relu`; the samples of all groups are one after the other, and of those chosen
            for a sample only the first count.
    """
    groups = groups or Groups(*chosen.shape)
    return _SumNormRelu.apply(of_sample, of_location, chosen, norm.weight, norm.bias, norm, groups)


class _SumNormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        of_sample: Tensor,
        of_location: Tensor,
        chosen: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: torch.nn.BatchNorm1d,
        groups: Groups,
    ) -> Tensor:
        of_sample, of_location, chosen = (given.contiguous() for given in (of_sample, of_location, chosen))
        statistics = statistics_of(of_sample, of_location, chosen, groups, None, norm)
        ctx.save_for_backward(of_sample, of_location, chosen, weight, bias, statistics)
        ctx.groups = groups
        return normalise(of_sample, of_location, chosen, groups, weight, bias, statistics)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of_sample, of_location, chosen, weight, bias, statistics = ctx.saved_tensors
        dy = dy.contiguous()
        given = of_sample, of_location, chosen, dy, weight, bias, statistics, ctx.groups
        of_samples, sums = collect_gradient_of_sums(*given)
        dof_sample, dof_location = share_gradient(*given, of_samples, sums)
        total = over_groups(sums)
        return dof_sample, dof_location, None, total[1], total[0], None, None


def collect_gradient_of_sums(
    of_sample: Tensor,
    of_location: Tensor,
    chosen: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    groups: Groups,
) -> tuple[Tensor, Tensor]:
    """Returns the sums that a gradient needs: of each sample, (samples, groups, 3, width), and of a group."""
    width, launch, samples = of_sample.shape[1], COLLECT, groups.samples
    of_samples = torch.empty((samples, groups.count, 3, width), device=dy.device)
    _sum_norm_relu_collect_gradient[(samples, triton.cdiv(width, launch["columns"]), groups.count)](
        of_sample, of_location, chosen, dy, weight, bias, *statistics, of_samples, *groups.layout, width,
        launch["rows"], launch["columns"], launch["stages"], num_warps=launch["warps"],
    )  # fmt: skip
    return of_samples, add_up(of_samples)


def share_gradient(
    of_sample: Tensor,
    of_location: Tensor,
    chosen: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    groups: Groups,
    of_samples: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of what the sums were made of."""
    (locations, width), samples, count = of_location.shape, groups.samples, groups.count
    dof_sample = torch.empty_like(of_sample)
    _share_with_samples[(triton.cdiv(samples, _TILE), triton.cdiv(width, _BLOCK), count)](
        of_samples, sums, weight, statistics[1], dof_sample, *groups.layout, width, _TILE, _BLOCK,
        num_warps=4,
    )  # fmt: skip
    places = where_chosen(chosen, locations)
    num_parts = min(SHARE["parts"], triton.cdiv(samples, SHARE["rows"]))
    parts = torch.empty((count * num_parts, locations, width), device=chosen.device)
    _share_with_locations[(locations * num_parts, triton.cdiv(width, SHARE["columns"]), count)](
        of_sample, of_location, places, dy, weight, bias, *statistics, sums, parts, *groups.layout,
        num_parts, locations, width, SHARE["rows"], SHARE["columns"], SHARE["stages"],
        num_warps=SHARE["warps"],
    )  # fmt: skip
    return dof_sample, add_up(parts, of_location.dtype)


@triton.jit(do_not_specialize=["count"])
def _sum_relu(
    of_sample,
    of_location,
    chosen,
    result,
    count,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    sample, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.program_id(2) * block + tl.arange(0, block)
    real = place < count
    inside = real[:, None] & (column[None, :] < width)
    location = tl.load(chosen + sample * count + place, mask=real, other=0)
    values = tl.load(of_location + location[:, None] * width + column[None, :], mask=inside, other=0.0)
    values = (
        values.to(tl.float32) + of_column(of_sample + sample * width, column, width).to(tl.float32)[None, :]
    )
    goal = result + (sample * count + place)[:, None] * width + column[None, :]
    tl.store(goal, tl.maximum(values, 0.0).to(result.dtype.element_ty), mask=inside)


def sum_relu(of_sample: Tensor, of_location: Tensor, chosen: Tensor) -> Tensor:
    """Returns the ReLU of each sum of a sample's row and a chosen location's, (B K, width).

    Args:
        of_sample: (B, width).
        of_location: (locations, width).
        chosen: (B, K).
    """
    (batch, count), width = chosen.shape, of_sample.shape[1]
    result = of_sample.new_empty(batch * count, width)
    grid = (batch, triton.cdiv(count, _TILE), triton.cdiv(width, 2 * _BLOCK))
    _sum_relu[grid](of_sample, of_location, chosen, result, count, width, _TILE, 2 * _BLOCK, num_warps=4)
    return result
