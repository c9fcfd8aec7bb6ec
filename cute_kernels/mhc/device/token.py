"""Coefficients of tokens: each thread loads a half of one token's row ahead of its use."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy
from ..config import WIDTH, mappings
from . import staged
from .vector import subview


@dataclass(frozen=True)
class TokenRows:
    """Global fp32 tensors with a row for each token, compact; None for those not read.

    mDh: [M, W].  mDms: [M].  mRes: [M, n²].  mPre: [M, n].
    """

    mDh: cute.Tensor
    mDms: cute.Tensor
    mRes: cute.Tensor | None
    mPre: cute.Tensor | None


@dataclass(frozen=True)
class TokenHalf:
    """A thread's half of one token's row, in registers: dH, res and pre; and dms.

    It is loaded a tile ahead, and nothing is computed from it until it is stored.
    """

    dh: cute.Tensor
    dms: cute.Tensor
    res: cute.Tensor | None
    pre: cute.Tensor | None


def registers(n: int, res: bool, pre: bool) -> TokenHalf:
    """Registers for a half of a token's row."""

    def some(count: int):
        return cute.make_rmem_tensor(cute.make_layout(count), cutlass.Float32)

    return TokenHalf(
        some(mappings(n) // 2),
        some(1),
        some(n * n // 2) if res else None,
        some(n // 2) if pre else None,
    )


@cute.jit
def load_dh(
    values: TokenHalf,
    rows: TokenRows,
    n: cutlass.Constexpr[int],
    token: cutlass.Int32,
    half: cutlass.Int32,
):
    """Load a half of a token's dH; of the last token where it is beyond that."""
    read = cutlass.Int64(cutlass.min(token, rows.mDms.shape[0] - 1))
    _load(values.dh, rows.mDh, read * WIDTH[n], half)


@cute.jit
def load_coefficients(
    values: TokenHalf,
    rows: TokenRows,
    n: cutlass.Constexpr[int],
    token: cutlass.Int32,
    half: cutlass.Int32,
):
    """Load a half of a token's res and pre, and dms; of the last token where it is beyond that."""
    read = cutlass.Int64(cutlass.min(token, rows.mDms.shape[0] - 1))
    if cutlass.const_expr(values.res is not None):
        _load(values.res, rows.mRes, read * (n * n), half)
    if cutlass.const_expr(values.pre is not None):
        _load(values.pre, rows.mPre, read * n, half)
    values.dms[0] = copy.aligned(rows.mDms, read, 1)[0]


@cute.jit
def _load(rX: cute.Tensor, mX: cute.Tensor, base: cutlass.Int64, half: cutlass.Int32):
    count = cute.size(rX)
    width = min(count, 4)
    for a in cutlass.range_constexpr(count // width):
        gAccess = copy.aligned(mX, base + half * count + a * width, width)
        subview(rX, a * width, width).store(gAccess.load())


@cute.jit
def store_dh(
    values: TokenHalf,
    sDh: cute.Tensor,
    shape: cutlass.Constexpr[tuple[int, int, int]],
    buffer: cutlass.Int32,
    tokens: cutlass.Int32,
):
    """Write this thread's half of a token's dH, in terms; zeros beyond the ``tokens`` left.

    Two threads have a token.  ``shape``: (tokens, columns, terms) of a tile.  ``buffer``: the
    tile's first term in sDh.
    """
    tidx, _, _ = cute.arch.thread_idx()
    row, column = tidx // 2, tidx % 2 * cute.size(values.dh)
    for p in cutlass.range_constexpr(cute.size(values.dh)):
        values.dh[p] = values.dh[p] if row < tokens else cutlass.Float32(0.0)
    staged.store_terms(sDh, buffer * shape[0] + row, column, values.dh, shape)


@cute.jit
def store_coefficients(
    values: TokenHalf,
    sFactor: cute.Tensor,
    sRes: cute.Tensor | None,
    sPre: cute.Tensor | None,
    k: cutlass.Int32,
):
    """Write this thread's half of a token's res and pre, and (2 / K) dms."""
    tidx, _, _ = cute.arch.thread_idx()
    row, half = tidx // 2, tidx % 2
    for rX, sX in ((values.res, sRes), (values.pre, sPre)):
        if cutlass.const_expr(rX is not None):
            count = cute.size(rX)
            staged.neighbours(sX, (2 * row + half) * count, count).store(rX.load())
    if half == 0:
        scale = cutlass.Float32(2.0) / cutlass.Float32(k)
        sFactor[row] = values.dms[0] * scale
