"""The tokens a transformer starts from: patches through a linear layer, each with the row of a table added.

The first tokens, which are read out in the end, are rows of that table alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.fast.kernels.launching import cells, in_half, padded, where_chosen
from stam.fast.kernels.sums import add_up

# rows in a tile and warps that share it, and into how many parts the samples are cut; `benchmarks/kernels.py`
# tries others
FORWARD = {"rows": 4, "warps": 2}
BACKWARD = {"rows": 8, "warps": 4, "parts": 8}


@triton.jit(do_not_specialize=["rows", "patches"])
def _assemble(
    product, table, positions, result, rows, patches,
    readout: tl.constexpr, width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, block)
    place, inside = cells(row, column, rows, width)
    sample, token = row // (readout + patches), row % (readout + patches)
    is_patch = (token >= readout) & (row < rows)
    patch = sample * patches + token - readout
    entry = tl.load(positions + patch, mask=is_patch, other=0)
    entry = tl.where(is_patch, entry + readout, token)
    values = tl.load(table + entry[:, None] * width + column[None, :], mask=inside, other=0.0)
    source = patch[:, None].to(tl.int64) * width + column[None, :]
    values += tl.load(product + source, mask=inside & is_patch[:, None], other=0.0).to(tl.float32)
    tl.store(result + place, values.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["samples", "patches"])
def _assemble_backward(
    dresult, stands, dproduct, sums, samples, patches, readout: tl.constexpr, entries: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Adds up the gradient of one row of the table, over some of the samples.

    `stands` says where a position is among a sample's patches: at `patches` if it is not. Every token has one
    row, and so is read once: with it, the gradient of the product is written.
    """
    entry, column = tl.program_id(0), tl.arange(0, block)
    total = tl.zeros((tile, block), tl.float32)
    for start in range(tl.program_id(1) * tile, samples, tl.num_programs(1) * tile):
        sample = start + tl.arange(0, tile)
        real = sample < samples
        if entry < readout:
            patch = tl.zeros((tile,), tl.int64) + entry - readout
        else:
            place = stands + sample * (entries - readout) + entry - readout
            patch = tl.load(place, mask=real, other=patches)
        there = (real & (patch < patches))[:, None] & (column[None, :] < width)
        row = sample.to(tl.int64) * (readout + patches) + readout + patch
        given = tl.load(dresult + row[:, None] * width + column[None, :], mask=there, other=0.0)
        total += given.to(tl.float32)
        row = sample.to(tl.int64) * patches + patch
        goal = dproduct + row[:, None] * width + column[None, :]
        tl.store(goal, given.to(dproduct.dtype.element_ty), mask=there & (patch >= 0)[:, None])
    place = sums + (tl.program_id(1) * entries + entry) * width + column
    tl.store(place, tl.sum(total, 0), mask=column < width)


def embed(patches: Tensor, weight: Tensor, table: Tensor, positions: Tensor, readout: int) -> Tensor:
    """Returns tokens (B, R + P, width) in half precision: R rows of the table, then W patch + another row.

    Args:
        patches: (B, P, pixels).
        weight: (width, ...), as many as pixels.
        table: The R rows, then one for each position, (R + positions, width), in single precision.
        positions: (B, P), none twice in a row.
        readout: R.
    """
    return _Embed.apply(*in_half(patches, weight), table, positions, readout)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, patches: Tensor, weight: Tensor, table: Tensor, positions: Tensor, readout: int
    ) -> Tensor:
        product = patches.flatten(0, 1) @ weight.flatten(1).t()
        ctx.save_for_backward(patches, weight, positions)
        ctx.readout, ctx.entries = readout, len(table)
        return assemble(product, table.contiguous(), positions.contiguous(), readout)

    @staticmethod
    def backward(ctx: Any, dtokens: Tensor) -> tuple[Tensor | None, ...]:
        patches, weight, positions = ctx.saved_tensors
        dproduct, parts = assemble_backward(
            dtokens.contiguous(), positions, ctx.readout, ctx.entries, weight.dtype
        )
        dweight = (dproduct.t() @ patches.flatten(0, 1)).view_as(weight)
        return None, dweight, add_up(parts), None, None


def assemble(product: Tensor, table: Tensor, positions: Tensor, readout: int) -> Tensor:
    """Returns the tokens, made of products (B P, width) and rows of the table."""
    (batch, count), width = positions.shape, table.shape[1]
    rows, tile = batch * (readout + count), FORWARD["rows"]
    tokens = torch.empty((batch, readout + count, width), dtype=product.dtype, device=table.device)
    _assemble[(triton.cdiv(rows, tile),)](
        product, table, positions, tokens, rows, count, readout, width, padded(width), tile,
        num_warps=FORWARD["warps"],
    )  # fmt: skip
    return tokens


def assemble_backward(
    dtokens: Tensor, positions: Tensor, readout: int, entries: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the products, and that of the table in parts, (parts, entries, width)."""
    (batch, count), width, tile = positions.shape, dtokens.shape[2], BACKWARD["rows"]
    stands = where_chosen(positions, entries - readout)
    num_parts = min(BACKWARD["parts"], triton.cdiv(batch, tile))
    parts = torch.empty((num_parts, entries, width), device=dtokens.device)
    dproduct = torch.empty((batch * count, width), dtype=dtype, device=dtokens.device)
    _assemble_backward[(entries, num_parts)](
        dtokens, stands, dproduct, parts, batch, count, readout, entries, width, padded(width), tile,
        num_warps=BACKWARD["warps"],
    )  # fmt: skip
    return dproduct, parts
