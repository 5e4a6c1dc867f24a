"""A linear layer and GELU, by multiplications and additions alone.

With the usual erf a GPU spends more time computing than reading and writing. Both Phi(x) and the slope of
GELU, Phi(x) + x phi(x), are 1/2 plus an odd function that is as good as constant beyond 5; here each is x
times a polynomial of x^2, fitted at Chebyshev's points: right to 3e-6, its slope to 2e-5.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from stam.kernels import ideas
from stam.kernels.launching import cells, in_half, of_column, shared_grid

_EDGE, _DEGREE = 5.0, 12
# rows and columns of a tile, warps that share it, loads ahead; `benchmarks/kernels.py` tries others
FORWARD = {"rows": 16, "columns": 256, "warps": 4}
BACKWARD = {"rows": 4, "columns": 256, "warps": 8, "stages": 3}
# and, where a product is part of it, columns multiplied at once and most registers of a thread: with 128, as
# the first of them takes anyway, two programs share a processor, and one multiplies while the other writes
LINEAR = {"rows": 128, "columns": 128, "depth": 64, "warps": 8, "stages": 3}
PRODUCT = {"rows": 128, "columns": 128, "depth": 64, "warps": 8, "stages": 3, "registers": 128}


def _fit(even: Callable[[float], float]) -> list[float]:
    """Returns the polynomial in w = 2 (x / edge)^2 - 1 nearest to an even function, lowest power first."""
    points = np.cos(np.pi * (np.arange(400) + 0.5) / 400)
    values = [even(_EDGE * math.sqrt((w + 1) / 2)) for w in points]
    chebyshev = np.polynomial.chebyshev.chebfit(points, values, _DEGREE)
    return np.polynomial.chebyshev.cheb2poly(chebyshev).tolist()


_CUMULATIVE = _fit(lambda x: math.erf(x / math.sqrt(2)) / (2 * x))
_SLOPE = _fit(lambda x: math.erf(x / math.sqrt(2)) / (2 * x) + math.exp(-x * x / 2) / math.sqrt(2 * math.pi))


@triton.jit
def _half_plus_odd(x, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12):
    x = tl.minimum(tl.maximum(x, -5.0), 5.0)
    w = x * x * 0.08 - 1
    p = (((c12 * w + c11) * w + c10) * w + c9) * w + c8
    p = (((p * w + c7) * w + c6) * w + c5) * w + c4
    p = (((p * w + c3) * w + c2) * w + c1) * w + c0
    return 0.5 + x * p


@triton.jit(do_not_specialize=["rows"])
def _gelu(
    x, y, rows, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    place, inside = cells(row, column, rows, width)
    given = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    result = given * _half_plus_odd(given, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gelu_backward(
    x, dy, dx, sums, rows, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12,
    width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((tile, block), tl.float32)
    for start in tl.range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile, num_stages=stages):
        row = start + tl.arange(0, tile)
        place, inside = cells(row, column, rows, width)
        slope = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        slope = _half_plus_odd(slope, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12)
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32) * slope
        rounded = gradient.to(dx.dtype.element_ty)
        tl.store(dx + place, rounded, mask=inside)
        total += rounded.to(tl.float32)
    tl.store(sums + tl.program_id(0) * width + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def _product(left, right, row, column, rows, inner, width, depth: tl.constexpr, across: tl.constexpr):
    """Returns a tile of left right, or of left right' where `across`, in single precision."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(0, inner, depth):
        step = start + tl.arange(0, depth)
        place, inside = cells(row, step, rows, inner)
        one = tl.load(left + place, mask=inside, other=0.0)
        place = column[None, :] * inner + step[:, None] if across else step[:, None] * width + column[None, :]
        inside = (step[:, None] < inner) & (column[None, :] < width)
        total = tl.dot(one, tl.load(right + place, mask=inside, other=0.0), total)
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_gelu(
    x, weight, bias, before, y, rows, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12,
    inner: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    # programs that read the same rows follow one another
    blocks = tl.cdiv(width, block)
    row = tl.program_id(0) // blocks * tile + tl.arange(0, tile)
    column = tl.program_id(0) % blocks * block + tl.arange(0, block)
    total = _product(x, weight, row, column, rows, inner, width, depth, True)
    total += of_column(bias, column, width).to(tl.float32)[None, :]
    place, inside = cells(row, column, rows, width)
    rounded = total.to(before.dtype.element_ty)
    tl.store(before + place, rounded, mask=inside)
    given = rounded.to(tl.float32)
    result = given * _half_plus_odd(given, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _product_gelu_backward(
    dy, weight, before, dbefore, sums, rows, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12,
    inner: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, block)
    row = tl.program_id(0) // blocks * tile + tl.arange(0, tile)
    column = tl.program_id(0) % blocks * block + tl.arange(0, block)
    total = _product(dy, weight, row, column, rows, inner, width, depth, False)
    place, inside = cells(row, column, rows, width)
    slope = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
    slope = _half_plus_odd(slope, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12)
    rounded = (total * slope).to(dbefore.dtype.element_ty)
    tl.store(dbefore + place, rounded, mask=inside)
    place = sums + tl.program_id(0) // blocks * width + column
    tl.store(place, tl.sum(rounded.to(tl.float32), 0), mask=column < width)  # beyond the last row are zeros


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns GELU(W x + b) for rows (B, tokens, any), where nothing is to be learned.

    Nobody needs what GELU is applied to, and the matrix product applies it before writing; by tanh, which
    differs from erf by 5e-4 at most, less than half precision rounds.
    """
    x, weight, bias = in_half(x, weight, bias)
    return torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True).view(*x.shape[:2], -1)


def linear_gelu_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns W x + b of rows (rows, any), and GELU of it."""
    if not ideas.on("gelu"):
        before = torch.addmm(bias, x, weight.t())
        return before, gelu(before)
    x = x.contiguous()
    (rows, inner), width = x.shape, weight.shape[0]
    before, y = x.new_empty(2, rows, width)
    tile, block = LINEAR["rows"], LINEAR["columns"]
    _linear_gelu[(triton.cdiv(rows, tile) * triton.cdiv(width, block),)](
        x, weight, bias, before, y, rows, *_CUMULATIVE, inner, width, tile, block, LINEAR["depth"],
        num_warps=LINEAR["warps"], num_stages=LINEAR["stages"],
    )  # fmt: skip
    return before, y


def product_gelu_backward(dy: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `before`, where that of W GELU(before) is (rows, any), and its sums in parts.

    The parts, (programs, width), are to be added up.
    """
    if not ideas.on("gelu"):
        return gelu_backward(before, dy @ weight)
    rows, width = before.shape
    tile, block = PRODUCT["rows"], PRODUCT["columns"]
    programs = triton.cdiv(rows, tile)
    dbefore = torch.empty_like(before)
    sums = torch.empty((programs, width), device=dy.device)
    _product_gelu_backward[(programs * triton.cdiv(width, block),)](
        dy, weight, before, dbefore, sums, rows, *_SLOPE, weight.shape[0], width, tile, block,
        PRODUCT["depth"], num_warps=PRODUCT["warps"], num_stages=PRODUCT["stages"],
        maxnreg=PRODUCT["registers"],
    )  # fmt: skip
    return dbefore, sums


def gelu(x: Tensor) -> Tensor:
    """Returns GELU of (rows, width)."""
    result = torch.empty_like(x)
    rows, width = x.shape
    tile, block = FORWARD["rows"], FORWARD["columns"]
    _gelu[(triton.cdiv(rows, tile), triton.cdiv(width, block))](
        x, result, rows, *_CUMULATIVE, width, tile, block, num_warps=FORWARD["warps"]
    )
    return result


def gelu_backward(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of (rows, width), and its sum over the rows in parts (programs, width)."""
    rows, width = x.shape
    tile, block = BACKWARD["rows"], BACKWARD["columns"]
    programs, blocks = shared_grid(rows, width, tile, block, x.device)
    dx = torch.empty_like(x)
    sums = torch.empty((programs, width), device=x.device)
    _gelu_backward[(programs, blocks)](
        x, dy.contiguous(), dx, sums, rows, *_SLOPE, width, tile, block, BACKWARD["stages"],
        num_warps=BACKWARD["warps"],
    )  # fmt: skip
    return dx, sums
