"""Coefficients of one token in one thread: gates and Sinkhorn-Knopp, and their gradients.

Matrices are n² registers, row-major.  Order of a sum of n values: (0 + 1) + (2 + 3).
"""

import math

import cutlass
from cutlass import cute

LOG2E = math.log2(math.e)
ROWS, COLUMNS = "rows", "columns"


@cute.jit
def exp(x: cutlass.Float32) -> cutlass.Float32:
    """e^x."""
    return cute.math.exp2(x * cutlass.Float32(LOG2E), fastmath=True)


@cute.jit
def sigmoid(z: cutlass.Float32) -> cutlass.Float32:
    """1 / (1 + e^-z)."""
    return cute.arch.rcp_approx(cutlass.Float32(1.0) + exp(-z))


@cute.jit
def line(
    y: cute.Tensor,
    n: cutlass.Constexpr[int],
    axis: cutlass.Constexpr[str],
    index: cutlass.Constexpr[int],
) -> list[cutlass.Float32]:
    """Elements of row, or column, ``index``."""
    return [y[index * n + i] if axis == ROWS else y[i * n + index] for i in range(n)]


@cute.jit
def total(values: list[cutlass.Float32]) -> cutlass.Float32:
    """Sum of two or four values, neighbours first."""
    if cutlass.const_expr(len(values) == 2):
        return values[0] + values[1]
    return (values[0] + values[1]) + (values[2] + values[3])


@cute.jit
def largest(values: list[cutlass.Float32]) -> cutlass.Float32:
    """Maximum of the values; NaN is ignored here, and comes back in the exponentials."""
    top = values[0]
    for value in values[1:]:
        top = cute.arch.fmax(top, value)
    return top


@cute.jit
def start(
    z: cute.Tensor,
    s: cute.Tensor,
    y: cute.Tensor,
    n: cutlass.Constexpr[int],
    epsilon: cutlass.Float32 | None,
):
    """First step of Sinkhorn-Knopp: s = softmax over rows of z; y = s by the sums of its columns.

    epsilon None:  y[i, j] = s[i, j] / Σ_i s[i, j], with each column's largest exponent taken out
                   first, so that no column of finite logits underflows.
    epsilon given: y = (s + epsilon) / (Σ_i (s + epsilon) + epsilon).
    """
    shifts = []
    for i in cutlass.range_constexpr(n):
        top = largest(line(z, n, ROWS, i))
        shifts.append(top)
        powers = [exp(z[i * n + j] - top) for j in range(n)]
        over = cute.arch.rcp_approx(total(powers))
        for j in cutlass.range_constexpr(n):
            s[i * n + j] = powers[j] * over
            # 1 / (sum of row i), for the columns below.
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
    y: cute.Tensor,
    divisors: cute.Tensor,
    n: cutlass.Constexpr[int],
    axis: cutlass.Constexpr[str],
    epsilon: cutlass.Float32 | None,
):
    """divisors = sums of the rows, or columns, of y (+ epsilon); y = y / divisors."""
    for index in cutlass.range_constexpr(n):
        divisor = total(line(y, n, axis, index))
        if cutlass.const_expr(epsilon is not None):
            divisor = divisor + epsilon
        divisors[index] = divisor
        over = cute.arch.rcp_approx(divisor)
        for i in cutlass.range_constexpr(n):
            element = index * n + i if axis == ROWS else i * n + index
            y[element] = y[element] * over


@cute.jit
def back(
    gradient: cute.Tensor,
    y: cute.Tensor,
    n: cutlass.Constexpr[int],
    axis: cutlass.Constexpr[str],
):
    """Backward of ``normalise``, of the gradient L by log y: L = L - y Σ L, along ``axis``.

    ``y``: the normalised matrix.
    """
    for index in cutlass.range_constexpr(n):
        minus_sum = -total(line(gradient, n, axis, index))
        for i in cutlass.range_constexpr(n):
            element = index * n + i if axis == ROWS else i * n + index
            gradient[element] = cute.math.fma(y[element], minus_sum, gradient[element])


@cute.jit
def undo(
    y: cute.Tensor,
    divisors: list[cutlass.Float32],
    n: cutlass.Constexpr[int],
    axis: cutlass.Constexpr[str],
):
    """Undo ``normalise``: y = y divisors."""
    for index in cutlass.range_constexpr(n):
        for i in cutlass.range_constexpr(n):
            element = index * n + i if axis == ROWS else i * n + index
            y[element] = y[element] * divisors[index]


@cute.jit
def logits(
    h: cute.Tensor,
    ms: cutlass.Float32,
    mAlpha: cute.Tensor,
    mBeta: cute.Tensor,
    eps: cutlass.Float32,
    n: cutlass.Constexpr[int],
) -> cute.Tensor:
    """z = (α / r) H + β, r = √(ms + eps); α of pre, post and res."""
    r = cute.math.sqrt(ms + eps)
    z = cute.make_rmem_tensor(cute.make_layout(cute.size(h)), cutlass.Float32)
    for block in cutlass.range_constexpr(3):
        over = mAlpha[block] / r
        for j in cutlass.range_constexpr(*((0, n), (n, 2 * n), (2 * n, cute.size(h)))[block]):
            z[j] = cute.math.fma(over, h[j], mBeta[j])
    return z
