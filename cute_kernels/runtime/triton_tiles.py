"""Rows, products and column sums in a written order, for the Triton kernels of every system."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiples(sizes, ALIGN: tl.constexpr):
    """``sizes``, which the host found to be multiples of ALIGN: saying so lets loads be wide."""
    out = ()
    for i in tl.static_range(len(sizes)):
        out = out + (sizes[i] // ALIGN * ALIGN,)
    return out


@triton.jit
def load_rows(ptr, offset, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows at ``offset`` (int64), contiguous along D, as [len, BLOCK_D] with zeros elsewhere."""
    d = tl.arange(0, BLOCK_D)
    inside = is_row[:, None]
    if D != BLOCK_D:
        inside = inside & (d < D)[None, :]
    return tl.load(ptr + offset[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, rows, offset, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of ``load_rows``, with the one rounding."""
    d = tl.arange(0, BLOCK_D)
    inside = is_row[:, None]
    if D != BLOCK_D:
        inside = inside & (d < D)[None, :]
    tl.store(ptr + offset[:, None] + d[None, :], rows.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def raster(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile_m, tile_n) of a tile in the grouped raster.

    GROUP_M tile rows are walked column by column, so that L2 keeps both operands.
    """
    in_group = GROUP_M * tiles_n
    first_m = tile // in_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + tile % in_group % height, tile % in_group // height


@triton.jit
def dot_chain(
    a_ptrs,
    b_ptrs,
    a_k,
    b_k,
    in_m,
    in_n,
    K,
    acc,
    BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """acc + a [M, K] · b [K, N]: one `tl.dot` of BLOCK_K after another, k ascending.

    a_ptrs, b_ptrs: of the first BLOCK_K of K, which have the strides a_k and b_k; in_m [M, 1] and
    in_n [1, N]: the rows and columns that there are.  Zeros fill the last dot.

    UPCAST multiplies in fp32: Triton's interpreter multiplies the bit patterns of bf16.
    """
    ks = tl.arange(0, BLOCK_K)
    a_step = tl.cast(a_k, tl.int64) * BLOCK_K
    b_step = tl.cast(b_k, tl.int64) * BLOCK_K
    # (size - 1) // block + 1: size + block - 1 would overflow int32 at the largest sizes.
    steps = (K - 1) // BLOCK_K + 1
    for step in tl.range(0, steps):
        in_k = ks < K - step * BLOCK_K
        a = tl.load(a_ptrs + step * a_step, mask=in_m & in_k[None, :], other=0.0)
        b = tl.load(b_ptrs + step * b_step, mask=in_k[:, None] & in_n, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
    return acc


@triton.jit
def leaf_chain(
    leaf,
    length,
    a_ptrs,
    b_ptrs,
    a_k,
    b_k,
    in_m,
    in_n,
    K,
    zero,
    BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`dot_chain` over a leaf of K, which has ``length`` or fewer, from ``zero``.

    A leaf's blocks start at its first k and end with it, so it has its bits anywhere.
    """
    first = leaf * length
    a_leaf = a_ptrs + tl.cast(first, tl.int64) * a_k
    b_leaf = b_ptrs + tl.cast(first, tl.int64) * b_k
    size = tl.minimum(K - first, length)
    return dot_chain(
        a_leaf, b_leaf, a_k, b_k, in_m, in_n, size, zero, BLOCK_K, INPUT_PRECISION, UPCAST
    )


@triton.jit
def column_sums(
    ptrs,
    row_stride,
    in_n,
    count,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of ``count`` rows [COLUMNS]: lane l adds rows l, l + LANES, ...; then lanes 0, 1, ...

    ptrs [LANES, COLUMNS]: of the first LANES rows; in_n [1, COLUMNS]: the columns that there are.
    """
    lanes = tl.arange(0, LANES)
    stride = tl.cast(row_stride, tl.int64) * LANES
    partial = tl.full((LANES, COLUMNS), 0.0, tl.float32)
    for step in tl.range(0, (count - 1) // LANES + 1, loop_unroll_factor=UNROLL):
        in_m = (lanes < count - step * LANES)[:, None]
        partial += tl.load(ptrs + step * stride, mask=in_m & in_n, other=0.0).to(tl.float32)
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    for lane in tl.range(0, LANES):
        # A sum of one lane and zeros is that lane, in any order: lanes start at +0, so none is -0.
        total += tl.sum(tl.where((lanes == lane)[:, None], partial, 0.0), axis=0)
    return total
