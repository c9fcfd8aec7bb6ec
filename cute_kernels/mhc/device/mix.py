"""Coefficients of one token in one thread: gates and Sinkhorn-Knopp, and their gradients.

Matrices are n² registers, row-major.  Sums of n neighbours: 0 + 1, 2 + 3, then those.
"""

import math

import cutlass
from cutlass import cute

LOG2E = math.log2(math.e)
ROWS, COLUMNS = "rows", "columns"


@cute.jit
def exp(x):
    """e^x"""
    return cute.math.exp2(x * cutlass.Float32(LOG2E), fastmath=True)


@cute.jit
def sigmoid(z):
    """1 / (1 + e^-z)"""
    return cute.arch.rcp_approx(cutlass.Float32(1.0) + exp(-z))


@cute.jit
def line(y: cute.Tensor, n: cutlass.Constexpr, axis: cutlass.Constexpr, at: cutlass.Constexpr):
    """The elements of one row, or of one column."""
    return [y[at * n + i] if axis == ROWS else y[i * n + at] for i in range(n)]


@cute.jit
def total(values: list):
    """Their sum, neighbours first."""
    if cutlass.const_expr(len(values) == 2):
        return values[0] + values[1]
    return (values[0] + values[1]) + (values[2] + values[3])


@cute.jit
def largest(values: list):
    """Of them; NaN is ignored here, and shows in the exponentials."""
    found = values[0]
    for value in values[1:]:
        found = cute.arch.fmax(found, value)
    return found


@cute.jit
def start(z: cute.Tensor, s: cute.Tensor, y: cute.Tensor, n: cutlass.Constexpr, epsilon):
    """s = softmax over rows of z; y = s by its columns' sums; 1 / those sums come back.

    Without an ``epsilon`` (None) a column's elements are divided by their largest in the exponent,
    so that none of finite logits is lost; with one, y = (s + eps) / (Σ (s + eps) + eps).
    """
    shifts = []
    for i in cutlass.range_constexpr(n):
        top = largest(line(z, n, ROWS, i))
        shifts.append(top)
        powers = [exp(z[i * n + j] - top) for j in range(n)]
        over = cute.arch.rcp_approx(total(powers))
        for j in cutlass.range_constexpr(n):
            s[i * n + j] = powers[j] * over
            # For the columns below.
            y[i * n + j] = over
    for j in cutlass.range_constexpr(n):
        if cutlass.const_expr(epsilon is None):
            d = [z[i * n + j] - shifts[i] for i in range(n)]
            top = largest(d)
            shifted = [exp(d[i] - top) * y[i * n + j] for i in range(n)]
            over = cute.arch.rcp_approx(total(shifted))
        else:
            shifted = [s[i * n + j] + epsilon for i in range(n)]
            over = cute.arch.rcp_approx(total(shifted) + epsilon)
        for i in cutlass.range_constexpr(n):
            y[i * n + j] = shifted[i] * over


@cute.jit
def normalise(
    y: cute.Tensor, divisors: cute.Tensor, n: cutlass.Constexpr, axis: cutlass.Constexpr, epsilon
):
    """y by the sums of its rows, or columns; ``divisors``: what it was divided by."""
    for at in cutlass.range_constexpr(n):
        divisor = total(line(y, n, axis, at))
        if cutlass.const_expr(epsilon is not None):
            divisor = divisor + epsilon
        divisors[at] = divisor
        over = cute.arch.rcp_approx(divisor)
        for i in cutlass.range_constexpr(n):
            where = at * n + i if axis == ROWS else i * n + at
            y[where] = y[where] * over


@cute.jit
def back(gradient: cute.Tensor, y: cute.Tensor, n: cutlass.Constexpr, axis: cutlass.Constexpr):
    """L of log y before its normalisation, from L of it: L - y Σ L."""
    for at in cutlass.range_constexpr(n):
        own = -total(line(gradient, n, axis, at))
        for i in cutlass.range_constexpr(n):
            where = at * n + i if axis == ROWS else i * n + at
            gradient[where] = cute.math.fma(y[where], own, gradient[where])


@cute.jit
def undo(y: cute.Tensor, divisors: list, n: cutlass.Constexpr, axis: cutlass.Constexpr):
    """y as it was before its normalisation."""
    for at in cutlass.range_constexpr(n):
        for i in cutlass.range_constexpr(n):
            where = at * n + i if axis == ROWS else i * n + at
            y[where] = y[where] * divisors[at]


@cute.jit
def logits(h: cute.Tensor, ms, weights: tuple, eps, n: cutlass.Constexpr) -> cute.Tensor:
    """z = (α / r) H + β, r = √(ms + eps); ``weights``: alpha and beta."""
    alpha, beta = weights
    r = cute.math.sqrt(ms + eps)
    z = cute.make_rmem_tensor(cute.make_layout(cute.size(h)), cutlass.Float32)
    for block in cutlass.range_constexpr(3):
        over = alpha[block] / r
        for j in cutlass.range_constexpr(*((0, n), (n, 2 * n), (2 * n, cute.size(h)))[block]):
            z[j] = cute.math.fma(over, h[j], beta[j])
    return z
