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

from stam.fast.kernels.launching import cells, in_half, shared_grid

_EDGE, _DEGREE = 5.0, 12
# rows and columns of a tile, warps that share it, loads ahead; `benchmarks/kernels.py` tries others
FORWARD = {"rows": 16, "columns": 256, "warps": 4}
BACKWARD = {"rows": 4, "columns": 256, "warps": 8, "stages": 3}


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


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns GELU(W x + b) for rows (B, tokens, any), where nothing is to be learned.

    Nobody needs what GELU is applied to, and the matrix product applies it before writing; by tanh, which
    differs from erf by 5e-4 at most, less than half precision rounds.
    """
    x, weight, bias = in_half(x, weight, bias)
    return torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True).view(*x.shape[:2], -1)


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
