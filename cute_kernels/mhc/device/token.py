"""Coefficients of tokens: each thread loads a half of one token's row ahead of its use."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy
from ..config import WIDTH, mappings
from . import unit


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
    """A thread's half of one token's row, in registers: dH, res and pre; and (2 / K) dms."""

    dh: cute.Tensor
    factor: cute.Tensor
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
def load(
    values: TokenHalf,
    rows: TokenRows,
    n: cutlass.Constexpr[int],
    k: cutlass.Int32,
    token: cutlass.Int32,
    half: cutlass.Int32,
):
    """Load a half of a token's row; a token beyond the last one reads that one, and its dH is 0."""
    m = rows.mDms.shape[0]
    read = cutlass.Int64(cutlass.min(token, m - 1))
    loads = (
        (values.dh, rows.mDh, WIDTH[n]),
        (values.res, rows.mRes, n * n),
        (values.pre, rows.mPre, n),
    )
    for rX, mX, columns in loads:
        if cutlass.const_expr(rX is not None):
            count = cute.size(rX)
            width = min(count, 4)
            for a in cutlass.range_constexpr(count // width):
                gAccess = copy.aligned(mX, read * columns + half * count + a * width, width)
                unit.piece(rX, a * width, width).store(gAccess.load())
    scale = cutlass.Float32(2.0) / cutlass.Float32(k)
    values.factor[0] = copy.aligned(rows.mDms, read, 1)[0] * scale
    for p in cutlass.range_constexpr(cute.size(values.dh)):
        values.dh[p] = values.dh[p] if token < m else cutlass.Float32(0.0)
